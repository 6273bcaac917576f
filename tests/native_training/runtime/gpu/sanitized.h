// Sizes for tests that run under compute-sanitizer.
#ifndef MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_SANITIZED_H_
#define MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_SANITIZED_H_

#include <cstdlib>
#include <cstring>

namespace monolith {
namespace gpu {

// Launches and allocations take a hundred times as long there, so tests make fewer and smaller
// ones, of every kind.
inline bool IsSanitized() {
  const char* const value = std::getenv("MONOLITH_SANITIZED");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

template <typename T>
T Sized(T usual, T sanitized) {
  return IsSanitized() ? sanitized : usual;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_SANITIZED_H_
