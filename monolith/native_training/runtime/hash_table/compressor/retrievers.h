// Makes the result of a lookup of a TRAINING row, and sends gradients back. Stored values stay
// float32.
//
//   raw         w                             gradient unchanged
//   fake-quant  decode(encode_fixed_r8(w))    gradient unchanged (straight-through)
//   hash-net    amplitude * tanh(scale * w)   g * amplitude * scale * (1 - tanh(scale * w)^2)
//
// The hash-net scale is a pure function of the global step rounded down to a multiple of step_size,
// so it needs no lock, does not depend on which batches were seen, and survives a restart.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_RETRIEVERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_RETRIEVERS_H_

#include <cstdint>

#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

float HashNetScale(const CompressorConfig& config, int64_t global_step);

// Writes the segment's slice of `out` (a whole vector).
void RetrieveSegment(const Segment& segment, const float* row_values, float hash_net_scale,
                     float* out);

// Makes the result of a lookup of a row of any table; `global_step` is the table's last.
void ReadRow(const RowLayout& layout, const char* row, int64_t global_step, float* out);

// Hash-net only: `slice` receives dim gradients. `gradient` and `row_values` are whole vectors and
// not changed.
void HashNetBackward(const Segment& segment, const float* row_values, const float* gradient,
                     float hash_net_scale, float* slice);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_COMPRESSOR_RETRIEVERS_H_
