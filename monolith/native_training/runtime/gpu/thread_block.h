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

constexpr int kWarp = 32;
constexpr int kWarps = kLanes / kWarp;

struct ThreadBlock {
  int64_t number;
  void* memory;  // aligned to 16 bytes; of any content at first

  // What lies `bytes` behind the begin of the memory.
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

  // Replaces the kLanes values by the sums of those before each.
  MONO_DEVICE void SumBefore(uint32_t* values) const {
#if defined(__CUDACC__)
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const uint32_t own = values[threadIdx.x];
    uint32_t sum = own;
    MONO_UNROLL
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == kWarp - 1) values[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
    for (int w = 0; w < warp; ++w) before += values[w];
    __syncthreads();
    values[threadIdx.x] = before + sum - own;
    __syncthreads();
#else
    uint32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t own = values[lane];
      values[lane] = sum;
      sum += own;
    }
#endif
  }

  // Numbers n items, those with one digit in order. Warp w has the items [w * share, (w + 1) *
  // share) and a counter for each digit, counters[w * digits + digit]. For every item whose
  // digit_of(load(i)) is not negative, put(i, load(i), digit, number) is called with the counter,
  // which then counts it.
  template <typename Load, typename DigitOf, typename Put>
  MONO_DEVICE void CountInOrder(int64_t n, int64_t share, uint16_t* counters, int64_t digits,
                                const Load& load, const DigitOf& digit_of, const Put& put) const {
#if defined(__CUDACC__)
    constexpr uint32_t kAll = 0xffffffffu;
    constexpr int kAhead = 8;  // loads of a lane that are on their way while others are counted
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t begin = warp * share;
    const int64_t end = begin + share < n ? begin + share : n;
    uint16_t* const own = counters + warp * digits;
    uint32_t items[kAhead], next[kAhead];
    MONO_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const int64_t i = begin + k * kWarp + lane;
      next[k] = i < end ? load(i) : 0;
    }
    for (int64_t first = begin; first < end; first += kAhead * kWarp) {
      MONO_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        items[k] = next[k];
        const int64_t i = first + (kAhead + k) * kWarp + lane;
        next[k] = i < end ? load(i) : 0;
      }
      MONO_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int64_t i = first + k * kWarp + lane;
        if (first + k * kWarp >= end) break;  // for the whole warp
        const int digit = i < end ? digit_of(items[k]) : -1;
        const bool counts = digit >= 0;
        const uint32_t peers = __match_any_sync(kAll, counts ? digit : -1 - lane);
        const uint32_t before = peers & ((1u << lane) - 1);
        const uint32_t counted = counts ? own[digit] : 0;
        __syncwarp();
        if (counts && before == 0) own[digit] = static_cast<uint16_t>(counted + __popc(peers));
        __syncwarp();
        if (counts) put(i, items[k], digit, counted + static_cast<uint32_t>(__popc(before)));
      }
    }
    __syncthreads();
#else
    for (int warp = 0; warp < kWarps; ++warp) {
      for (int64_t i = warp * share; i < std::min(n, (warp + 1) * share); ++i) {
        const uint32_t item = load(i);
        const int digit = digit_of(item);
        if (digit >= 0) put(i, item, digit, uint32_t{counters[warp * digits + digit]++});
      }
    }
#endif
  }
};

#if defined(__CUDACC__)
template <typename Program>
__global__ void __launch_bounds__(kLanes, MinBlocks<Program>::value) BlockKernel(Program program) {
  extern __shared__ uint4 block_memory[];
  program(ThreadBlock{static_cast<int64_t>(blockIdx.x), block_memory});
}
#endif

// Calls program(block) for so many blocks, each with so much memory.
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
