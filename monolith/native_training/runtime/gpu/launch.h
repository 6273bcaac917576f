// How work gets to the device: launches, uploads, fills. Without nvcc the same functions are loops
// that add in the same order, so that the kernels can be tested where there is no GPU.
//
// Work is cut into tiles of kLanes lanes. A functor is called for every (tile, lane), in any order;
// lanes neither wait for one another nor share memory, except inside `Sum`.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAUNCH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAUNCH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "monolith/native_training/runtime/gpu/errors.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define MONO_DEVICE __device__ __forceinline__
// Before a loop over arrays that are to stay in registers.
#define MONO_UNROLL _Pragma("unroll")
#define MONO_ROLLED _Pragma("unroll 1")
#else
#define MONO_DEVICE inline
#define MONO_UNROLL
#define MONO_ROLLED
#endif

namespace monolith {
namespace gpu {

using Stream = void*;

constexpr int kLanes = 256;
// Blocks of a sum: a few for each multiprocessor, and the same number on every device, since the
// order of the sum depends on it.
constexpr int64_t kSumBlocks = 1024;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks that a multiprocessor is to hold at least, which bounds the registers of a lane; a functor
// may say so.
template <typename Functor, typename = void>
struct MinBlocks {
  static constexpr int value = 0;  // as the compiler likes
};
template <typename Functor>
struct MinBlocks<Functor, std::void_t<decltype(Functor::kMinBlocks)>> {
  static constexpr int value = Functor::kMinBlocks;
};

#if defined(__CUDACC__)

template <typename Functor>
__global__ void __launch_bounds__(kLanes, MinBlocks<Functor>::value)
    TileKernel(int64_t tiles, Functor functor) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    functor(tile, static_cast<int>(threadIdx.x));
  }
}

// Sums one value per lane; lane 0 gets the result.
__device__ __forceinline__ double SumOfLanes(double value, double* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int width = kLanes / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
    __syncthreads();
  }
  const double sum = shared[0];
  __syncthreads();
  return sum;
}

template <typename Term, typename Finish>
__global__ void __launch_bounds__(kLanes)
    SumKernel(int64_t tiles, Term term, Finish finish, double* partial, uint32_t* finished) {
  __shared__ double shared[kLanes];
  __shared__ bool last;
  double sum = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    sum += term(tile, static_cast<int>(threadIdx.x));
  }
  sum = SumOfLanes(sum, shared);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  sum = 0;
  for (uint32_t block = threadIdx.x; block < gridDim.x; block += kLanes) {
    sum += *static_cast<volatile double*>(partial + block);
  }
  sum = SumOfLanes(sum, shared);
  if (threadIdx.x == 0) finish(sum);
}

#endif

// Calls functor(tile, lane) for all tiles.
template <typename Functor>
int ForTiles(Stream stream, int64_t tiles, const Functor& functor) {
  if (tiles <= 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{1} << 30));
  TileKernel<Functor><<<grid, kLanes, 0, static_cast<cudaStream_t>(stream)>>>(tiles, functor);
  return CheckCuda(cudaGetLastError(), "launch of a kernel");
#else
  (void)stream;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int lane = 0; lane < kLanes; ++lane) functor(tile, lane);
  }
  return MONO_GPU_OK;
#endif
}

template <typename Functor>
struct EachItem {
  int64_t n;
  Functor functor;

  static constexpr int kMinBlocks = MinBlocks<Functor>::value;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t item = tile * kLanes + lane;
    if (item < n) functor(item);
  }
};

// Calls functor(i) for all i in [0, n).
template <typename Functor>
int ForEach(Stream stream, int64_t n, const Functor& functor) {
  return ForTiles(stream, CeilDiv(n, kLanes), EachItem<Functor>{n, functor});
}

template <typename First, typename Second>
struct TwoKinds {
  int64_t first_tiles;
  First first;
  Second second;

  static constexpr int kMinBlocks = MinBlocks<First>::value;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (tile < first_tiles) {
      first(tile, lane);
    } else {
      second(tile - first_tiles, lane);
    }
  }
};

// Calls two functors for tiles of their own, in one launch.
template <typename First, typename Second>
int ForTiles(Stream stream, int64_t first_tiles, const First& first, int64_t second_tiles,
             const Second& second) {
  return ForTiles(stream, first_tiles + second_tiles,
                  TwoKinds<First, Second>{first_tiles, first, second});
}

// Calls finish(sum of term(tile, lane)) once. Block b of min(tiles, kSumBlocks) adds the tiles b,
// b + blocks, ...; then its lanes, then the blocks are added as trees. `partial` has kSumBlocks
// elements, *finished is 0.
template <typename Term, typename Finish>
int Sum(Stream stream, int64_t tiles, const Term& term, const Finish& finish, double* partial,
        uint32_t* finished) {
  const int64_t blocks = std::max<int64_t>(1, std::min(tiles, kSumBlocks));
#if defined(__CUDACC__)
  SumKernel<Term, Finish>
      <<<static_cast<unsigned>(blocks), kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
          tiles, term, finish, partial, finished);
  return CheckCuda(cudaGetLastError(), "launch of a sum");
#else
  (void)stream, (void)finished;
  double lanes[kLanes];
  const auto tree = [&lanes] {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  };
  for (int64_t block = 0; block < blocks; ++block) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = 0;
      for (int64_t tile = block; tile < tiles; tile += blocks) lanes[lane] += term(tile, lane);
    }
    partial[block] = tree();
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = 0;
    for (int64_t block = lane; block < blocks; block += kLanes) lanes[lane] += partial[block];
  }
  finish(tree());
  return MONO_GPU_OK;
#endif
}

// Copies from the host. Pageable memory is staged before this returns, so `from` may go.
inline int CopyToDevice(Stream stream, const void* from, void* to, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  return CheckCuda(
      cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
      "upload of arguments");
#else
  (void)stream;
  std::memcpy(to, from, bytes);
  return MONO_GPU_OK;
#endif
}

// Copies to the host and waits for it.
inline int CopyToHost(Stream stream, const void* from, void* to, int64_t bytes) {
#if defined(__CUDACC__)
  MONO_GPU_TRY(CheckCuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                         cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)),
                         "copy to the host"));
  return CheckCuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "synchronization");
#else
  (void)stream;
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return MONO_GPU_OK;
#endif
}

// Sets every byte.
inline int FillBytes(Stream stream, void* to, int value, int64_t bytes) {
  if (bytes <= 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  return CheckCuda(cudaMemsetAsync(to, value, bytes, static_cast<cudaStream_t>(stream)), "fill");
#else
  (void)stream;
  std::memset(to, value, bytes);
  return MONO_GPU_OK;
#endif
}

// Reads what no kernel writes while this one runs, so that it is read once.
template <typename T>
MONO_DEVICE T ReadOnly(const T* from) {
#if defined(__CUDACC__)
  return __ldg(from);
#else
  return *from;
#endif
}

// Sets a word of the workspace. Many may do so: only the first write.
MONO_DEVICE void MarkBad(int32_t* bad) {
#if defined(__CUDACC__)
  if (*static_cast<volatile int32_t*>(bad) == 0) atomicExch(bad, 1);
#else
  *bad = 1;
#endif
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAUNCH_H_
