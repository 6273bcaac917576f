// Input checks that the table kernels share.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_OP_INPUTS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_OP_INPUTS_H_

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {

// Reads a single number, whatever its shape: request times come as scalars and as [1].
template <typename T>
Status GetNumber(OpKernelContext* ctx, int input, std::string_view name, T* value) {
  const Tensor& tensor = ctx->input(input);
  if (tensor.NumElements() != 1) {
    return errors::InvalidArgument(name, " has shape ", tensor.shape().DebugString(),
                                   ", want one element");
  }
  *value = tensor.flat<T>()(0);
  return OkStatus();
}

// `values`, which are to be written to a table, have a row for each id. More rows are allowed:
// callers pad. Wider ones are not: all rows but the first would be written from other places.
inline Status CheckIdUpdates(const Tensor& values, int64_t num_ids, int64_t dim) {
  int64_t want = 0;
  TF_RETURN_IF_ERROR(MultiplySizes("size of id_values * dimension", num_ids, dim, &want));
  const int64_t found = values.NumElements();
  const bool padded =
      found > want && (values.dims() < 2 || values.shape().dim_size(values.dims() - 1) == dim);
  if (found == want || padded) return OkStatus();
  return errors::InvalidArgument("The dim doesn't match expectation. id_updates has shape ",
                                 values.shape().DebugString(), ", want ", want, " elements for ",
                                 num_ids, " ids of dimension ", dim);
}

// Where ids and floats of a fused call's K * N segments begin, shard by shard, table by table.
struct FusedOffsets {
  std::vector<int64_t> ids;     // K * N + 1
  std::vector<int64_t> floats;  // K * N + 1

  // Fails with InvalidArgument if the sizes do not fit the tables, shards and ids, or exceed int32,
  // the type of the fused ops' offsets.
  static Status Create(const Tensor& fused_slot_size, const std::vector<int64_t>& dims,
                       int64_t num_of_shards, int64_t num_ids, FusedOffsets* result) {
    const int64_t num_tables = static_cast<int64_t>(dims.size());
    TF_RETURN_IF_ERROR(CheckShards("num_of_shards", num_of_shards));
    if (fused_slot_size.dims() != 1 ||
        fused_slot_size.NumElements() != num_tables * num_of_shards) {
      return errors::InvalidArgument("fused_slot_size has shape ",
                                     fused_slot_size.shape().DebugString(), ", want [",
                                     num_tables * num_of_shards, "] for ", num_tables,
                                     " tables and ", num_of_shards, " shards");
    }
    const auto sizes = fused_slot_size.vec<int32_t>();
    int64_t total = 0;
    for (int64_t i = 0; i < sizes.size(); ++i) {
      if (sizes(i) < 0) {
        return errors::InvalidArgument("fused_slot_size[", i, "] is ", sizes(i),
                                       ", want at least 0");
      }
      total += sizes(i);
    }
    // Checks this before multiplying: memory bounds the number of ids, so products cannot overflow.
    if (total != num_ids) {
      return errors::InvalidArgument("fused_slot_size sums up to ", total,
                                     ", want the number of ids: ", num_ids);
    }
    result->ids.assign(1, 0);
    result->floats.assign(1, 0);
    for (int64_t i = 0; i < sizes.size(); ++i) {
      result->ids.push_back(result->ids.back() + sizes(i));
      result->floats.push_back(result->floats.back() + sizes(i) * dims[i % num_tables]);
    }
    if (result->floats.back() > std::numeric_limits<int32_t>::max()) {
      return errors::InvalidArgument("The embeddings have ", result->floats.back(),
                                     " floats, want at most ", std::numeric_limits<int32_t>::max());
    }
    return OkStatus();
  }
};

// The checked inputs `id` (1) and `id_split` (2) of the ops on groups. Ids may lie on a GPU.
struct RaggedIds {
  const int64_t* ids = nullptr;
  const int64_t* splits = nullptr;
  int64_t rows = 0;
  int64_t num_ids = 0;

  static Status Create(OpKernelContext* ctx, int64_t num_tables, bool many_requests,
                       RaggedIds* result) {
    const Tensor& ids = ctx->input(1);
    const Tensor& splits = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckVector("id", ids));
    TF_RETURN_IF_ERROR(CheckVector("id_split", splits));
    result->rows = splits.NumElements() - 1;
    const bool fits = many_requests
                          ? result->rows >= 0 && num_tables > 0 && result->rows % num_tables == 0
                          : result->rows == num_tables;
    if (!fits) {
      return errors::InvalidArgument(
          "The length of tensor ``id`` doesn't equal to table num. table size: ", num_tables,
          ", id_split has ", splits.NumElements(), " elements, want ", num_tables, " + 1");
    }
    TF_RETURN_IF_ERROR(CheckRowSplits("id_split", splits.vec<int64_t>(), ids.NumElements()));
    result->ids = static_cast<const int64_t*>(ids.data());
    result->splits = splits.vec<int64_t>().data();
    result->num_ids = ids.NumElements();
    return OkStatus();
  }

  int64_t size(int64_t row) const { return splits[row + 1] - splits[row]; }

  // Returns where the floats of each row begin, and their total. `dims`: of the tables.
  std::vector<int64_t> FloatOffsets(const std::vector<int64_t>& dims) const {
    const int64_t num_tables = static_cast<int64_t>(dims.size());
    std::vector<int64_t> offsets(1, 0);
    for (int64_t row = 0; row < rows; ++row) {
      offsets.push_back(offsets.back() + size(row) * dims[row % num_tables]);
    }
    return offsets;
  }
};

// `tensor`, an input of an op on a group, has as many elements as wanted.
inline Status CheckLength(const char* name, const Tensor& tensor, int64_t want) {
  if (tensor.NumElements() == want) return OkStatus();
  return errors::InvalidArgument("The length of tensor ``", name, "`` is too ",
                                 tensor.NumElements() < want ? "short" : "long", ". It has ",
                                 tensor.NumElements(), " elements, want ", want);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_OP_INPUTS_H_
