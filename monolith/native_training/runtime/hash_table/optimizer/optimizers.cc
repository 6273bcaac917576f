#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "monolith/native_training/runtime/hash_table/optimizer/multiversion.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizer_rules.h"
#include "monolith/native_training/runtime/hash_table/optimizer/stochastic_rounding.h"
#include "monolith/native_training/runtime/hash_table/rows/row_kernels.h"

namespace monolith {
namespace engine {
namespace {

// Everything a kernel needs, with the segment's offsets folded in.
struct Step {
  char* const* rows;
  const float* const* grads;
  int64_t grad_begin;
  int64_t value_bytes;
  int64_t state_offset;
  int64_t dim;
  int count;
  float lr;
  int64_t global_step;
  const OptimizerConfig* config;

  float* Value(int j) const { return reinterpret_cast<float*>(rows[j] + value_bytes); }
  float* State(int j) const { return reinterpret_cast<float*>(rows[j] + state_offset); }
  const float* Grad(int j) const { return grads[j] + grad_begin; }
};

MONOLITH_MULTIVERSION void Sgd(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) SgdRule(lr, g[i], w + i);
  }
}

MONOLITH_MULTIVERSION void Adagrad(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay;
  for (int j = 0; j < s.count; ++j) AdagradRow(s.Value(j), s.State(j), s.Grad(j), dim, lr, wd);
}

MONOLITH_MULTIVERSION void DecoupledAdagrad(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, decay = s.lr * s.config->weight_decay;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict n = s.State(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) DecoupledAdagradRule(lr, decay, g[i], w + i, n + i);
  }
}

void DynamicWdAdagrad(const Step& s) {
  if (s.config->decouple_weight_decay) {
    DecoupledAdagrad(s);
  } else {
    Adagrad(s);
  }
  for (int j = 0; j < s.count; ++j) {
    std::memcpy(s.State(j) + s.dim, &s.global_step, sizeof(s.global_step));
  }
}

MONOLITH_MULTIVERSION void Adadelta(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay, rho = s.config->averaging_ratio,
              eps = s.config->epsilon;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict a = s.State(j);
    float* __restrict b = s.State(j) + dim;
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) AdadeltaRule(lr, wd, rho, eps, g[i], w + i, a + i, b + i);
  }
}

AdamFactors FactorsOf(const OptimizerConfig& o) {
  return {o.weight_decay,
          o.beta1,
          o.beta2,
          o.epsilon,
          o.use_nesterov ? 1.0f - o.beta1 : 0.0f,
          o.use_nesterov ? o.beta1 : 1.0f};
}

// In place of the second power the state has the number of the row's last step, from 1 on. Steps
// that count from the beginning again, as those of a new run, begin anew for the row, too.
MONOLITH_MULTIVERSION void AdamByStep(const Step& s) {
  const int64_t dim = s.dim;
  const AdamFactors factors = FactorsOf(*s.config);
  const float now = static_cast<float>(s.global_step + 1);
  const float correction = std::sqrt(1.0f - std::pow(factors.beta2, now));
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict m = s.State(j);
    float* __restrict v = s.State(j) + dim;
    float* __restrict power = s.State(j) + 2 * dim;
    const float* __restrict g = s.Grad(j);
    if (power[1] > now) {
      std::fill(m, m + 2 * dim, 0.0f);
      power[0] = factors.beta1;
    } else if (power[1] >= 1.0f && now > power[1] + 1.0f) {
      // The rule decays by one step.
      const float decay = std::pow(factors.beta2, now - power[1] - 1.0f);
      for (int64_t i = 0; i < dim; ++i) v[i] *= decay;
    }
    const float rate = s.lr * correction / (1.0f - power[0]);
    for (int64_t i = 0; i < dim; ++i) AdamRule(factors, rate, g[i], w + i, m + i, v + i);
    power[0] *= factors.beta1;
    power[1] = now;
  }
}

MONOLITH_MULTIVERSION void Adam(const Step& s) {
  const int64_t dim = s.dim;
  const AdamFactors factors = FactorsOf(*s.config);
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict m = s.State(j);
    float* __restrict v = s.State(j) + dim;
    float* __restrict power = s.State(j) + 2 * dim;
    const float* __restrict g = s.Grad(j);
    const float rate = AdamRate(s.lr, power[0], power[1]);
    for (int64_t i = 0; i < dim; ++i) AdamRule(factors, rate, g[i], w + i, m + i, v + i);
    power[0] *= factors.beta1;
    // The state of decay_by_step has the number of a step there.
    power[1] = power[1] < 1.0f ? power[1] * factors.beta2 : 0.0f;
  }
}

MONOLITH_MULTIVERSION void Amsgrad(const Step& s) {
  const int64_t dim = s.dim;
  const AdamFactors factors = FactorsOf(*s.config);
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict m = s.State(j);
    float* __restrict v = s.State(j) + dim;
    float* __restrict vhat = s.State(j) + 2 * dim;
    float* __restrict power = s.State(j) + 3 * dim;
    const float* __restrict g = s.Grad(j);
    const float rate = AdamRate(s.lr, power[0], power[1]);
    for (int64_t i = 0; i < dim; ++i) {
      AmsgradRule(factors, rate, g[i], w + i, m + i, v + i, vhat + i);
    }
    power[0] *= factors.beta1;
    power[1] *= factors.beta2;
  }
}

MONOLITH_MULTIVERSION void Momentum(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay, mu = s.config->momentum;
  const float from_old = s.config->use_nesterov ? -mu : 0.0f;
  const float from_new = s.config->use_nesterov ? 1.0f + mu : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict n = s.State(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) {
      MomentumRule(lr, wd, mu, from_old, from_new, g[i], w + i, n + i);
    }
  }
}

MONOLITH_MULTIVERSION void MovingAverage(const Step& s) {
  const int64_t dim = s.dim;
  const float mu = s.config->momentum;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) MovingAverageRule(mu, g[i], w + i);
  }
}

// State order: zero z[dim], norm n[dim].
MONOLITH_MULTIVERSION void Ftrl(const Step& s) {
  if (s.lr == 0.0f) return;
  const int64_t dim = s.dim;
  const float lr = s.lr, beta = s.config->beta, l1 = s.config->l1, l2 = s.config->l2;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict z = s.State(j);
    float* __restrict n = s.State(j) + dim;
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) FtrlRule(lr, beta, l1, l2, g[i], w + i, z + i, n + i);
  }
}

constexpr int kPartialSums = 8;

// Fixed order, so that the result does not depend on the machine's vector width or on threads.
inline float AddUp(const float (&partial)[kPartialSums]) {
  return ((partial[0] + partial[4]) + (partial[2] + partial[6])) +
         ((partial[1] + partial[5]) + (partial[3] + partial[7]));
}

inline float SquaredNorm(const float* __restrict x, int64_t dim) {
  float partial[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= dim; i += kPartialSums) {
    for (int k = 0; k < kPartialSums; ++k) partial[k] += x[i + k] * x[i + k];
  }
  for (; i < dim; ++i) partial[i % kPartialSums] += x[i] * x[i];
  return AddUp(partial);
}

MONOLITH_MULTIVERSION void GroupFtrl(const Step& s) {
  if (s.lr == 0.0f) return;
  const int64_t dim = s.dim;
  const float lr = s.lr, beta = s.config->beta, l1 = s.config->l1, l2 = s.config->l2;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict z = s.State(j);
    float* __restrict n = s.State(j) + dim;
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) GroupFtrlGather(lr, g[i], w[i], z + i, n + i);
    const float factor = GroupFtrlFactor(lr, l1, std::sqrt(SquaredNorm(z, dim)));
    for (int64_t i = 0; i < dim; ++i) w[i] = GroupFtrlValue(lr, beta, l2, factor, z[i], n[i]);
  }
}

// One accumulator for the whole segment. `w` first receives z, then the shrunk result.
MONOLITH_MULTIVERSION void GroupAdagrad(const Step& s) {
  if (s.lr == 0.0f) return;
  const int64_t dim = s.dim;
  const float lr = s.lr, beta = s.config->beta, l2 = s.config->l2, wd = s.config->weight_decay;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict sum = s.State(j);
    const float* __restrict g = s.Grad(j);
    float largest = 0.0f;
    for (int64_t i = 0; i < dim; ++i) largest = LargerSquare(largest, wd, g[i], w[i]);
    sum[0] += largest;
    const float rate = lr / (beta + std::sqrt(sum[0]));
    for (int64_t i = 0; i < dim; ++i) w[i] = GroupAdagradGather(rate, wd, g[i], w[i]);
    const float factor = GroupAdagradFactor(rate, l2, std::sqrt(SquaredNorm(w, dim)));
    for (int64_t i = 0; i < dim; ++i) w[i] = factor == 0.0f ? 0.0f : factor * w[i];
  }
}

MONOLITH_MULTIVERSION void Rmsprop(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay, mu = s.config->momentum;
  const float fresh = s.config->kind == OptimizerKind::kRmsprop ? 1.0f - mu : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict n = s.State(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) RmspropRule(lr, wd, mu, fresh, g[i], w + i, n + i);
  }
}

void BatchSoftmax(const Step& s) {
  for (int j = 0; j < s.count; ++j) {
    float* w = s.Value(j);
    int64_t last;
    std::memcpy(&last, s.State(j), sizeof(last));
    w[0] = BatchSoftmaxRule(s.lr, s.global_step - last, w[0]);
    std::memcpy(s.State(j), &s.global_step, sizeof(s.global_step));
  }
}

void Dispatch(const Step& step) {
  switch (step.config->kind) {
    case OptimizerKind::kSgd:
      return Sgd(step);
    case OptimizerKind::kAdagrad:
      return Adagrad(step);
    case OptimizerKind::kAdadelta:
      return Adadelta(step);
    case OptimizerKind::kAdam:
      return step.config->decay_by_step ? AdamByStep(step) : Adam(step);
    case OptimizerKind::kAmsgrad:
      return Amsgrad(step);
    case OptimizerKind::kMomentum:
      return Momentum(step);
    case OptimizerKind::kMovingAverage:
      return MovingAverage(step);
    case OptimizerKind::kFtrl:
      return Ftrl(step);
    case OptimizerKind::kGroupFtrl:
      return GroupFtrl(step);
    case OptimizerKind::kGroupAdagrad:
      return GroupAdagrad(step);
    case OptimizerKind::kRmsprop:
    case OptimizerKind::kRmspropV2:
      return Rmsprop(step);
    case OptimizerKind::kBatchSoftmax:
      return BatchSoftmax(step);
    case OptimizerKind::kDynamicWdAdagrad:
      return DynamicWdAdagrad(step);
    case OptimizerKind::kAbsent:
    case OptimizerKind::kUnset:
    case OptimizerKind::kDc:
      return;  // rejected when the table was created
  }
}

}  // namespace

void RunOptimizer(const Segment& segment, const OptimizerWindow& window, float learning_rate,
                  int64_t global_step) {
  Step step{window.rows,
            window.grads,
            window.grads_are_slices ? 0 : segment.value_begin,
            4 * segment.value_begin,
            segment.state_offset,
            segment.dim,
            window.count,
            learning_rate,
            global_step,
            &segment.optimizer};
  if (!segment.optimizer.stochastic_rounding_float16) {
    Dispatch(step);
    return;
  }
  // Row by row: a row that comes twice must be rounded between its two steps.
  step.count = 1;
  for (int j = 0; j < window.count; ++j) {
    step.rows = window.rows + j;
    step.grads = window.grads + j;
    Dispatch(step);
    StochasticRoundToHalf(step.Value(0), segment.dim);
  }
}

bool CanFuse(const Segment& a, const Segment& b) {
  const OptimizerConfig& x = a.optimizer;
  const OptimizerConfig& y = b.optimizer;
  const bool one_array_each =
      x.kind == OptimizerKind::kSgd || x.kind == OptimizerKind::kAdagrad ||
      x.kind == OptimizerKind::kMomentum || x.kind == OptimizerKind::kMovingAverage ||
      x.kind == OptimizerKind::kRmsprop || x.kind == OptimizerKind::kRmspropV2;
  return one_array_each && x.kind == y.kind && a.retriever != RetrieverKind::kHashNet &&
         b.retriever != RetrieverKind::kHashNet && x.weight_decay == y.weight_decay &&
         x.momentum == y.momentum && x.use_nesterov == y.use_nesterov &&
         x.stochastic_rounding_float16 == y.stochastic_rounding_float16 &&
         a.state_offset + a.state_bytes == b.state_offset;
}

// Magnitudes order like integers, and exponents of all ones come last: the largest decides.
MONOLITH_MULTIVERSION bool AllFinite(const float* values, int64_t n) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  constexpr int kLanes = 32;
  int32_t largest[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    int32_t bits[kLanes];
    std::memcpy(bits, values + i, sizeof(bits));
    for (int lane = 0; lane < kLanes; ++lane) {
      const int32_t magnitude = bits[lane] & kMagnitude;
      largest[lane] = magnitude > largest[lane] ? magnitude : largest[lane];
    }
  }
  for (; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest[0] = std::max(largest[0], bits & kMagnitude);
  }
  return *std::max_element(largest, largest + kLanes) < kInfinity;
}

}  // namespace engine
}  // namespace monolith
