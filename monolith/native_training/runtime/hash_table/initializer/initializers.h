// First values of a row. They run when a write creates the row, never on lookup.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_

#include <cstdint>

#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

// Writes the segment's slice of `vector` (the whole vector of `id`). Random values are a function
// of (seed, id, element) alone: the same for every thread, order and growth history.
void InitializeValues(const Segment& segment, uint64_t seed, int64_t id, float* vector);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INITIALIZER_INITIALIZERS_H_
