// IEEE half precision in integer arithmetic, branch-free so that loops over it vectorise on every
// machine.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HALF_FLOAT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HALF_FLOAT_H_

#include <cstdint>
#include <cstring>

#include "monolith/native_training/runtime/base/host_device.h"

namespace monolith {
namespace engine {

constexpr float kMaxHalf = 65504.0f;

MONOLITH_HOST_DEVICE inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MONOLITH_HOST_DEVICE inline float BitsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Exact, also in threads that take subnormal floats for zeros, as TensorFlow's do: no step of it
// meets one.
MONOLITH_HOST_DEVICE inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (uint32_t{112} << 23);
  // A subnormal half counts steps of 2^-24.
  const uint32_t subnormal = FloatBits(static_cast<float>(static_cast<int32_t>(magnitude)) *
                                       BitsFloat(uint32_t{103} << 23));
  const uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinity, NaN
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  return BitsFloat((magnitude >= 0x7c00u ? special : finite) | sign);
}

// Round to nearest, ties to even; beyond the range: clamped to +-65504. NaN stays NaN.
MONOLITH_HOST_DEVICE inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t limited = magnitude < 0x477fe000u ? magnitude : 0x477fe000u;  // 65504
  const uint32_t rounded = limited + 0xfffu + ((limited >> 13) & 1u);
  const uint32_t normal = (rounded - (uint32_t{112} << 23)) >> 13;
  // Adding 0.5 lets the float adder round a subnormal half to its last place.
  const uint32_t subnormal = FloatBits(BitsFloat(limited) + 0.5f) - FloatBits(0.5f);
  const uint32_t finite = limited < 0x38800000u ? subnormal : normal;
  const uint32_t result = magnitude > 0x7f800000u ? 0x7e00u : finite;
  return static_cast<uint16_t>(result | sign);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_HALF_FLOAT_H_
