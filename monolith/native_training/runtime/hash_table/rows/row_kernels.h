// Changes one row, for callers that want it inlined: a pipeline that updates rows while it
// prefetches others hides one behind the other only if both are in one stretch of code.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_KERNELS_H_

#include <cstdint>
#include <cstring>

#include "monolith/native_training/runtime/hash_table/optimizer/optimizer_rules.h"

namespace monolith {
namespace engine {

// Any of the floats is NaN or infinite.
__attribute__((always_inline)) inline bool HasNonFinite(const float* __restrict vector,
                                                        int64_t dim) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t found = 0;
  for (int64_t i = 0; i < dim; ++i) {
    uint32_t bits;
    std::memcpy(&bits, vector + i, sizeof(bits));
    found |= (bits & kExponent) == kExponent ? 1u : 0u;
  }
  return found != 0;
}

// One Adagrad step: w value, n accumulator, g gradient.
__attribute__((always_inline)) inline void AdagradRow(float* __restrict w, float* __restrict n,
                                                      const float* __restrict g, int64_t dim,
                                                      float lr, float weight_decay) {
  for (int64_t i = 0; i < dim; ++i) AdagradRule(lr, weight_decay, g[i], w + i, n + i);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_KERNELS_H_
