// Elementwise loops over dense float arrays: optimizer steps, sums of squares, scaling.
//
// Each makes one pass over its arrays, in plain contiguous loops that vectorise on NEON and on AVX2
// alike. Unless said otherwise the arrays of one call must not overlap. Callers divide the work
// among threads; nothing here starts one.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DENSE_DENSE_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DENSE_DENSE_KERNELS_H_

#include <cstdint>

namespace monolith {
namespace dense {

// With g = weight_decay * w + grad:
//   m <- mom_decay * m + (1 - mom_decay) * g
//   v <- ada_decay * v + g^2
//   c <- ada_decay * c + 1
//   w <- w - learning_rate * m / sqrt(v / c + epsilon)      or, with use_v2,
//   w <- w - learning_rate * m / (sqrt(v / c) + epsilon)
struct AdamomOptions {
  float learning_rate;
  float ada_decay;
  float mom_decay;
  float epsilon;
  float weight_decay;
  bool use_v2;
};

void AdamomStep(const AdamomOptions& options, const float* grad, int64_t n, float* w, float* m,
                float* v, float* c);

// Only the last line: moves w by what the slots hold.
void AdamomMove(const AdamomOptions& options, const float* m, const float* v, const float* c,
                int64_t n, float* w);

// With g = weight_decay * w + grad:
//   v <- v + (g^2 - v) * (1 - beta2)
//   m <- beta1 * m + learning_rate * g / sqrt(v + epsilon)
// or, with use_v2,
//   v <- beta2 * v + g^2
//   m <- beta1 * m + learning_rate * g / (sqrt(v) + epsilon)
// and in both cases w <- w - m.
struct RmspropOptions {
  float learning_rate;
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay;
  bool use_v2;
};

void RmspropStep(const RmspropOptions& options, const float* grad, int64_t n, float* w, float* m,
                 float* v);

// In an order that depends on n alone. Short runs are summed in float and added up in double, which
// is as exact as pairwise summation; where that overflows, all is summed in double.
double SumOfSquares(const float* values, int64_t n);

// out[i] = values[i] * factor. `out` may be `values` itself.
void Scale(const float* values, float factor, int64_t n, float* out);

}  // namespace dense
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DENSE_DENSE_KERNELS_H_
