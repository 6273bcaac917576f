// Blocks: kLanes lanes that share memory. A program is a row of steps, and no lane begins one
// before all have ended the last. Without nvcc the steps are loops over the lanes, so that the same
// programs are tested where there is no GPU.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_THREAD_BLOCK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_THREAD_BLOCK_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

struct ThreadBlock {
  int64_t number;
  void* memory;  // aligned to 16 bytes; of any content at first

  // Returns the address `bytes` behind the begin of the memory.
  template <typename T>
  MONO_DEVICE T* At(int64_t bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory) + bytes);
  }

  // Calls step(lane).
  template <typename Step>
  MONO_DEVICE void Each(const Step& step) const {
#if defined(__CUDACC__)
    step(static_cast<int>(threadIdx.x));
    __syncthreads();
#else
    for (int lane = 0; lane < kLanes; ++lane) step(lane);
#endif
  }
};

#if defined(__CUDACC__)
template <typename Program>
__global__ void __launch_bounds__(kLanes, MinBlocks<Program>::value)
    BlockKernel(__grid_constant__ const Program program) {
  extern __shared__ uint4 block_memory[];
  program(ThreadBlock{static_cast<int64_t>(blockIdx.x), block_memory});
}
#endif

// Calls program(block) for `blocks` blocks, each with `bytes` of memory.
template <typename Program>
int ForBlocks(Stream stream, int64_t blocks, int64_t bytes, const Program& program) {
  if (blocks <= 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  constexpr int64_t kWithoutAsking = 48 << 10;
  if (bytes > kWithoutAsking) {
    MONO_GPU_TRY(CheckCuda(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(&BlockKernel<Program>),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "shared memory of a kernel"));
  }
  BlockKernel<Program><<<static_cast<unsigned>(blocks), kLanes, static_cast<size_t>(bytes),
                         static_cast<cudaStream_t>(stream)>>>(program);
  return CheckCuda(cudaGetLastError(), "launch of a kernel");
#else
  (void)stream;
  std::vector<uint64_t> memory((bytes + 7) / 8 + 1);
  // Aligned as on the device.
  void* const start =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  for (int64_t block = 0; block < blocks; ++block) {
    std::fill(memory.begin(), memory.end(), UINT64_C(0xcdcdcdcdcdcdcdcd));
    program(ThreadBlock{block, start});
  }
  return MONO_GPU_OK;
#endif
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_THREAD_BLOCK_H_
