// Tensors in memory that another process of the machine can read, so that a parcel need not copy
// them.
//
//   kernel marked so ---- AllocateShared ---> tensor in a segment
//   MonolithPackParcel -- SendShared -------> ticket, by a message ---> OpenSegment, elsewhere
//
// The memory is used again once the tensor is gone and its reader is done.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_SHARED_TENSORS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_SHARED_TENSORS_H_

#include <cstdint>

#include "monolith/native_training/runtime/distribution/shared_segment.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {

// Smaller data are copied: memory of their own would cost more.
constexpr int64_t kMinSharedBytes = 1 << 15;

// False with MONOLITH_SHARED_MEMORY=0 in the environment.
bool MayMemoryBeShared();

// Whether the outputs of a kernel are to lie in shared memory: its node has the attribute
// "_monolith_shared".
bool WantsSharedOutputs(OpKernelContext* ctx);

// Makes a tensor of a type whose values are plain bytes. False where it is small, or where no such
// memory is to be had.
bool AllocateShared(DataType dtype, const TensorShape& shape, Tensor* tensor);

// Lets another process read a tensor, once. False if it was not made by AllocateShared, is only a
// part of what was, or was sent before.
bool SendShared(const Tensor& tensor, ::monolith::distribution::SegmentTicket* ticket);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_SHARED_TENSORS_H_
