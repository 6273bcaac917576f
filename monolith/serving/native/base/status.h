// A gRPC status: code and message. Code 0 is success.
#ifndef MONOLITH_SERVING_NATIVE_BASE_STATUS_H_
#define MONOLITH_SERVING_NATIVE_BASE_STATUS_H_

#include <string>
#include <utility>

namespace monolith {
namespace serving {

// Numbers as gRPC and TensorFlow number them.
enum class Code : int {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
};

struct Status {
  Status() = default;
  Status(Code status_code, std::string text) : code(status_code), message(std::move(text)) {}

  bool ok() const { return code == Code::kOk; }

  Code code = Code::kOk;
  std::string message;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_STATUS_H_
