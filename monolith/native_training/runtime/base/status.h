// The result of an engine call. The engine knows no TensorFlow; the op layer turns a Status into
// the status type of its framework (the codes have the same names there).
//
// Error policy of the engine:
//   - What can fail returns a Status. Memory that is missing for rows and indexes is an error of
//     that kind too. Where it is missing for what a call needs on the way, std::bad_alloc is thrown
//     (std::system_error where a thread cannot be had): nothing stays locked, and the table is as
//     usable as before.
//   - Arguments are checked before anything changes. After an error of a write a table holds all,
//     some or none of the batch, each row whole, and can be used on.
//   - A save that fails leaves the set of files that was there, a load that fails the content of
//     the table.
//   - A message names the thing, the value found and the value wanted. Files are named by path.
//   - What an operator has to know although the call succeeds goes to Log() (base/log.h), once.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_STATUS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_STATUS_H_

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
  kNotFound,
  kPermissionDenied,
  kUnavailable,
  kDataLoss,  // a file is not what was written
  kInternal,  // the device failed
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
  static Status NotFound(std::string text) { return {StatusCode::kNotFound, std::move(text)}; }
  static Status DataLoss(std::string text) { return {StatusCode::kDataLoss, std::move(text)}; }
  static Status Internal(std::string text) { return {StatusCode::kInternal, std::move(text)}; }
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_STATUS_H_
