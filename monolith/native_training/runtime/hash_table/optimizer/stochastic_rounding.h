// Unbiased rounding of float32 values to the float16 grid; storage stays float32.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_

#include <cmath>
#include <cstdint>

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/base/host_device.h"

namespace monolith {
namespace engine {

// The neighbour of `half` (as float) on the other side of `value`; both have the sign of `value` or
// are zero.
MONOLITH_HOST_DEVICE inline float OtherNeighbour(uint16_t half, float value) {
  const float nearest = HalfToFloat(half);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t magnitude = half & 0x7fff;
  const bool grow = std::fabs(nearest) < std::fabs(value);
  return HalfToFloat(static_cast<uint16_t>(sign | (grow ? magnitude + 1 : magnitude - 1)));
}

// One of the two float16 neighbours of `value`, by a draw from [0, 1).
MONOLITH_HOST_DEVICE inline float RoundToHalf(float value, float draw) {
  if (std::isnan(value)) return value;
  if (std::fabs(value) >= kMaxHalf) return std::copysign(kMaxHalf, value);
  const uint16_t half = FloatToHalf(value);
  const float nearest = HalfToFloat(half);
  if (nearest == value) return value;
  const float other = OtherNeighbour(half, value);
  const float low = nearest < other ? nearest : other;
  const float high = nearest < other ? other : nearest;
  return draw < (value - low) / (high - low) ? high : low;
}

// Replaces every element by one of its two float16 neighbours, the upper one with probability (w -
// lower) / (upper - lower). Representable values and NaN stay; magnitudes above 65504 become 65504.
// Random numbers come from a generator per thread, each with its own seed.
void StochasticRoundToHalf(float* values, int64_t n);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_
