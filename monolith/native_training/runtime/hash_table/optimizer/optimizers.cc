#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "monolith/native_training/runtime/hash_table/optimizer/multiversion.h"
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
    for (int64_t i = 0; i < dim; ++i) w[i] -= lr * g[i];
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
    for (int64_t i = 0; i < dim; ++i) {
      const float sum = n[i] + g[i] * g[i];
      n[i] = sum;
      const float step = lr * g[i] / std::sqrt(sum);
      w[i] -= (g[i] == 0.0f ? 0.0f : step) + decay * w[i];
    }
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
    for (int64_t i = 0; i < dim; ++i) {
      const float d = g[i] + wd * w[i];
      a[i] = rho * a[i] + (1.0f - rho) * d * d;
      const float u = std::sqrt(b[i] + eps) / std::sqrt(a[i] + eps) * d;
      w[i] -= lr * u;
      b[i] = rho * b[i] + (1.0f - rho) * u * u;
    }
  }
}

// The powers are those before the step: bias correction counts the row's own updates.
MONOLITH_MULTIVERSION void Adam(const Step& s) {
  const int64_t dim = s.dim;
  const float wd = s.config->weight_decay, b1 = s.config->beta1, b2 = s.config->beta2,
              eps = s.config->epsilon;
  // w -= (from_g * g + from_m * m) * alpha / (sqrt(v) + eps)
  const float from_g = s.config->use_nesterov ? 1.0f - b1 : 0.0f;
  const float from_m = s.config->use_nesterov ? b1 : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict m = s.State(j);
    float* __restrict v = s.State(j) + dim;
    float* __restrict power = s.State(j) + 2 * dim;
    const float* __restrict g = s.Grad(j);
    const float alpha = s.lr * std::sqrt(1.0f - power[1]) / (1.0f - power[0]);
    for (int64_t i = 0; i < dim; ++i) {
      const float d = g[i] + wd * w[i];
      m[i] += (d - m[i]) * (1.0f - b1);
      v[i] += (d * d - v[i]) * (1.0f - b2);
      w[i] -= (from_g * d + from_m * m[i]) * alpha / (std::sqrt(v[i]) + eps);
    }
    power[0] *= b1;
    power[1] *= b2;
  }
}

MONOLITH_MULTIVERSION void Amsgrad(const Step& s) {
  const int64_t dim = s.dim;
  const float wd = s.config->weight_decay, b1 = s.config->beta1, b2 = s.config->beta2,
              eps = s.config->epsilon;
  const float from_g = s.config->use_nesterov ? 1.0f - b1 : 0.0f;
  const float from_m = s.config->use_nesterov ? b1 : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict m = s.State(j);
    float* __restrict v = s.State(j) + dim;
    float* __restrict vhat = s.State(j) + 2 * dim;
    float* __restrict power = s.State(j) + 3 * dim;
    const float* __restrict g = s.Grad(j);
    const float alpha = s.lr * std::sqrt(1.0f - power[1]) / (1.0f - power[0]);
    for (int64_t i = 0; i < dim; ++i) {
      const float d = g[i] + wd * w[i];
      m[i] += (d - m[i]) * (1.0f - b1);
      v[i] += (d * d - v[i]) * (1.0f - b2);
      vhat[i] = v[i] > vhat[i] ? v[i] : vhat[i];
      w[i] -= (from_g * d + from_m * m[i]) * alpha / (std::sqrt(vhat[i]) + eps);
    }
    power[0] *= b1;
    power[1] *= b2;
  }
}

MONOLITH_MULTIVERSION void Momentum(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay, mu = s.config->momentum;
  // w += from_old * n + from_new * n'
  const float from_old = s.config->use_nesterov ? -mu : 0.0f;
  const float from_new = s.config->use_nesterov ? 1.0f + mu : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict n = s.State(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) {
      const float next = mu * n[i] - lr * (g[i] + wd * w[i]);
      w[i] += from_old * n[i] + from_new * next;
      n[i] = next;
    }
  }
}

MONOLITH_MULTIVERSION void MovingAverage(const Step& s) {
  const int64_t dim = s.dim;
  const float mu = s.config->momentum;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) w[i] = mu * w[i] + (1.0f - mu) * g[i];
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
    for (int64_t i = 0; i < dim; ++i) {
      const float root = std::sqrt(n[i] + g[i] * g[i]);
      const float sigma = (root - std::sqrt(n[i])) / lr;
      z[i] += g[i] - sigma * w[i];
      n[i] += g[i] * g[i];
      const float shrunk = lr * (std::copysign(l1, z[i]) - z[i]) / (root + beta + l2 * lr);
      w[i] = std::fabs(z[i]) <= l1 ? 0.0f : shrunk;
    }
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
    for (int64_t i = 0; i < dim; ++i) {
      const float next = n[i] + g[i] * g[i];
      const float sigma = (std::sqrt(next) - std::sqrt(n[i])) / lr;
      z[i] += g[i] - sigma * w[i];
      n[i] = next;
    }
    const float norm = std::sqrt(SquaredNorm(z, dim));
    const float factor = norm < l1 || norm == 0.0f ? 0.0f : lr * (l1 - norm) / norm;
    for (int64_t i = 0; i < dim; ++i) {
      w[i] = factor == 0.0f ? 0.0f : factor * z[i] / (beta + std::sqrt(n[i]) + l2 * lr);
    }
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
    for (int64_t i = 0; i < dim; ++i) {
      const float d = g[i] + wd * w[i];
      const float square = d * d;
      largest = largest >= square ? largest : square;  // false for NaN: it stays visible
    }
    sum[0] += largest;
    const float rate = lr / (beta + std::sqrt(sum[0]));
    for (int64_t i = 0; i < dim; ++i) w[i] = g[i] + wd * w[i] - w[i] / rate;
    const float norm = std::sqrt(SquaredNorm(w, dim));
    const float factor = norm < l2 || norm == 0.0f ? 0.0f : -rate * (norm - l2) / norm;
    for (int64_t i = 0; i < dim; ++i) w[i] = factor == 0.0f ? 0.0f : factor * w[i];
  }
}

// v1 averages the squares, v2 sums them with decay.
MONOLITH_MULTIVERSION void Rmsprop(const Step& s) {
  const int64_t dim = s.dim;
  const float lr = s.lr, wd = s.config->weight_decay, mu = s.config->momentum;
  const float fresh = s.config->kind == OptimizerKind::kRmsprop ? 1.0f - mu : 1.0f;
  for (int j = 0; j < s.count; ++j) {
    float* __restrict w = s.Value(j);
    float* __restrict n = s.State(j);
    const float* __restrict g = s.Grad(j);
    for (int64_t i = 0; i < dim; ++i) {
      const float d = g[i] + wd * w[i];
      n[i] = mu * n[i] + fresh * d * d;
      w[i] -= lr / (std::sqrt(n[i]) + 1.0f) * d;
    }
  }
}

// Estimates the steps between two occurrences of an id; the gradient is not read.
void BatchSoftmax(const Step& s) {
  for (int j = 0; j < s.count; ++j) {
    float* w = s.Value(j);
    int64_t last;
    std::memcpy(&last, s.State(j), sizeof(last));
    w[0] = (1.0f - s.lr) * w[0] + s.lr * static_cast<float>(s.global_step - last);
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
      return Adam(step);
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

void InitializeState(const Segment& segment, char* row) {
  for (const StateField& field : segment.state) {
    if (field.is_int64) {
      std::memset(row + field.offset, 0, 8 * field.count);
    } else {
      float* begin = reinterpret_cast<float*>(row + field.offset);
      std::fill(begin, begin + field.count, field.initial);
    }
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

MONOLITH_MULTIVERSION int CountNonFinite(const float* const* vectors, int count, int64_t dim) {
  int total = 0;
  for (int j = 0; j < count; ++j) total += HasNonFinite(vectors[j], dim);
  return total;
}

}  // namespace engine
}  // namespace monolith
