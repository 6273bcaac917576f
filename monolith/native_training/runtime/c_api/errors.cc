#include "monolith/native_training/runtime/c_api/errors.h"

namespace monolith {
namespace engine {
namespace {

// A copy would need memory, which may be what is missing.
thread_local const char* fixed_error = "";
thread_local std::string last_error;

}  // namespace

int Fail(int code, std::string message) noexcept {
  last_error = std::move(message);
  fixed_error = nullptr;
  return code;
}

int FailForMemory() noexcept {
  fixed_error = "out of memory";
  return MONO_OUT_OF_MEMORY;
}

int CodeOf(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return MONO_OK;
    case StatusCode::kInvalidArgument:
      return MONO_INVALID_ARGUMENT;
    case StatusCode::kFailedPrecondition:
      return MONO_FAILED_PRECONDITION;
    case StatusCode::kResourceExhausted:
      return MONO_OUT_OF_MEMORY;
    case StatusCode::kUnimplemented:
      return MONO_UNIMPLEMENTED;
    case StatusCode::kNotFound:
      return MONO_NOT_FOUND;
    case StatusCode::kPermissionDenied:
      return MONO_PERMISSION_DENIED;
    case StatusCode::kUnavailable:
      return MONO_UNAVAILABLE;
    case StatusCode::kDataLoss:
      return MONO_DATA_LOSS;
    case StatusCode::kInternal:
      break;
  }
  return MONO_INTERNAL;
}

const char* LastError() { return fixed_error != nullptr ? fixed_error : last_error.c_str(); }

}  // namespace engine
}  // namespace monolith
