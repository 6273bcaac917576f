// TensorFlow's status as ours; the codes have the same numbers.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_TENSORFLOW_STATUS_H_
#define MONOLITH_SERVING_NATIVE_MODEL_TENSORFLOW_STATUS_H_

#include <string>

#include "monolith/serving/native/base/status.h"
#include "tensorflow/core/platform/status.h"

namespace monolith {
namespace serving {

inline Status FromTensorFlow(const tensorflow::Status& status) {
  if (status.ok()) return Status();
  return Status(static_cast<Code>(status.code()), std::string(status.message()));
}

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_TENSORFLOW_STATUS_H_
