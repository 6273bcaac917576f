// The result of an engine call. The engine knows no TensorFlow; the op layer turns a Status into
// the status type of its framework (the codes have the same names there).
//
// Errors of the caller come as a Status. Memory that is missing for rows and indexes does too;
// where it is missing for what a call needs on the way, std::bad_alloc is thrown (std::system_error
// where a thread cannot be had), nothing stays locked, and the table is as usable as before.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_STATUS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_STATUS_H_

#include <string>
#include <utility>

namespace monolith {
namespace engine {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,
  kFailedPrecondition,
  kResourceExhausted,
  kUnimplemented,
};

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }

  static Status Ok() { return {}; }
  static Status InvalidArgument(std::string text) {
    return {StatusCode::kInvalidArgument, std::move(text)};
  }
  static Status FailedPrecondition(std::string text) {
    return {StatusCode::kFailedPrecondition, std::move(text)};
  }
  static Status ResourceExhausted(std::string text) {
    return {StatusCode::kResourceExhausted, std::move(text)};
  }
  static Status Unimplemented(std::string text) {
    return {StatusCode::kUnimplemented, std::move(text)};
  }
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_STATUS_H_
