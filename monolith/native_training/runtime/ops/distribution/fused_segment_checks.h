// Checks the arguments of the fused segment ops, on every device.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_SEGMENT_CHECKS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_SEGMENT_CHECKS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {

// One table of the fused reduce-and-split: its row splits and the slices of its columns.
struct SplitTable {
  const int32_t* splits;
  int64_t first_slice;
  int64_t num_slices;
};

// Where the row splits of each table lie in the concatenation, checked: every table has the same
// batch.
inline Status CheckStarts(const std::vector<int64_t>& row_split_splits, int64_t num_tables,
                          int64_t* batch) {
  TF_RETURN_IF_ERROR(CheckEqual("length of row_split_splits",
                                static_cast<int64_t>(row_split_splits.size()),
                                "number of tables + 1", num_tables + 1));
  if (row_split_splits[0] != 0) {
    return errors::InvalidArgument("row_split_splits[0] is ", row_split_splits[0], ", want 0");
  }
  TF_RETURN_IF_ERROR(CheckRowSplits("row_split_splits", row_split_splits, -1));
  *batch = row_split_splits[1] - row_split_splits[0] - 1;
  for (int64_t i = 0; i < num_tables; ++i) {
    const int64_t length = row_split_splits[i + 1] - row_split_splits[i];
    if (length < 1 || length - 1 != *batch) {
      return errors::InvalidArgument("table ", i, " has ", length, " row splits, want ", *batch + 1,
                                     " as table 0 (and at least 1)");
    }
  }
  return OkStatus();
}

// Matches tables with their row splits, whose values are not looked at, and slices.
inline Status ReadTables(const Tensor& splits, const std::vector<int64_t>& row_split_splits,
                         const std::vector<int64_t>& slice_dims, const OpInputList& updates,
                         std::vector<SplitTable>* tables) {
  TF_RETURN_IF_ERROR(CheckVector("splits", splits));
  TF_RETURN_IF_ERROR(CheckEqual("length of splits", splits.dim_size(0), "last of row_split_splits",
                                row_split_splits.back()));
  int64_t slice = 0;
  const int64_t num_slices = static_cast<int64_t>(slice_dims.size());
  for (int i = 0; i < updates.size(); ++i) {
    const Tensor& update = updates[i];
    TF_RETURN_IF_ERROR(CheckMatrix("updates", update));
    SplitTable table{static_cast<const int32_t*>(splits.data()) + row_split_splits[i], slice, 0};
    int64_t width = 0;
    while (width < update.dim_size(1) && slice < num_slices) width += slice_dims[slice++];
    if (width != update.dim_size(1)) {
      return errors::InvalidArgument("updates[", i, "] has width ", update.dim_size(1),
                                     ", its slice_dims add up to ", width);
    }
    table.num_slices = slice - table.first_slice;
    tables->push_back(table);
  }
  return CheckEqual("number of slice_dims", num_slices, "slices the updates are cut into", slice);
}

// The row splits of every table, `splits` being all of them.
inline Status CheckTableSplits(const int32_t* splits, const std::vector<int64_t>& row_split_splits,
                               const OpInputList& updates) {
  for (int i = 0; i < updates.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckRowSplits("splits", splits + row_split_splits[i],
                                      row_split_splits[i + 1] - row_split_splits[i],
                                      updates[i].dim_size(0)));
  }
  return OkStatus();
}

inline Status CheckSliceDims(const std::vector<int64_t>& slice_dims, int64_t num_slices) {
  TF_RETURN_IF_ERROR(CheckEqual("length of slice_dims", static_cast<int64_t>(slice_dims.size()),
                                "number of slices", num_slices));
  for (size_t i = 0; i < slice_dims.size(); ++i) {
    if (slice_dims[i] <= 0 || slice_dims[i] > INT32_MAX) {
      return errors::InvalidArgument("slice_dims[", i, "] is ", slice_dims[i],
                                     ", want a value in [1, ", INT32_MAX, "]");
    }
  }
  return OkStatus();
}

// The arguments of one of the sums, and the shape of its output. Indices are not looked at.
template <typename Index>
Status CheckSegmentSum(int i, const Tensor& indices, const Tensor& updates, const Tensor& shape,
                       TensorShape* out) {
  if (!(indices.dims() == 1 || (indices.dims() == 2 && indices.dim_size(1) == 1))) {
    return errors::InvalidArgument("indices[", i, "] has shape ", indices.shape().DebugString(),
                                   ", want a vector");
  }
  if (updates.dims() < 1) {
    return errors::InvalidArgument("updates[", i, "] is a scalar, want at least a vector");
  }
  if (shape.dims() != 1 || shape.NumElements() < 1) {
    return errors::InvalidArgument("shape[", i, "] has shape ", shape.shape().DebugString(),
                                   ", want a vector with at least one element");
  }
  if ((indices.NumElements() == 0) != (updates.NumElements() == 0)) {
    return errors::InvalidArgument("indices[", i, "] has ", indices.NumElements(),
                                   " elements and updates[", i, "] has ", updates.NumElements(),
                                   ": both or neither must be empty");
  }
  TF_RETURN_IF_ERROR(TensorShapeUtils::MakeShape(shape.vec<Index>(), out));
  if (indices.NumElements() == 0) return OkStatus();
  TensorShape want = *out;
  TF_RETURN_IF_ERROR(want.SetDimWithStatus(0, indices.NumElements()));
  if (updates.shape() == want) return OkStatus();
  return errors::InvalidArgument("updates[", i, "] has shape ", updates.shape().DebugString(),
                                 ", want ", want.DebugString(), " for ", indices.NumElements(),
                                 " indices and shape ", out->DebugString());
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_SEGMENT_CHECKS_H_
