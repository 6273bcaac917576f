// Counter-based random numbers: a strong 64-bit mixer over a counter.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_RANDOM_BITS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_RANDOM_BITS_H_

#include <cstdint>

#include "monolith/native_training/runtime/base/host_device.h"

namespace monolith {
namespace engine {

constexpr uint64_t kGoldenRatio64 = 0x9e3779b97f4a7c15ull;

MONOLITH_HOST_DEVICE inline uint64_t SplitMix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  return x;
}

// Uniform in [0, 1), 24 bits.
MONOLITH_HOST_DEVICE inline float UniformFloat(uint64_t bits) {
  return static_cast<float>(static_cast<uint32_t>(bits >> 40)) * (1.0f / 16777216.0f);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_RANDOM_BITS_H_
