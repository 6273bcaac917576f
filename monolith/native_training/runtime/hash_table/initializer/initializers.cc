#include "monolith/native_training/runtime/hash_table/initializer/initializers.h"

#include <algorithm>
#include <cmath>

#include "monolith/native_training/runtime/base/random_bits.h"

namespace monolith {
namespace engine {
namespace {

void RandomUniform(const Segment& segment, uint64_t seed, int64_t id, float* out) {
  const float low = segment.initializer.minval, high = segment.initializer.maxval;
  const uint64_t stream = SplitMix64(seed ^ SplitMix64(static_cast<uint64_t>(id) + kGoldenRatio64));
  for (int64_t i = 0; i < segment.dim; ++i) {
    const uint64_t element = static_cast<uint64_t>(segment.value_begin + i + 1);
    const float value =
        low + (high - low) * UniformFloat(SplitMix64(stream + element * kGoldenRatio64));
    // Rounding may reach the open end.
    out[i] = value < high || high <= low ? value : std::nextafter(high, low);
  }
}

}  // namespace

void InitializeValues(const Segment& segment, uint64_t seed, int64_t id, float* vector) {
  float* out = vector + segment.value_begin;
  switch (segment.initializer.kind) {
    case InitializerKind::kOnes:
      std::fill(out, out + segment.dim, 1.0f);
      return;
    case InitializerKind::kConstants:
      std::fill(out, out + segment.dim, segment.initializer.constant);
      return;
    case InitializerKind::kRandomUniform:
      RandomUniform(segment, seed, id, out);
      return;
    default:
      std::fill(out, out + segment.dim, 0.0f);
      return;
  }
}

}  // namespace engine
}  // namespace monolith
