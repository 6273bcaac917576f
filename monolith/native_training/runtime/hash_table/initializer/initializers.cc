#include "monolith/native_training/runtime/hash_table/initializer/initializers.h"

#include <algorithm>

namespace monolith {
namespace engine {
namespace {

void RandomUniform(const Segment& segment, uint64_t seed, int64_t id, float* out) {
  const float low = segment.initializer.minval, high = segment.initializer.maxval;
  const uint64_t stream = ValueStream(seed, id);
  for (int64_t i = 0; i < segment.dim; ++i) {
    out[i] = UniformValue(low, high, stream, segment.value_begin + i);
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
