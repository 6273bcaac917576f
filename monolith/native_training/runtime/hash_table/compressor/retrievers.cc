#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"

namespace monolith {
namespace engine {

float HashNetScale(const CompressorConfig& config, int64_t global_step) {
  const int64_t step = std::max<int64_t>(global_step, 0) / config.step_size * config.step_size;
  const double grown = config.init_scale * std::sqrt(1.0 + 0.005 * static_cast<double>(step));
  return std::min(static_cast<float>(grown), config.max_scale);
}

void RetrieveSegment(const Segment& segment, const float* row_values, float hash_net_scale,
                     float* out) {
  const float* w = row_values + segment.value_begin;
  float* to = out + segment.value_begin;
  switch (segment.retriever) {
    case RetrieverKind::kRaw:
      std::memcpy(to, w, 4 * segment.dim);
      return;
    case RetrieverKind::kFakeQuant:
      for (int64_t i = 0; i < segment.dim; ++i) {
        to[i] =
            DecodeFixedR8(EncodeFixedR8(w[i], segment.compressor.range), segment.compressor.range);
      }
      return;
    case RetrieverKind::kHashNet:
      for (int64_t i = 0; i < segment.dim; ++i) {
        to[i] = segment.compressor.amplitude * std::tanh(hash_net_scale * w[i]);
      }
      return;
  }
}

void ReadRow(const RowLayout& layout, const char* row, int64_t global_step, float* out) {
  for (const Segment& segment : layout.segments) {
    if (layout.serving()) {
      DecodeSegment(segment, row, out);
      continue;
    }
    const float scale = segment.retriever == RetrieverKind::kHashNet
                            ? HashNetScale(segment.compressor, global_step)
                            : 0.0f;
    RetrieveSegment(segment, reinterpret_cast<const float*>(row), scale, out);
  }
}

void HashNetBackward(const Segment& segment, const float* row_values, const float* gradient,
                     float hash_net_scale, float* slice) {
  const float* w = row_values + segment.value_begin;
  const float* g = gradient + segment.value_begin;
  for (int64_t i = 0; i < segment.dim; ++i) {
    const float t = std::tanh(hash_net_scale * w[i]);
    slice[i] = g[i] * segment.compressor.amplitude * hash_net_scale * (1.0f - t * t);
  }
}

}  // namespace engine
}  // namespace monolith
