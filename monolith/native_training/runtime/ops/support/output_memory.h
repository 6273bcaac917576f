// Whether there is memory for an output.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_MEMORY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_MEMORY_H_

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Returns ResourceExhausted for a large output for which the system has no memory now, and of a
// size that the allocator has not had before. TensorFlow's allocator for x86-64 would wait 10
// seconds for memory to be freed, and is asked several times while constants are folded.
Status CheckOutputMemory(OpKernelContext* ctx, int output, const TensorShape& shape);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_MEMORY_H_
