// Changes one row of a GPU table by a tile of lanes: initial values, assignments, optimizer
// steps, retrievers. The layout of a row is the engine's (rows/row_layout.h).
//
// Lane l of a tile of kTile lanes takes the elements l, l + kTile, ... of every array of a segment,
// in all stages of a step, so that it reads what it wrote itself.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_ROWS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_ROWS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/base/random_bits.h"
#include "monolith/native_training/runtime/gpu/table_index.h"
#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"
#include "monolith/native_training/runtime/hash_table/initializer/initializers.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizer_rules.h"
#include "monolith/native_training/runtime/hash_table/optimizer/stochastic_rounding.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace gpu {

constexpr int kMaxSegments = 16;
constexpr int kMaxStateFields = 5;

enum class RowMode : int32_t { kAssign, kAssignAdd, kOptimize, kReinitialize, kLoad };

struct SegmentPlan {
  int32_t dim;
  int32_t value_begin;
  int32_t state_begin;  // in floats from the start of the row
  float lr;
  engine::OptimizerKind optimizer;
  engine::InitializerKind initializer;
  engine::RetrieverKind retriever;
  uint8_t flags;
  float initial_low;  // or the constant
  float initial_high;
  float weight_decay, beta, l1, l2, rho, epsilon, beta1, beta2, momentum;
  float step_correction;  // of the second moment of an Adam that goes by the number of the step
  float retriever_scale;  // hash-net: the scale, fake-quant: the range
  float amplitude;
  int32_t num_fields;
  struct Field {
    int32_t begin;  // in floats from the start of the row
    int32_t count;  // floats; an int64 counts as two
    float initial;
  } fields[kMaxStateFields];

  static constexpr uint8_t kNesterov = 1, kDecoupled = 2, kRounded = 4, kByStep = 8;
};

// A row and the step that every row of a batch takes.
struct RowPlan {
  int32_t num_segments;
  int32_t dim;
  int32_t row_floats;
  RowMode mode;
  uint64_t seed;
  int64_t global_step;
  SegmentPlan segments[kMaxSegments];
};
static_assert(sizeof(RowPlan) < 3000, "goes to kernels as a parameter");

// Bytes of a plan up to its last segment.
inline int64_t UsedBytes(const RowPlan& plan) {
  return static_cast<int64_t>(offsetof(RowPlan, segments) +
                              plan.num_segments * sizeof(SegmentPlan));
}

// -- Lanes of a tile. kTile is a power of 2; a tile of 1 needs no communication.

template <int kTile>
MONO_DEVICE void SyncTile(int lane) {
#if defined(__CUDACC__)
  if (kTile > 1) {
    const unsigned mask = kTile == 32 ? kAllLanes : ((1u << (kTile % 32)) - 1u);
    __syncwarp(mask << ((lane % kWarpLanes) / kTile * kTile));
  }
#else
  (void)lane;
#endif
}

#if defined(__CUDACC__)
template <int kTile>
MONO_DEVICE unsigned TileMask(int lane) {
  const unsigned mask = kTile == 32 ? kAllLanes : ((1u << (kTile % 32)) - 1u);
  return mask << (lane / kTile * kTile);
}
#endif

template <int kTile>
MONO_DEVICE float SumOfTile(float value, int lane) {
#if defined(__CUDACC__)
  for (int width = kTile / 2; width > 0; width /= 2) {
    value += __shfl_xor_sync(TileMask<kTile>(lane), value, width);
  }
#else
  (void)lane;
#endif
  return value;
}

// The larger one, or NaN if any is.
template <int kTile>
MONO_DEVICE float LargestOfTile(float value, int lane) {
#if defined(__CUDACC__)
  for (int width = kTile / 2; width > 0; width /= 2) {
    const float other = __shfl_xor_sync(TileMask<kTile>(lane), value, width);
    value = value >= other || value != value ? value : other;
  }
#else
  (void)lane;
#endif
  return value;
}

template <int kTile>
MONO_DEVICE bool AnyOfTile(bool value, int lane) {
#if defined(__CUDACC__)
  return (__ballot_sync(TileMask<kTile>(lane), value) & TileMask<kTile>(lane)) != 0;
#else
  (void)lane;
  return value;
#endif
}

MONO_DEVICE bool IsNonFinite(float value) {
  return (engine::FloatBits(value) & 0x7f800000u) == 0x7f800000u;
}

// -- Parts of a row.

MONO_DEVICE float InitialValue(const SegmentPlan& segment, uint64_t stream, int element) {
  switch (segment.initializer) {
    case engine::InitializerKind::kOnes:
      return 1.0f;
    case engine::InitializerKind::kConstants:
      return segment.initial_low;
    case engine::InitializerKind::kRandomUniform:
      return engine::UniformValue(segment.initial_low, segment.initial_high, stream, element);
    default:
      return 0.0f;
  }
}

template <int kTile>
MONO_DEVICE void InitializeValues(const RowPlan& plan, int64_t id, int lane, float* row) {
  const uint64_t stream = engine::ValueStream(plan.seed, id);
  for (int s = 0; s < plan.num_segments; ++s) {
    const SegmentPlan& segment = plan.segments[s];
    for (int i = lane; i < segment.dim; i += kTile) {
      row[segment.value_begin + i] = InitialValue(segment, stream, segment.value_begin + i);
    }
  }
}

template <int kTile>
MONO_DEVICE void InitializeState(const RowPlan& plan, int lane, float* row) {
  for (int s = 0; s < plan.num_segments; ++s) {
    const SegmentPlan& segment = plan.segments[s];
    for (int f = 0; f < segment.num_fields; ++f) {
      const SegmentPlan::Field& field = segment.fields[f];
      for (int i = lane; i < field.count; i += kTile) row[field.begin + i] = field.initial;
    }
  }
}

// Two floats that hold an int64.
MONO_DEVICE int64_t ReadInt64(const float* from) {
  return static_cast<int64_t>(static_cast<uint64_t>(engine::FloatBits(from[1])) << 32 |
                              engine::FloatBits(from[0]));
}
MONO_DEVICE void WriteInt64(int64_t value, float* to) {
  reinterpret_cast<uint32_t*>(to)[0] = static_cast<uint32_t>(value);
  reinterpret_cast<uint32_t*>(to)[1] = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
}

// Returns the value that a lookup makes of a stored one.
MONO_DEVICE float Retrieved(const SegmentPlan& segment, float w) {
  switch (segment.retriever) {
    case engine::RetrieverKind::kFakeQuant:
      return engine::DecodeFixedR8(engine::QuantizeFixedR8(w, segment.retriever_scale / 128.0f),
                                   segment.retriever_scale);
    case engine::RetrieverKind::kHashNet:
      return segment.amplitude * std::tanh(segment.retriever_scale * w);
    default:
      return w;
  }
}

// One optimizer step of one segment. `lane` is that inside the tile, `warp_lane` the one inside the
// warp.
template <int kTile>
MONO_DEVICE void StepSegment(const RowPlan& plan, const SegmentPlan& s, int64_t id,
                             const float* gradient, int lane, int warp_lane, float* row) {
  using engine::OptimizerKind;
  const int dim = s.dim;
  float* const w = row + s.value_begin;
  float* const a = row + s.state_begin;  // first array of the state
  float* const b = a + dim;
  const float* const g = gradient + s.value_begin;
  const bool hash_net = s.retriever == engine::RetrieverKind::kHashNet;
  // Gradients go back through the retriever; raw and fake-quant hand them on.
  const auto grad = [&](int i) {
    if (!hash_net) return g[i];
    const float t = std::tanh(s.retriever_scale * w[i]);
    return g[i] * s.amplitude * s.retriever_scale * (1.0f - t * t);
  };
  const bool nesterov = (s.flags & SegmentPlan::kNesterov) != 0;
  switch (s.optimizer) {
    case OptimizerKind::kSgd:
      for (int i = lane; i < dim; i += kTile) engine::SgdRule(s.lr, grad(i), w + i);
      break;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kDynamicWdAdagrad:
      if (s.flags & SegmentPlan::kDecoupled) {
        const float decay = s.lr * s.weight_decay;
        for (int i = lane; i < dim; i += kTile) {
          engine::DecoupledAdagradRule(s.lr, decay, grad(i), w + i, a + i);
        }
      } else {
        for (int i = lane; i < dim; i += kTile) {
          engine::AdagradRule(s.lr, s.weight_decay, grad(i), w + i, a + i);
        }
      }
      if (s.optimizer == OptimizerKind::kDynamicWdAdagrad && lane == 0) {
        WriteInt64(plan.global_step, b);
      }
      break;
    case OptimizerKind::kAdadelta:
      for (int i = lane; i < dim; i += kTile) {
        engine::AdadeltaRule(s.lr, s.weight_decay, s.rho, s.epsilon, grad(i), w + i, a + i, b + i);
      }
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAmsgrad: {
      const bool amsgrad = s.optimizer == OptimizerKind::kAmsgrad;
      float* const largest = b + dim;
      float* const power = amsgrad ? largest + dim : largest;
      const engine::AdamFactors factors = {
          s.weight_decay,           s.beta1, s.beta2, s.epsilon, nesterov ? 1.0f - s.beta1 : 0.0f,
          nesterov ? s.beta1 : 1.0f};
      SyncTile<kTile>(warp_lane);  // a fresh row's powers are written by other lanes
      float power1 = power[0];
      const float power2 = power[1];
      float rate, next;  // what comes after power2
      if (s.flags & SegmentPlan::kByStep) {
        next = static_cast<float>(plan.global_step + 1);
        if (power2 > next) {
          for (int i = lane; i < dim; i += kTile) a[i] = b[i] = 0.0f;
          power1 = s.beta1;
        } else if (power2 >= 1.0f && next > power2 + 1.0f) {
          const float decay = std::pow(s.beta2, next - power2 - 1.0f);
          for (int i = lane; i < dim; i += kTile) b[i] *= decay;
        }
        rate = s.lr * s.step_correction / (1.0f - power1);
      } else {
        rate = engine::AdamRate(s.lr, power1, power2);
        next = amsgrad || power2 < 1.0f ? power2 * s.beta2 : 0.0f;
      }
      for (int i = lane; i < dim; i += kTile) {
        if (amsgrad) {
          engine::AmsgradRule(factors, rate, grad(i), w + i, a + i, b + i, largest + i);
        } else {
          engine::AdamRule(factors, rate, grad(i), w + i, a + i, b + i);
        }
      }
      SyncTile<kTile>(warp_lane);
      if (lane == 0) {
        power[0] = power1 * s.beta1;
        power[1] = next;
      }
      break;
    }
    case OptimizerKind::kMomentum: {
      const float from_old = nesterov ? -s.momentum : 0.0f;
      const float from_new = nesterov ? 1.0f + s.momentum : 1.0f;
      for (int i = lane; i < dim; i += kTile) {
        engine::MomentumRule(s.lr, s.weight_decay, s.momentum, from_old, from_new, grad(i), w + i,
                             a + i);
      }
      break;
    }
    case OptimizerKind::kMovingAverage:
      for (int i = lane; i < dim; i += kTile) engine::MovingAverageRule(s.momentum, grad(i), w + i);
      break;
    case OptimizerKind::kFtrl:
      if (s.lr == 0.0f) break;
      for (int i = lane; i < dim; i += kTile) {
        engine::FtrlRule(s.lr, s.beta, s.l1, s.l2, grad(i), w + i, a + i, b + i);
      }
      break;
    case OptimizerKind::kGroupFtrl: {
      if (s.lr == 0.0f) break;
      float squares = 0.0f;
      for (int i = lane; i < dim; i += kTile) {
        engine::GroupFtrlGather(s.lr, grad(i), w[i], a + i, b + i);
        squares += a[i] * a[i];
      }
      const float norm = std::sqrt(SumOfTile<kTile>(squares, warp_lane));
      const float factor = engine::GroupFtrlFactor(s.lr, s.l1, norm);
      for (int i = lane; i < dim; i += kTile) {
        w[i] = engine::GroupFtrlValue(s.lr, s.beta, s.l2, factor, a[i], b[i]);
      }
      break;
    }
    case OptimizerKind::kGroupAdagrad: {
      if (s.lr == 0.0f) break;
      float largest = 0.0f;
      for (int i = lane; i < dim; i += kTile) {
        largest = engine::LargerSquare(largest, s.weight_decay, grad(i), w[i]);
      }
      largest = LargestOfTile<kTile>(largest, warp_lane);
      SyncTile<kTile>(warp_lane);
      const float sum = a[0] + largest;
      const float rate = s.lr / (s.beta + std::sqrt(sum));
      float squares = 0.0f;
      for (int i = lane; i < dim; i += kTile) {
        w[i] = engine::GroupAdagradGather(rate, s.weight_decay, grad(i), w[i]);
        squares += w[i] * w[i];
      }
      const float norm = std::sqrt(SumOfTile<kTile>(squares, warp_lane));
      const float factor = engine::GroupAdagradFactor(rate, s.l2, norm);
      for (int i = lane; i < dim; i += kTile) w[i] = factor == 0.0f ? 0.0f : factor * w[i];
      SyncTile<kTile>(warp_lane);
      if (lane == 0) a[0] = sum;
      break;
    }
    case OptimizerKind::kRmsprop:
    case OptimizerKind::kRmspropV2: {
      const float fresh = s.optimizer == OptimizerKind::kRmsprop ? 1.0f - s.momentum : 1.0f;
      for (int i = lane; i < dim; i += kTile) {
        engine::RmspropRule(s.lr, s.weight_decay, s.momentum, fresh, grad(i), w + i, a + i);
      }
      break;
    }
    case OptimizerKind::kBatchSoftmax:  // has one element
      SyncTile<kTile>(warp_lane);
      if (lane == 0) {
        w[0] = engine::BatchSoftmaxRule(s.lr, plan.global_step - ReadInt64(a), w[0]);
        WriteInt64(plan.global_step, a);
      }
      break;
    case OptimizerKind::kAbsent:
    case OptimizerKind::kUnset:
    case OptimizerKind::kDc:
      break;  // rejected when the table was created
  }
  if (s.flags & SegmentPlan::kRounded) {
    const uint64_t draws = engine::ValueStream(
        plan.seed ^ engine::SplitMix64(static_cast<uint64_t>(plan.global_step) + 1), id);
    for (int i = lane; i < dim; i += kTile) {
      const uint64_t element = static_cast<uint64_t>(s.value_begin + i + 1);
      const uint64_t bits = engine::SplitMix64(draws + element * engine::kGoldenRatio64);
      w[i] = engine::RoundToHalf(w[i], engine::UniformFloat(bits));
    }
  }
}

// Whether one of `n` floats is not finite; told to all lanes.
template <int kTile>
MONO_DEVICE bool HasNonFinite(const float* values, int n, int lane, int warp_lane) {
  bool bad = false;
  for (int i = lane; i < n; i += kTile) bad |= IsNonFinite(values[i]);
  return AnyOfTile<kTile>(bad, warp_lane);
}

// Makes a new row.
template <int kTile>
MONO_DEVICE void InitializeRow(const RowPlan& plan, int64_t id, int lane, float* row) {
  InitializeState<kTile>(plan, lane, row);
  InitializeValues<kTile>(plan, id, lane, row);
}

// Applies one occurrence of an id to its row, which is new where `fresh`.
template <int kTile>
MONO_DEVICE void ApplyToRow(const RowPlan& plan, int64_t id, const float* source, bool fresh,
                            int lane, int warp_lane, float* row) {
  switch (plan.mode) {
    case RowMode::kAssign:
      if (fresh) InitializeState<kTile>(plan, lane, row);
      for (int i = lane; i < plan.dim; i += kTile) row[i] = source[i];
      return;
    case RowMode::kAssignAdd:
      if (fresh) {
        InitializeRow<kTile>(plan, id, lane, row);
        SyncTile<kTile>(warp_lane);  // segments deal elements to other lanes
      }
      for (int i = lane; i < plan.dim; i += kTile) row[i] += source[i];
      return;
    case RowMode::kReinitialize:
      InitializeRow<kTile>(plan, id, lane, row);
      return;
    case RowMode::kLoad:
      for (int i = lane; i < plan.row_floats; i += kTile) row[i] = source[i];
      return;
    case RowMode::kOptimize:
      break;
  }
  if (fresh) InitializeRow<kTile>(plan, id, lane, row);
  for (int s = 0; s < plan.num_segments; ++s) {
    StepSegment<kTile>(plan, plan.segments[s], id, source, lane, warp_lane, row);
  }
  SyncTile<kTile>(warp_lane);
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_ROWS_H_
