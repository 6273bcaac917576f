// Where MonolithAlignedFlatConcat puts its tensors.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_ALIGNED_FLAT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_ALIGNED_FLAT_H_

#include <cstdint>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tensorflow {
namespace monolith_tf {

// Returns where each tensor starts, then the length of the whole buffer, in floats.
inline std::vector<int64_t> AlignedOffsets(const OpInputList& inputs) {
  constexpr int64_t kAlignment = EIGEN_MAX_ALIGN_BYTES / sizeof(float);
  std::vector<int64_t> offsets = {0};
  for (const Tensor& input : inputs) {
    const int64_t blocks = (input.NumElements() + kAlignment - 1) / kAlignment;
    offsets.push_back(offsets.back() + blocks * kAlignment);
  }
  return offsets;
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_ALIGNED_FLAT_H_
