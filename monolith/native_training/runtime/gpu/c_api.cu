// The part of the C interface that is no op: version, errors, memory.
#include <cstdlib>
#include <cstring>

#include "monolith/native_training/runtime/gpu/c_api.h"
#include "monolith/native_training/runtime/gpu/errors.h"
#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {
namespace {

std::string& LastError() {
  static thread_local std::string message;
  return message;
}

}  // namespace

int Fail(int code, const std::string& message) {
  LastError() = message;
  return code;
}

}  // namespace gpu
}  // namespace monolith

using ::monolith::gpu::Fail;
#if defined(__CUDACC__)
using ::monolith::gpu::CheckCuda;
#endif

int mono_gpu_version(void) { return MONO_GPU_VERSION; }

const char* mono_gpu_last_error(void) { return ::monolith::gpu::LastError().c_str(); }

#if defined(__CUDACC__)

int mono_gpu_device_count(int32_t* count) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  *count = error == cudaSuccess ? devices : 0;
  return CheckCuda(error, "counting CUDA devices");
}

int mono_gpu_copy(void* stream, const void* from, void* to, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
  return CheckCuda(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
      "copy on the device");
}

int mono_gpu_read(void* stream, const void* from, void* to, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
  return CheckCuda(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)),
      "copy to the host");
}

int mono_gpu_read_now(const void* from, void* to, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
  return CheckCuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy to the host");
}

int mono_gpu_allocate(int64_t bytes, void** memory) {
  return CheckCuda(cudaMalloc(memory, bytes > 0 ? bytes : 1), "allocation");
}

int mono_gpu_free(void* memory) { return CheckCuda(cudaFree(memory), "deallocation"); }

int mono_gpu_write_now(const void* from, void* to, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
  return CheckCuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
}

int mono_gpu_synchronize(void* stream) {
  return CheckCuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "synchronization");
}

#else

namespace {

int Copy(const void* from, void* to, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return MONO_GPU_OK;
}

}  // namespace

int mono_gpu_device_count(int32_t* count) {
  *count = 0;
  return MONO_GPU_OK;
}

int mono_gpu_copy(void*, const void* from, void* to, int64_t bytes) {
  return Copy(from, to, bytes);
}

int mono_gpu_read(void*, const void* from, void* to, int64_t bytes) {
  return Copy(from, to, bytes);
}

int mono_gpu_read_now(const void* from, void* to, int64_t bytes) { return Copy(from, to, bytes); }

int mono_gpu_allocate(int64_t bytes, void** memory) {
  *memory = std::aligned_alloc(256, (bytes / 256 + 1) * 256);
  return *memory != nullptr ? MONO_GPU_OK : Fail(MONO_GPU_OUT_OF_MEMORY, "out of memory");
}

int mono_gpu_free(void* memory) {
  std::free(memory);
  return MONO_GPU_OK;
}

int mono_gpu_write_now(const void* from, void* to, int64_t bytes) { return Copy(from, to, bytes); }

int mono_gpu_synchronize(void*) { return MONO_GPU_OK; }

#endif
