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

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_OP_INPUTS_H_
