// Lets kernels call the engine: its status becomes TensorFlow's, TensorFlow's threads its own.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_ENGINE_BRIDGE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_ENGINE_BRIDGE_H_

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

namespace engine = ::monolith::engine;

inline Status FromEngine(const engine::Status& status) {
  switch (status.code) {
    case engine::StatusCode::kOk:
      return OkStatus();
    case engine::StatusCode::kInvalidArgument:
      return errors::InvalidArgument(status.message);
    case engine::StatusCode::kFailedPrecondition:
      return errors::FailedPrecondition(status.message);
    case engine::StatusCode::kResourceExhausted:
      return errors::ResourceExhausted(status.message);
    case engine::StatusCode::kUnimplemented:
      // A table's limits depend on its configuration, so the caller's argument is wrong.
      return errors::InvalidArgument(status.message);
    case engine::StatusCode::kNotFound:
      return errors::NotFound(status.message);
    case engine::StatusCode::kPermissionDenied:
      return errors::PermissionDenied(status.message);
    case engine::StatusCode::kUnavailable:
      return errors::Unavailable(status.message);
    case engine::StatusCode::kDataLoss:
      return errors::DataLoss(status.message);
    case engine::StatusCode::kInternal:
      break;
  }
  return errors::Internal(status.message);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_ENGINE_BRIDGE_H_
