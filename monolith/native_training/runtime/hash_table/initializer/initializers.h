// First values of a row. They run when a write creates the row, never on lookup.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_

#include <cmath>
#include <cstdint>

#include "monolith/native_training/runtime/base/host_device.h"
#include "monolith/native_training/runtime/base/random_bits.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

// The random numbers of an id.
MONOLITH_HOST_DEVICE inline uint64_t ValueStream(uint64_t seed, int64_t id) {
  return SplitMix64(seed ^ SplitMix64(static_cast<uint64_t>(id) + kGoldenRatio64));
}

// The first value of an element, uniform in [low, high).
MONOLITH_HOST_DEVICE inline float UniformValue(float low, float high, uint64_t stream,
                                               int64_t element) {
  const uint64_t place = static_cast<uint64_t>(element + 1);
  const float value =
      low + (high - low) * UniformFloat(SplitMix64(stream + place * kGoldenRatio64));
  // Rounding may reach the open end.
  return value < high || high <= low ? value : std::nextafter(high, low);
}

// Writes the segment's slice of `vector` (the whole vector of `id`). Random values are a function
// of (seed, id, element) alone: the same for every thread, order and growth history.
void InitializeValues(const Segment& segment, uint64_t seed, int64_t id, float* vector);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_
