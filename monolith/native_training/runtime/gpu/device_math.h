// Helps kernels: packs of floats that are loaded at once, cheap divisions, searches.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_MATH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_MATH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

// kSize floats, one access of 4 * kSize bytes when aligned.
template <int kSize>
struct alignas(kSize * sizeof(float)) Pack {
  float values[kSize];
};

inline bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

inline bool AreAligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), IsAligned);
}

// One access; the address is aligned. CPUs take any address: there the compiler is not told of the
// alignment, because GCC 14 merges the branches of Load and keeps the load that wants it.
template <int kSize>
MONO_DEVICE Pack<kSize> LoadAligned(const float* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const Pack<kSize>*>(from);
#else
  Pack<kSize> pack;
  std::memcpy(pack.values, from, sizeof(pack.values));
  return pack;
#endif
}

template <int kSize>
MONO_DEVICE void StoreAligned(const Pack<kSize>& pack, float* to) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<Pack<kSize>*>(to) = pack;
#else
  std::memcpy(to, pack.values, sizeof(pack.values));
#endif
}

// Loads that do not need to be aligned: as one access where the address allows it.
template <int kSize>
MONO_DEVICE Pack<kSize> Load(const float* from) {
  if (kSize > 1 && reinterpret_cast<uintptr_t>(from) % sizeof(Pack<kSize>) != 0) {
    Pack<kSize> pack;
    for (int i = 0; i < kSize; ++i) pack.values[i] = from[i];
    return pack;
  }
  return LoadAligned<kSize>(from);
}

template <int kSize>
MONO_DEVICE void Store(const Pack<kSize>& pack, float* to) {
  if (kSize > 1 && reinterpret_cast<uintptr_t>(to) % sizeof(Pack<kSize>) != 0) {
    for (int i = 0; i < kSize; ++i) to[i] = pack.values[i];
    return;
  }
  StoreAligned<kSize>(pack, to);
}

// Rows [begin, end) of something; none: both are 0.
struct alignas(8) Span {
  int32_t begin;
  int32_t end;
};

template <int kSize>
MONO_DEVICE Pack<kSize> Zeros() {
  Pack<kSize> pack;
  for (int i = 0; i < kSize; ++i) pack.values[i] = 0.0f;
  return pack;
}

template <int kSize>
MONO_DEVICE void AddTo(Pack<kSize>* sum, const Pack<kSize>& term) {
  for (int i = 0; i < kSize; ++i) sum->values[i] += term.values[i];
}

// Neither is negative. 64-bit divisions cost several times as much as 32-bit ones.
MONO_DEVICE void DivMod(int64_t a, int64_t b, int64_t* quotient, int64_t* remainder) {
  if ((static_cast<uint64_t>(a | b) >> 32) == 0) {
    const uint32_t small = static_cast<uint32_t>(a), divisor = static_cast<uint32_t>(b);
    const uint32_t q = small / divisor;
    *quotient = q;
    *remainder = small - q * divisor;
    return;
  }
  *quotient = a / b;
  *remainder = a - *quotient * b;
}

// The last of n parts whose first tile is at most `tile`; parts have a field first_tile, ascending
// from 0.
template <typename Part>
MONO_DEVICE int64_t FindPart(const Part* parts, int64_t n, int64_t tile) {
  int64_t low = 0, high = n;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (parts[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_MATH_H_
