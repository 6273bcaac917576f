// Codes of SERVING rows: encode on assign and restore, decode on lookup.
//
//   fp32      4 bytes per element
//   fp16      2 bytes per element, round to nearest even, clamped to +-65504
//   fixed_r8  1 byte per element: multiples of r / 128 in [-r, r), half away from zero, NaN is 0
//   one_bit   1 bit per element: + or - amplitude (0 is -)
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_COMPRESSORS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_COMPRESSORS_H_

#include <cstdint>

#include "monolith/native_training/runtime/base/host_device.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

// Encodes the segment's slice of `vector` into `row`.
void EncodeSegment(const Segment& segment, const float* vector, char* row);

// Decodes the segment from `row` into its slice of `vector`.
void DecodeSegment(const Segment& segment, const char* row, float* vector);

// The 8-bit code of fixed_r8, whose step is r / 128, and its value.
MONOLITH_HOST_DEVICE inline int8_t QuantizeFixedR8(float value, float step) {
  const float shifted = (value + (value >= 0.0f ? step * 0.5f : step * -0.5f)) / step;
  // Clamp in float: converting a huge float to int is undefined. NaN fails both comparisons and the
  // last test.
  const float above = shifted > -128.0f ? shifted : -128.0f;
  const float inside = above < 127.0f ? above : 127.0f;
  return static_cast<int8_t>(static_cast<int32_t>(value == value ? inside : 0.0f));
}
int8_t EncodeFixedR8(float value, float range);
MONOLITH_HOST_DEVICE inline float DecodeFixedR8(int8_t code, float range) {
  return static_cast<float>(code) * (range / 128.0f);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_COMPRESSORS_H_
