// Checks the arguments of the fused gather ops, on every device.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_GATHER_CHECKS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_GATHER_CHECKS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/tensor.h"

namespace tensorflow {
namespace monolith_tf {

inline Status CheckDims(const std::vector<int64_t>& dims, int64_t num_tables) {
  TF_RETURN_IF_ERROR(CheckEqual("length of embedding_dims", static_cast<int64_t>(dims.size()),
                                "number of embedding_offsets", num_tables));
  for (size_t m = 0; m < dims.size(); ++m) {
    if (dims[m] <= 0 || dims[m] > INT32_MAX) {
      return errors::InvalidArgument("embedding_dims[", m, "] is ", dims[m],
                                     ", want a value in [1, ", INT32_MAX, "]");
    }
  }
  return OkStatus();
}

// Every offset leaves room for `dim` floats in `size`.
inline Status CheckOffsets(const Tensor& offsets, int64_t table, int64_t dim, int64_t size) {
  TF_RETURN_IF_ERROR(CheckVector("embedding_offsets", offsets));
  const auto offset = offsets.vec<int32_t>();
  for (int64_t j = 0; j < offset.size(); ++j) {
    if (offset(j) < 0 || offset(j) > size - dim) {
      return errors::InvalidArgument("embedding_offsets[", table, "][", j, "] is ", offset(j),
                                     ", but ", dim, " floats have to fit into ", size);
    }
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_FUSED_GATHER_CHECKS_H_
