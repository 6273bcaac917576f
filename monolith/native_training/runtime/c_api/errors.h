// Error codes of the C interface, with a text for each thread.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_ERRORS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_ERRORS_H_

#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/c_api/table_c_api.h"

namespace monolith {
namespace engine {

// Keep the text for mono_last_error and return the code.
int Fail(int code, std::string message) noexcept;
int FailForMemory() noexcept;

int CodeOf(StatusCode code);
const char* LastError();

// Runs function(), which returns a Status, so that no exception crosses the C interface.
template <typename Function>
int Guard(const Function& function) noexcept {
  try {
    Status status = function();
    return status.ok() ? MONO_OK : Fail(CodeOf(status.code), std::move(status.message));
  } catch (const std::bad_alloc&) {
    return FailForMemory();
  } catch (const std::system_error& error) {
    // A thread cannot be had.
    try {
      return Fail(MONO_OUT_OF_MEMORY, error.what());
    } catch (...) {
      return FailForMemory();
    }
  } catch (const std::exception& error) {
    try {
      return Fail(MONO_INTERNAL, error.what());
    } catch (...) {
      return FailForMemory();
    }
  } catch (...) {
    return FailForMemory();
  }
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_ERRORS_H_
