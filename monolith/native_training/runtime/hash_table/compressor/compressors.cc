#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"

#include <cstring>

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/hash_table/optimizer/multiversion.h"

namespace monolith {
namespace engine {
namespace {

MONOLITH_MULTIVERSION void EncodeHalf(const float* values, int64_t dim, char* code) {
  for (int64_t i = 0; i < dim; ++i) {
    const uint16_t half = FloatToHalf(values[i]);
    std::memcpy(code + 2 * i, &half, sizeof(half));
  }
}

MONOLITH_MULTIVERSION void DecodeHalf(const char* code, int64_t dim, float* values) {
  for (int64_t i = 0; i < dim; ++i) {
    uint16_t half;
    std::memcpy(&half, code + 2 * i, sizeof(half));
    values[i] = HalfToFloat(half);
  }
}

MONOLITH_MULTIVERSION void EncodeBytes(const float* values, int64_t dim, float step, char* code) {
  for (int64_t i = 0; i < dim; ++i) code[i] = static_cast<char>(QuantizeFixedR8(values[i], step));
}

MONOLITH_MULTIVERSION void DecodeBytes(const char* code, int64_t dim, float step, float* values) {
  for (int64_t i = 0; i < dim; ++i) {
    values[i] = static_cast<float>(static_cast<int8_t>(code[i])) * step;
  }
}

void EncodeBits(const float* values, int64_t dim, float scale, char* code) {
  for (int64_t byte = 0; byte < (dim + 7) / 8; ++byte) {
    unsigned bits = 0;
    for (int64_t i = 8 * byte; i < dim && i < 8 * byte + 8; ++i) {
      // tanh keeps the sign, so the sign of its argument decides.
      bits |= static_cast<unsigned>(scale * values[i] > 0.0f) << (i - 8 * byte);
    }
    code[byte] = static_cast<char>(bits);
  }
}

void DecodeBits(const char* code, int64_t dim, float amplitude, float* values) {
  for (int64_t i = 0; i < dim; ++i) {
    const unsigned bits = static_cast<unsigned char>(code[i / 8]);
    values[i] = (bits >> (i % 8)) & 1u ? amplitude : -amplitude;
  }
}

}  // namespace

int8_t EncodeFixedR8(float value, float range) { return QuantizeFixedR8(value, range / 128.0f); }

void EncodeSegment(const Segment& segment, const float* vector, char* row) {
  const float* values = vector + segment.value_begin;
  char* code = row + segment.code_offset;
  switch (segment.compressor.kind) {
    case CompressorKind::kFp16:
      return EncodeHalf(values, segment.dim, code);
    case CompressorKind::kFixedR8:
      return EncodeBytes(values, segment.dim, segment.compressor.range / 128.0f, code);
    case CompressorKind::kOneBit:
      return EncodeBits(values, segment.dim, segment.compressor.init_scale, code);
    default:
      std::memcpy(code, values, 4 * segment.dim);
  }
}

void DecodeSegment(const Segment& segment, const char* row, float* vector) {
  const char* code = row + segment.code_offset;
  float* values = vector + segment.value_begin;
  switch (segment.compressor.kind) {
    case CompressorKind::kFp16:
      return DecodeHalf(code, segment.dim, values);
    case CompressorKind::kFixedR8:
      return DecodeBytes(code, segment.dim, segment.compressor.range / 128.0f, values);
    case CompressorKind::kOneBit:
      return DecodeBits(code, segment.dim, segment.compressor.amplitude, values);
    default:
      std::memcpy(values, code, 4 * segment.dim);
  }
}

}  // namespace engine
}  // namespace monolith
