// Calls from kernels into the Python of the same process.
//
// The op library brings no gRPC of its own (TensorFlow links one already, hidden inside it), so
// what talks to serving processes is written in Python. A process that never imported that module
// has no host: calls fail with Unimplemented.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_HOST_CALL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_HOST_CALL_H_

#include <string>
#include <string_view>

#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Calls `method` of the host with two byte strings and waits for its answer. The error of a host
// function carries its code and message. Thread-safe.
Status CallHost(std::string_view method, std::string_view first, std::string_view second,
                std::string* reply);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_HOST_CALL_H_
