// Memory for outputs and temporary tensors, also where TensorFlow's allocator has none.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSOR_MEMORY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSOR_MEMORY_H_

#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// These allocate a tensor, or return ResourceExhausted at once. TensorFlow's allocator for x86-64
// takes regions from the system, whose sizes are powers of two. Where it gets none it waits for 10
// seconds, several times while constants are folded, and from then on it asks for no smaller ones,
// so that tensors of a few megabytes wait and fail too. A large tensor for which there is no region
// is therefore allocated without it. Outputs of nodes that are marked so lie in memory that other
// processes can read, where that can be done (shared_tensors.h).
Status AllocateOutput(OpKernelContext* ctx, int64_t index, const TensorShape& shape,
                      Tensor** output);
Status AllocateTemp(OpKernelContext* ctx, DataType dtype, const TensorShape& shape, Tensor* temp);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSOR_MEMORY_H_
