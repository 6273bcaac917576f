// Floats compressed to 8 bits each, as some Instances carry them in a bytes value.
//
//   n <= 4   "UE_QTZ" | n half floats |
//   n > 4    "UE_QTZ" | half min | half max | n bytes q |      value = min + (max - min) / 255 * q
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_QUANTIZED_FLOATS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_QUANTIZED_FLOATS_H_

#include <cstdint>
#include <cstring>
#include <string_view>

#include "monolith/native_training/runtime/base/half_float.h"

namespace monolith {
namespace data {

constexpr std::string_view kQuantizedTag = "UE_QTZ";

inline bool IsQuantized(std::string_view bytes) {
  return bytes.substr(0, kQuantizedTag.size()) == kQuantizedTag;
}

// Writes n floats; false when `bytes` does not hold exactly n.
inline bool Dequantize(std::string_view bytes, int64_t n, float* out) {
  if (!IsQuantized(bytes) || n <= 0) return false;
  bytes.remove_prefix(kQuantizedTag.size());
  const bool halves = n <= 4;
  if (static_cast<int64_t>(bytes.size()) != (halves ? 2 * n : 4 + n)) return false;
  const auto half = [bytes](int64_t i) {
    uint16_t bits;  // little-endian, like every machine this runs on
    std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
    return engine::HalfToFloat(bits);
  };
  if (halves) {
    for (int64_t i = 0; i < n; ++i) out[i] = half(i);
    return true;
  }
  const float min = half(0);
  const float step = (half(1) - min) / 255.0f;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = min + step * static_cast<float>(static_cast<unsigned char>(bytes[4 + i]));
  }
  return true;
}

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_QUANTIZED_FLOATS_H_
