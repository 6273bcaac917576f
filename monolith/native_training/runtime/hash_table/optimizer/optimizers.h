// The per-row optimizers, over windows of rows.
//
// A kernel gets `count` rows and `count` gradients and takes one step per pair, in order; the same
// row may come several times. The switch on the kind happens once per (window, segment); inside are
// plain loops over restrict pointers that vectorise. All arithmetic is float32 (division and square
// root are exact, no approximations). Notation in optimizers.cc: w value, g gradient, n/z/m/v
// state, lr the learning rate of the segment.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZERS_H_

#include <cstdint>

#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

// rows[j]: first byte of a row. grads[j]: the whole gradient of that row, or, with
// `grads_are_slices`, the part of this segment only.
struct OptimizerWindow {
  char* const* rows;
  const float* const* grads;
  bool grads_are_slices;
  int count;
};

void RunOptimizer(const Segment& segment, const OptimizerWindow& window, float learning_rate,
                  int64_t global_step);

// True where `a` and its right neighbour `b` may run as one segment when their learning rates are
// equal: the same elementwise rule and at most one state array, so values and state of both are
// adjacent.
bool CanFuse(const Segment& a, const Segment& b);

// None of n floats is NaN or infinite.
bool AllFinite(const float* values, int64_t n);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZERS_H_
