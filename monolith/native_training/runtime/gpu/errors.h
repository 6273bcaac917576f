// Error codes of the C interface, with a text for each thread.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_ERRORS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_ERRORS_H_

#include <exception>
#include <new>
#include <string>

#include "monolith/native_training/runtime/gpu/c_api.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

// Returns the error of a call from the function around it.
#define MONO_GPU_TRY(call)                                  \
  do {                                                      \
    const int mono_gpu_code = (call);                       \
    if (mono_gpu_code != MONO_GPU_OK) return mono_gpu_code; \
  } while (false)

namespace monolith {
namespace gpu {

// Keeps the text for mono_gpu_last_error and returns `code`.
int Fail(int code, const std::string& message);

#if defined(__CUDACC__)
inline int CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return MONO_GPU_OK;
  return Fail(
      error == cudaErrorMemoryAllocation ? MONO_GPU_OUT_OF_MEMORY : MONO_GPU_CUDA_ERROR,
      std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}
#endif

// Runs function() so that no exception crosses the C interface.
template <typename Function>
int Guard(const Function& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Fail(MONO_GPU_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, error.what());
  }
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_ERRORS_H_
