#include "monolith/native_training/runtime/hash_table/optimizer/stochastic_rounding.h"

#include <atomic>
#include <cmath>

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/base/random_bits.h"

namespace monolith {
namespace engine {
namespace {

float UniformDraw() {
  static std::atomic<uint64_t> threads{0};
  thread_local uint64_t state = SplitMix64(threads.fetch_add(1, std::memory_order_relaxed) + 1);
  state += kGoldenRatio64;
  return UniformFloat(SplitMix64(state));
}

// The neighbour of `half` (as float) on the other side of `value`; both have the sign of `value` or
// are zero.
float OtherNeighbour(uint16_t half, float value) {
  const float nearest = HalfToFloat(half);
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t magnitude = half & 0x7fff;
  const bool grow = std::fabs(nearest) < std::fabs(value);
  return HalfToFloat(static_cast<uint16_t>(sign | (grow ? magnitude + 1 : magnitude - 1)));
}

float RoundOne(float value) {
  if (std::isnan(value)) return value;
  if (std::fabs(value) >= kMaxHalf) return std::copysign(kMaxHalf, value);
  const uint16_t half = FloatToHalf(value);
  const float nearest = HalfToFloat(half);
  if (nearest == value) return value;
  const float other = OtherNeighbour(half, value);
  const float low = nearest < other ? nearest : other;
  const float high = nearest < other ? other : nearest;
  return UniformDraw() < (value - low) / (high - low) ? high : low;
}

}  // namespace

void StochasticRoundToHalf(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = RoundOne(values[i]);
}

}  // namespace engine
}  // namespace monolith
