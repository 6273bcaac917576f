#include "monolith/native_training/runtime/dense/dense_kernels.h"

#include <algorithm>
#include <cmath>

namespace monolith {
namespace dense {
namespace {

// 1 / sqrt(v / c + epsilon) is sqrt(c / (v + epsilon * c)): one division less.
template <bool kUseV2>
inline float AdamomDelta(const AdamomOptions& o, float m, float v, float c) {
  if constexpr (kUseV2) return o.learning_rate * m / (std::sqrt(v / c) + o.epsilon);
  return o.learning_rate * m * std::sqrt(c / (v + o.epsilon * c));
}

// The options by value: a store to an array must not force the compiler to read them again.
template <bool kUseV2>
void AdamomStepLoop(const AdamomOptions o, const float* __restrict__ grad, int64_t n,
                    float* __restrict__ w, float* __restrict__ m, float* __restrict__ v,
                    float* __restrict__ c) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = o.weight_decay * w[i] + grad[i];
    m[i] = o.mom_decay * m[i] + (1.0f - o.mom_decay) * g;
    v[i] = o.ada_decay * v[i] + g * g;
    c[i] = o.ada_decay * c[i] + 1.0f;
    w[i] -= AdamomDelta<kUseV2>(o, m[i], v[i], c[i]);
  }
}

template <bool kUseV2>
void AdamomMoveLoop(const AdamomOptions o, const float* __restrict__ m, const float* __restrict__ v,
                    const float* __restrict__ c, int64_t n, float* __restrict__ w) {
  for (int64_t i = 0; i < n; ++i) w[i] -= AdamomDelta<kUseV2>(o, m[i], v[i], c[i]);
}

template <bool kUseV2>
void RmspropStepLoop(const RmspropOptions o, const float* __restrict__ grad, int64_t n,
                     float* __restrict__ w, float* __restrict__ m, float* __restrict__ v) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = o.weight_decay * w[i] + grad[i];
    float root;
    if constexpr (kUseV2) {
      v[i] = o.beta2 * v[i] + g * g;
      root = std::sqrt(v[i]) + o.epsilon;
    } else {
      v[i] += (g * g - v[i]) * (1.0f - o.beta2);
      root = std::sqrt(v[i] + o.epsilon);
    }
    m[i] = o.beta1 * m[i] + o.learning_rate * g / root;
    w[i] -= m[i];
  }
}

// At most 16 squares are added up in one float.
constexpr int64_t kLanes = 32;
constexpr int64_t kRun = 16 * kLanes;

// Independent lanes: the compiler may not reorder a single sum, whose additions would wait for one
// another.
template <typename Sum>
double RunOfSquares(const float* values, int64_t n) {
  Sum lanes[kLanes] = {};
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Sum value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < n; ++i) {
    const Sum value = values[i];
    lanes[i - whole] += value * value;
  }
  double sum = 0;
  for (const Sum lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void AdamomStep(const AdamomOptions& options, const float* grad, int64_t n, float* w, float* m,
                float* v, float* c) {
  (options.use_v2 ? AdamomStepLoop<true> : AdamomStepLoop<false>)(options, grad, n, w, m, v, c);
}

void AdamomMove(const AdamomOptions& options, const float* m, const float* v, const float* c,
                int64_t n, float* w) {
  (options.use_v2 ? AdamomMoveLoop<true> : AdamomMoveLoop<false>)(options, m, v, c, n, w);
}

void RmspropStep(const RmspropOptions& options, const float* grad, int64_t n, float* w, float* m,
                 float* v) {
  (options.use_v2 ? RmspropStepLoop<true> : RmspropStepLoop<false>)(options, grad, n, w, m, v);
}

double SumOfSquares(const float* values, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i += kRun) {
    sum += RunOfSquares<float>(values + i, std::min(kRun, n - i));
  }
  if (std::isfinite(sum)) return sum;
  sum = 0;
  for (int64_t i = 0; i < n; i += kRun) {
    sum += RunOfSquares<double>(values + i, std::min(kRun, n - i));
  }
  return sum;
}

void Scale(const float* values, float factor, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = values[i] * factor;
}

}  // namespace dense
}  // namespace monolith
