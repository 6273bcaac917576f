// The limit of the clip ops.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_CLIP_NORM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_CLIP_NORM_H_

#include "monolith/native_training/runtime/ops/support/op_checks.h"

namespace tensorflow {
namespace monolith_tf {

// Rejects NaN too.
inline Status ReadClipNorm(const Tensor& tensor, float* clip_norm) {
  TF_RETURN_IF_ERROR(CheckScalar("clip_norm", tensor));
  *clip_norm = tensor.scalar<float>()();
  if (*clip_norm >= 0) return OkStatus();
  return errors::InvalidArgument("clip_norm is ", *clip_norm, ", want at least 0");
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_CLIP_NORM_H_
