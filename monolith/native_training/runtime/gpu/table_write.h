// Lets the kernels of a write change the rows of a word of 32 ids, any row and packed ones:
//
//   Rows::Plan                                 what they know of a row and its step
//   Rows::Step(a, plan, word, lane, ids, rows) steps the rows that were found (0: none)
//   Rows::Fill(a, plan, i, id, lane, row)      makes the row of the i-th id and steps it
//
// All lanes of a warp call Step, kTile lanes of it Fill.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_

#include <cstring>
#include <type_traits>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"
#include "monolith/native_training/runtime/gpu/tuning.h"

namespace monolith {
namespace gpu {

MONO_DEVICE int64_t CountOf(const Batch& batch) {
  return batch.count == nullptr ? batch.n : static_cast<int64_t>(*batch.count);
}

MONO_DEVICE void LoadBatch(const Batch& batch, int64_t word, int lane, PerId<int64_t>* ids,
                           PerId<bool>* wanted) {
  const int64_t n = CountOf(batch);
  for (int k = 0; k < kIdsPerLane; ++k) {
    const int64_t i = word * kWordIds + OwnId(lane, k);
    wanted->own[k] = i < n;
    ids->own[k] = i < n ? batch.ids[i] : 0;
  }
}

// Where the occurrences of id i are; those of one whose gradients are summed count once.
MONO_DEVICE uint32_t Skipped(const Batch& batch, int64_t i) {
  return batch.skips == nullptr ? 0 : batch.skips[i];
}
MONO_DEVICE int64_t Occurrences(const Batch& batch, int64_t i) {
  if (batch.starts == nullptr || batch.sum) return 1;
  return int64_t{batch.starts[i + 1]} - batch.starts[i] - Skipped(batch, i);
}
MONO_DEVICE int64_t Position(const Batch& batch, int64_t i, int64_t k) {
  if (batch.starts == nullptr || batch.sum) return i;
  return batch.order[batch.starts[i] + Skipped(batch, i) + k];
}

// What the k-th step of id i takes; of gradients that are summed, all sums are there.
MONO_DEVICE const float* SourceOf(const WriteArguments& a, int64_t i, int64_t k) {
  const Batch& batch = a.batch;
  if (!batch.sum) return a.source + Position(batch, i, k) * a.source_floats;
  const bool once = batch.starts[i + 1] - batch.starts[i] == 1;
  return (once ? a.source : batch.sums) + int64_t{batch.sum_rows[i]} * a.source_floats;
}

MONO_DEVICE uint32_t TimeOf(const WriteArguments& a, int64_t i) {
  if (a.load_ts == nullptr) return a.ts;
  return a.load_ts[Position(a.batch, i, Occurrences(a.batch, i) - 1)];
}

struct SetTime {
  const WriteArguments& a;
  int64_t first;
  MONO_DEVICE void operator()(TableSlot* slot, const TableSlot& seen, int j) const {
    const uint32_t ts = TimeOf(a, first + j);
    if (seen.ts != ts) slot->ts = ts;  // do not dirty the line for nothing
  }
};

// The same where all rows of the batch have one time.
struct SetSameTime {
  uint32_t ts;
  MONO_DEVICE void operator()(TableSlot* slot, const TableSlot& seen, int) const {
    if (seen.ts != ts) slot->ts = ts;
  }
};

// Finds the ids, sets their times, notes which are absent.
template <Walk kWalk, typename OnHit>
MONO_DEVICE void FindBatch(const WriteArguments& a, int64_t word, int lane, const OnHit& on_hit,
                           PerId<int64_t>* ids, PerId<uint32_t>* rows) {
  PerId<bool> wanted, absent;
  LoadBatch(a.batch, word, lane, ids, &wanted);
  FindRows<kWalk>(a.index, lane, *ids, wanted, on_hit, rows);
  for (int k = 0; k < kIdsPerLane; ++k) absent.own[k] = wanted.own[k] && rows->own[k] == 0;
  const uint32_t bits = WordOf(absent);
  if (lane == 0) {
    a.absent[word] = bits;
    if (bits != 0) a.index.state->any_absent = 1;
  }
}

// Has what the k-th step of id i takes on its way: steps of one id wait for one another, but what
// they take need not be waited for.
MONO_DEVICE void FetchAhead(const WriteArguments& a, int64_t i, int64_t k, int64_t occurrences) {
#if defined(__CUDACC__)
  if (k >= occurrences || a.source == nullptr) return;
  const auto source = reinterpret_cast<const char*>(SourceOf(a, i, k));
  for (int64_t byte = 0; byte < a.source_floats * 4; byte += 128) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(source + byte));
  }
#else
  (void)a, (void)i, (void)k, (void)occurrences;
#endif
}

// All occurrences of id i, in order.
template <int kTile>
MONO_DEVICE void ApplyAll(const WriteArguments& a, const RowPlan& plan, int64_t i, int64_t id,
                          bool fresh, int warp_lane, float* row) {
  const int64_t occurrences = Occurrences(a.batch, i);
  // What overwrites the row leaves nothing of those before it.
  const bool only_last = plan.mode == RowMode::kAssign || plan.mode == RowMode::kLoad;
  int bad = 0;
  for (int64_t k = only_last ? occurrences - 1 : 0; k < occurrences; ++k) {
    if (occurrences > 1 && k % kTile == 0) {
      const int64_t ahead = k + warp_lane % kTile;
      if (k == 0) FetchAhead(a, i, ahead, occurrences);
      FetchAhead(a, i, ahead + kTile, occurrences);
    }
    bad += ApplyToRow<kTile>(plan, id, SourceOf(a, i, k), fresh && (k == 0 || only_last),
                             warp_lane % kTile, warp_lane, row);
    if (a.existed != nullptr && warp_lane % kTile == 0) {
      a.existed[Position(a.batch, i, k)] = !(fresh && k == 0);
    }
  }
  if (bad > 0 && warp_lane % kTile == 0) {
    AtomicAdd(&a.index.state->nonfinite, static_cast<uint64_t>(bad));
  }
}

// Rows of any kind.
template <int kLanesOfRow>
struct AnyRows {
  static constexpr int kTile = kLanesOfRow;
  static constexpr int kMinBlocks = 2;  // that a multiprocessor holds
  using Plan = RowPlan;

  static const Plan& PlanOf(const RowPlan& plan) { return plan; }
  static int64_t PlanBytes(const RowPlan& plan) { return UsedBytes(plan); }

  MONO_DEVICE static void Step(const WriteArguments& a, const Plan& plan, int64_t word, int lane,
                               const PerId<int64_t>& ids, const PerId<uint32_t>& rows) {
    for (int j = lane / kTile; j < kWordIds; j += kWarpLanes / kTile) {
      const uint32_t row = rows.Get(j);
      const int64_t id = ids.Get(j);
      if (row == 0) continue;
      ApplyAll<kTile>(a, plan, word * kWordIds + j, id, false, lane,
                      reinterpret_cast<float*>(a.rows + row * a.stride));
    }
  }

  MONO_DEVICE static void Fill(const WriteArguments& a, const Plan& plan, int64_t i, int64_t id,
                               int lane, float* row) {
    ApplyAll<kTile>(a, plan, i, id, true, lane, row);
  }
};

#if defined(__CUDACC__)

MONO_DEVICE float4 LoadFour(const float* from) { return *reinterpret_cast<const float4*>(from); }
MONO_DEVICE float4 LoadFourOnce(const float* from) {
  return __ldcs(reinterpret_cast<const float4*>(from));
}
MONO_DEVICE bool AnyNonFinite(const float4& v) {
  return IsNonFinite(v.x) || IsNonFinite(v.y) || IsNonFinite(v.z) || IsNonFinite(v.w);
}

struct PackedAdagrad {
  static constexpr bool kHasState = true;
  float lr, weight_decay;
  MONO_DEVICE explicit PackedAdagrad(const SegmentPlan& segment)
      : lr(segment.lr), weight_decay(segment.weight_decay) {}
  MONO_DEVICE void operator()(float g, float* w, float* n) const {
    engine::AdagradRule(lr, weight_decay, g, w, n);
  }
};

struct PackedSgd {
  static constexpr bool kHasState = false;
  float lr;
  MONO_DEVICE explicit PackedSgd(const SegmentPlan& segment) : lr(segment.lr) {}
  MONO_DEVICE void operator()(float g, float* w, float*) const { engine::SgdRule(lr, g, w); }
};

template <typename Rule>
MONO_DEVICE void StepFour(const Rule& rule, const float4& g, float4* w, float4* n) {
  rule(g.x, &w->x, &n->x);
  rule(g.y, &w->y, &n->y);
  rule(g.z, &w->z, &n->z);
  rule(g.w, &w->w, &n->w);
}

// Holds the part of a plan that a packed row needs.
struct PackedPlan {
  SegmentPlan segment;
  uint64_t seed;
};

// Where the gradient of an id is, or those that are to be added.
struct GradientPlace {
  uint32_t count;
  uint32_t row;  // Batch::sum_rows
};

MONO_DEVICE GradientPlace PlaceOf(const Batch& batch, int64_t i) {
  return {batch.starts[i + 1] - batch.starts[i], batch.sum_rows[i]};
}

MONO_DEVICE void AddFour(const float4& g, float4* sum) {
  sum->x += g.x, sum->y += g.y, sum->z += g.z, sum->w += g.w;
}

// Four gradients of the i-th id, or their sum.
template <bool kSum>
MONO_DEVICE float4 LoadGradient(const WriteArguments& a, int dim, int64_t i,
                                const GradientPlace& place, int c) {
  if (!kSum) return LoadFourOnce(a.source + i * dim + c);
  if (place.count == 1 || place.count > kFusedRows) {
    const float* const rows = place.count == 1 ? a.source : a.batch.sums;
    return LoadFourOnce(rows + static_cast<int64_t>(place.row) * dim + c);
  }
  float4 rows[kFusedRows];
  MONO_UNROLL
  for (uint32_t k = 0; k < kFusedRows; ++k) {
    if (k >= place.count) continue;
    const int64_t row = a.batch.order[place.row + k];
    rows[k] = LoadFourOnce(a.source + row * dim + c);
  }
  float4 sum = rows[0];
  MONO_UNROLL
  for (uint32_t k = 1; k < kFusedRows; ++k) {
    if (k < place.count) AddFour(rows[k], &sum);
  }
  return sum;
}

// Rows of one segment with at most one state array, each stepped once: four floats a lane.
template <int kLanesOfRow, bool kSum, typename Rule>
struct PackedRows {
  static constexpr int kTile = kLanesOfRow;
  static constexpr int kMinBlocks = kSum ? 4 : 5;
  static constexpr int kAtOnce = 1;  // rows that a tile steps together
  using Plan = PackedPlan;

  static Plan PlanOf(const RowPlan& plan) { return {plan.segments[0], plan.seed}; }
  static int64_t PlanBytes(const RowPlan&) { return sizeof(Plan); }

  MONO_DEVICE static void Step(const WriteArguments& a, const Plan& plan, int64_t word, int lane,
                               const PerId<int64_t>&, const PerId<uint32_t>& rows) {
    const Rule rule(plan.segment);
    const int dim = plan.segment.dim;
    constexpr int kTiles = kWarpLanes / kTile;
    const int tile = lane / kTile;
    PerId<uint32_t> counts, source_rows;
    if (kSum && rows.own[0] != 0) {
      const GradientPlace own = PlaceOf(a.batch, word * kWordIds + lane);
      counts.own[0] = own.count;
      source_rows.own[0] = own.row;
    }
    MONO_ROLLED
    for (int begin = 0; begin < kWordIds; begin += kTiles * kAtOnce) {
      uint32_t numbers[kAtOnce];
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) numbers[u] = rows.Get(begin + u * kTiles + tile);
      GradientPlace places[kAtOnce] = {};
      MONO_UNROLL
      for (int u = 0; kSum && u < kAtOnce; ++u) {
        places[u] = {counts.Get(begin + u * kTiles + tile),
                     source_rows.Get(begin + u * kTiles + tile)};
      }
      bool bad[kAtOnce] = {};
      for (int c = lane % kTile * 4; c < dim; c += kTile * 4) {
        float4 w[kAtOnce], n[kAtOnce], g[kAtOnce];
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          if (numbers[u] == 0) continue;
          const float* const row = reinterpret_cast<const float*>(a.rows + numbers[u] * a.stride);
          w[u] = LoadFour(row + c);
          if (Rule::kHasState) n[u] = LoadFour(row + dim + c);
          g[u] =
              LoadGradient<kSum>(a, dim, word * kWordIds + begin + u * kTiles + tile, places[u], c);
        }
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          if (numbers[u] == 0) continue;
          float* const row = reinterpret_cast<float*>(a.rows + numbers[u] * a.stride);
          bad[u] |= AnyNonFinite(g[u]);
          StepFour(rule, g[u], &w[u], &n[u]);
          *reinterpret_cast<float4*>(row + c) = w[u];
          if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n[u];
        }
      }
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        const unsigned lanes = __ballot_sync(kAllLanes, bad[u]);
        if (lanes != 0 && lane % kTile == 0 && (lanes & TileMask<kTile>(lane)) != 0) {
          AtomicAdd(&a.index.state->nonfinite, uint64_t{1});
        }
      }
    }
  }

  // Made in registers and stored once.
  MONO_DEVICE static void Fill(const WriteArguments& a, const Plan& plan, int64_t i, int64_t id,
                               int lane, float* row) {
    const Rule rule(plan.segment);
    const SegmentPlan& segment = plan.segment;
    const int dim = segment.dim;
    const uint64_t stream = engine::ValueStream(plan.seed, id);
    const GradientPlace place = kSum ? PlaceOf(a.batch, i) : GradientPlace{};
    bool bad = false;
    for (int c = lane % kTile * 4; c < dim; c += kTile * 4) {
      const float4 g = LoadGradient<kSum>(a, dim, i, place, c);
      float4 w, n;
      w.x = InitialValue(segment, stream, c);
      w.y = InitialValue(segment, stream, c + 1);
      w.z = InitialValue(segment, stream, c + 2);
      w.w = InitialValue(segment, stream, c + 3);
      n.x = n.y = n.z = n.w = segment.fields[0].initial;
      bad |= AnyNonFinite(g);
      StepFour(rule, g, &w, &n);
      *reinterpret_cast<float4*>(row + c) = w;
      if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n;
    }
    if (AnyOfTile<kTile>(bad, lane) && lane % kTile == 0) {
      AtomicAdd(&a.index.state->nonfinite, uint64_t{1});
    }
  }
};

template <typename T>
struct TypeOf {
  using type = T;
};

#endif

// -- Which of them a write takes.

#if defined(__CUDACC__)
inline bool IsPacked(const WriteTask& task) {
  const Batch& batch = task.arguments.batch;
  return SumsGradients(task.plan, task.arguments.stride, task.arguments.source) &&
         (batch.starts == nullptr || batch.sum);
}
#endif

// A number for it, so that tasks alike go into one launch.
inline int KindOf(const WriteTask& task) {
#if defined(__CUDACC__)
  const int dim = task.plan.dim;
  if (IsPacked(task)) {
    const int tile = dim <= 16 ? 0 : dim <= 32 ? 1 : dim <= 64 ? 2 : 3;
    const bool adagrad = task.plan.segments[0].optimizer == engine::OptimizerKind::kAdagrad;
    const bool sum = task.arguments.batch.starts != nullptr;
    return 4 + tile + (adagrad ? 0 : 4) + (sum ? 8 : 0);
  }
  return dim <= 4 ? 0 : dim <= 8 ? 1 : dim <= 16 ? 2 : 3;
#else
  (void)task;
  return 0;
#endif
}

// Calls launch(Rows()) with the kind of this number.
template <typename Launch>
int WithKind(int kind, const Launch& launch) {
#if defined(__CUDACC__)
  const auto packed = [&](auto sum, auto rule) {
    constexpr bool kSum = decltype(sum)::value;
    using Rule = typename decltype(rule)::type;
    switch (kind % 4) {
      case 0:
        return launch(PackedRows<4, kSum, Rule>());
      case 1:
        return launch(PackedRows<8, kSum, Rule>());
      case 2:
        return launch(PackedRows<16, kSum, Rule>());
      default:
        return launch(PackedRows<32, kSum, Rule>());
    }
  };
  if (kind < 4) {
    switch (kind) {
      case 0:
        return launch(AnyRows<4>());
      case 1:
        return launch(AnyRows<8>());
      case 2:
        return launch(AnyRows<16>());
      default:
        return launch(AnyRows<32>());
    }
  }
  const bool sgd = (kind - 4) / 4 % 2 != 0;
  if ((kind - 4) / 8 != 0) {
    return sgd ? packed(std::true_type(), TypeOf<PackedSgd>())
               : packed(std::true_type(), TypeOf<PackedAdagrad>());
  }
  return sgd ? packed(std::false_type(), TypeOf<PackedSgd>())
             : packed(std::false_type(), TypeOf<PackedAdagrad>());
#else
  (void)kind;
  return launch(AnyRows<1>());
#endif
}

// A task on the device, with the part of the plan that its kernels read.
struct DeviceTask {
  WriteArguments a;
  int64_t plan_at;
  PublishedState* host;
  uint64_t sequence;
  int64_t words;
};

struct DeviceTasks {
  const DeviceTask* tasks;
  const int64_t* begins;  // words, or blocks, of the tasks before
  int count;
  const char* plans;
};

// Uploads the tasks of one kind; sizes[i]: words or blocks of tasks[i].
template <typename Rows>
int UploadTasks(const std::vector<const WriteTask*>& tasks, const std::vector<int64_t>& sizes,
                UploadedJobs* uploaded, DeviceTasks* result, int64_t* all) {
  std::vector<DeviceTask> device;
  std::vector<int64_t> begins;
  std::vector<char> plans;
  *all = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const WriteTask& task = *tasks[i];
    device.push_back({task.arguments, static_cast<int64_t>(plans.size()), task.host, task.sequence,
                      CeilDiv(task.arguments.batch.n, kWordIds)});
    begins.push_back(*all);
    *all += sizes[i];
    const typename Rows::Plan& plan = Rows::PlanOf(task.plan);
    const size_t at = plans.size();
    const int64_t bytes = Rows::PlanBytes(task.plan);
    plans.resize(at + CeilDiv(bytes, 8) * 8);
    std::memcpy(plans.data() + at, &plan, static_cast<size_t>(bytes));
  }
  Workspace workspace;
  const auto tasks_slot = workspace.Put(device);
  const auto begins_slot = workspace.Put(begins);
  const auto plans_slot = workspace.Put(plans);
  MONO_GPU_TRY(uploaded->Upload(&workspace));
  *result = {workspace.At(tasks_slot), workspace.At(begins_slot), static_cast<int>(tasks.size()),
             workspace.At(plans_slot)};
  return MONO_GPU_OK;
}

// Calls launch(Rows(), tasks of that kind) for every kind that comes.
template <typename Launch>
int ForKinds(const std::vector<WriteTask>& tasks, const Launch& launch) {
  uint64_t done = 0;
  for (const WriteTask& task : tasks) {
    const int kind = KindOf(task);
    if (done >> kind & 1) continue;
    done |= uint64_t{1} << kind;
    std::vector<const WriteTask*> alike;
    for (const WriteTask& other : tasks) {
      if (KindOf(other) == kind) alike.push_back(&other);
    }
    MONO_GPU_TRY(WithKind(kind, [&](auto rows) { return launch(rows, alike); }));
  }
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_
