// Steps one element by each optimizer: w value, g gradient, the rest state. The engine's loops
// and the kernels for GPUs call these, so that a formula is written once. All arithmetic is float32
// with exact division and square root.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZER_RULES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZER_RULES_H_

#include <cmath>
#include <cstdint>

#include "monolith/native_training/runtime/base/host_device.h"

#define MONOLITH_RULE MONOLITH_HOST_DEVICE __attribute__((always_inline)) inline

namespace monolith {
namespace engine {

MONOLITH_RULE void SgdRule(float lr, float g, float* w) { *w -= lr * g; }

MONOLITH_RULE void AdagradRule(float lr, float weight_decay, float g, float* w, float* n) {
  const float d = g + weight_decay * *w;
  const float sum = *n + d * d;
  *n = sum;
  const float step = lr * d / std::sqrt(sum);
  *w -= d == 0.0f ? 0.0f : step;  // 0 / 0 with an initial accumulator of 0
}

// decay: the learning rate times the weight decay.
MONOLITH_RULE void DecoupledAdagradRule(float lr, float decay, float g, float* w, float* n) {
  const float sum = *n + g * g;
  *n = sum;
  const float step = lr * g / std::sqrt(sum);
  *w -= (g == 0.0f ? 0.0f : step) + decay * *w;
}

MONOLITH_RULE void AdadeltaRule(float lr, float weight_decay, float rho, float epsilon, float g,
                                float* w, float* a, float* b) {
  const float d = g + weight_decay * *w;
  *a = rho * *a + (1.0f - rho) * d * d;
  const float u = std::sqrt(*b + epsilon) / std::sqrt(*a + epsilon) * d;
  *w -= lr * u;
  *b = rho * *b + (1.0f - rho) * u * u;
}

// Returns the factor of a row's step of Adam and Amsgrad. The powers are those before it: bias
// correction counts the row's own updates.
MONOLITH_RULE float AdamRate(float lr, float power1, float power2) {
  // State of decay_by_step has the number of a step in place of the second power.
  const float correction = power2 < 1.0f ? std::sqrt(1.0f - power2) : 1.0f;
  return lr * correction / (1.0f - power1);
}

struct AdamFactors {
  float weight_decay, beta1, beta2, epsilon;
  float from_g, from_m;  // 0 and 1, or with Nesterov's momentum 1 - beta1 and beta1
};

MONOLITH_RULE void AdamRule(const AdamFactors& f, float rate, float g, float* w, float* m,
                            float* v) {
  const float d = g + f.weight_decay * *w;
  *m += (d - *m) * (1.0f - f.beta1);
  *v += (d * d - *v) * (1.0f - f.beta2);
  *w -= (f.from_g * d + f.from_m * *m) * rate / (std::sqrt(*v) + f.epsilon);
}

MONOLITH_RULE void AmsgradRule(const AdamFactors& f, float rate, float g, float* w, float* m,
                               float* v, float* largest) {
  const float d = g + f.weight_decay * *w;
  *m += (d - *m) * (1.0f - f.beta1);
  *v += (d * d - *v) * (1.0f - f.beta2);
  *largest = *v > *largest ? *v : *largest;
  *w -= (f.from_g * d + f.from_m * *m) * rate / (std::sqrt(*largest) + f.epsilon);
}

// w += from_old * n + from_new * n'; 0 and 1, or with Nesterov's momentum -mu and 1 + mu.
MONOLITH_RULE void MomentumRule(float lr, float weight_decay, float mu, float from_old,
                                float from_new, float g, float* w, float* n) {
  const float next = mu * *n - lr * (g + weight_decay * *w);
  *w += from_old * *n + from_new * next;
  *n = next;
}

MONOLITH_RULE void MovingAverageRule(float mu, float g, float* w) {
  *w = mu * *w + (1.0f - mu) * g;
}

MONOLITH_RULE void FtrlRule(float lr, float beta, float l1, float l2, float g, float* w, float* z,
                            float* n) {
  const float root = std::sqrt(*n + g * g);
  const float sigma = (root - std::sqrt(*n)) / lr;
  *z += g - sigma * *w;
  *n += g * g;
  const float shrunk = lr * (std::copysign(l1, *z) - *z) / (root + beta + l2 * lr);
  *w = std::fabs(*z) <= l1 ? 0.0f : shrunk;
}

// The first half of a step of group_ftrl; the norm of all z decides the second.
MONOLITH_RULE void GroupFtrlGather(float lr, float g, float w, float* z, float* n) {
  const float next = *n + g * g;
  const float sigma = (std::sqrt(next) - std::sqrt(*n)) / lr;
  *z += g - sigma * w;
  *n = next;
}

MONOLITH_RULE float GroupFtrlFactor(float lr, float l1, float norm) {
  return norm < l1 || norm == 0.0f ? 0.0f : lr * (l1 - norm) / norm;
}

MONOLITH_RULE float GroupFtrlValue(float lr, float beta, float l2, float factor, float z, float n) {
  return factor == 0.0f ? 0.0f : factor * z / (beta + std::sqrt(n) + l2 * lr);
}

// Returns the square of an element's gradient, for group_adagrad, where the largest counts.
MONOLITH_RULE float LargerSquare(float largest, float weight_decay, float g, float w) {
  const float d = g + weight_decay * w;
  const float square = d * d;
  return largest >= square ? largest : square;  // false for NaN: it stays visible
}

MONOLITH_RULE float GroupAdagradGather(float rate, float weight_decay, float g, float w) {
  return g + weight_decay * w - w / rate;
}

MONOLITH_RULE float GroupAdagradFactor(float rate, float l2, float norm) {
  return norm < l2 || norm == 0.0f ? 0.0f : -rate * (norm - l2) / norm;
}

// fresh: 1 - mu for v1, which averages the squares, 1 for v2, which sums them with decay.
MONOLITH_RULE void RmspropRule(float lr, float weight_decay, float mu, float fresh, float g,
                               float* w, float* n) {
  const float d = g + weight_decay * *w;
  *n = mu * *n + fresh * d * d;
  *w -= lr / (std::sqrt(*n) + 1.0f) * d;
}

// Estimates the steps between two occurrences of an id; the gradient is not read.
MONOLITH_RULE float BatchSoftmaxRule(float lr, int64_t steps, float w) {
  return (1.0f - lr) * w + lr * static_cast<float>(steps);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_OPTIMIZER_RULES_H_
