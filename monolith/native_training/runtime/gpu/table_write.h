// Lets the kernels of a write change the rows of a word of 32 ids, any row and packed ones:
//
//   Rows::Plan                                 what they know of a row and its step
//   Rows::Step(a, plan, word, lane, ids, rows) steps the rows that were found (0: no id)
//   Rows::Fill(a, plan, i, id, lane, row)      makes the row of the i-th id and steps it
//
// All lanes of a warp call Step, kTile lanes of it Fill.
//
// A number that is not finite is found where it is loaded to be used: Step looks at the gradients
// of absent ids, too (kAbsentRow), so that an id of which nothing is finite is out of the write
// before it is numbered, asked a filter for, or gets a row.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_

#include <type_traits>

#include "monolith/native_training/runtime/gpu/device_math.h"
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

// Returns the source of the k-th step of id i; where gradients are summed, all sums are there.
MONO_DEVICE const float* SourceOf(const WriteArguments& a, int64_t i, int64_t k) {
  const Batch& batch = a.batch;
  if (!batch.sum) return a.source.Floats(Position(batch, i, k));
  const int64_t row = batch.sum_rows[i];
  if (batch.starts[i + 1] - batch.starts[i] == 1) return a.source.Floats(row);
  return batch.sums + row * a.source_floats;
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
    a.times[first + j] = seen.ts;
    if (seen.ts != ts) slot->ts = ts;  // do not dirty the line for nothing
  }
};

// The same where all rows of the batch have one time.
struct SetSameTime {
  const WriteArguments& a;
  int64_t first;
  MONO_DEVICE void operator()(TableSlot* slot, const TableSlot& seen, int j) const {
    a.times[first + j] = seen.ts;
    if (seen.ts != a.ts) slot->ts = a.ts;
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
  for (int k = 0; k < kIdsPerLane; ++k) {
    if (absent.own[k]) rows->own[k] = kAbsentRow;
  }
#if defined(__CUDACC__)
  __syncwarp();
#endif
}

// -- What is not finite.

// Whether a write looks at its values; what is loaded, and rows that begin anew, have none to look
// at.
MONO_DEVICE bool ChecksValues(const WriteArguments& a, RowMode mode) {
  return mode == RowMode::kOptimize ||
         (a.refuses && (mode == RowMode::kAssign || mode == RowMode::kAssignAdd));
}

// Counts what of an id is not finite, and names it.
MONO_DEVICE void CountBad(const WriteArguments& a, int64_t id, int64_t times) {
  TableState* const state = a.index.state;
  const uint64_t at = AtomicAdd(&state->nonfinite, static_cast<uint64_t>(times));
  for (int64_t k = 0; k < times && k < kNamedIds; ++k) state->bad_ids[(at + k) % kNamedIds] = id;
}

// Takes the i-th id out of the batch: a row has the time that it had, and none is made.
MONO_DEVICE void LeaveOut(const WriteArguments& a, int64_t i, bool present) {
  if (present) {
    FindSlot(a.index, a.batch.ids[i])->ts = a.times[i];
  } else {
    AtomicAnd(a.absent + i / kWordIds, ~(1u << (i % kWordIds)));
  }
}

// -- Any rows.

// Has what the k-th step of id i takes on its way: steps of one id wait for one another, but what
// they take need not be waited for.
MONO_DEVICE void FetchAhead(const WriteArguments& a, int64_t i, int64_t k, int64_t occurrences) {
#if defined(__CUDACC__)
  if (k >= occurrences || a.source.data == nullptr) return;
  const auto source = reinterpret_cast<const char*>(SourceOf(a, i, k));
  for (int64_t byte = 0; byte < a.source_floats * 4; byte += 128) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(source + byte));
  }
#else
  (void)a, (void)i, (void)k, (void)occurrences;
#endif
}

// Looks at what an absent id is to take.
template <int kTile>
MONO_DEVICE void CheckAbsent(const WriteArguments& a, const RowPlan& plan, int64_t i, int64_t id,
                             int warp_lane) {
  if (!ChecksValues(a, plan.mode)) return;
  const int lane = warp_lane % kTile;
  const int64_t occurrences = Occurrences(a.batch, i);
  int64_t bad = 0;
  for (int64_t k = 0; k < occurrences; ++k) {
    bad += HasNonFinite<kTile>(SourceOf(a, i, k), plan.dim, lane, warp_lane);
  }
  if (bad == 0 || lane != 0) return;
  CountBad(a, id, bad);
  if (a.refuses && bad == occurrences) LeaveOut(a, i, false);
}

// All occurrences of id i, in order.
template <int kTile>
MONO_DEVICE void ApplyAll(const WriteArguments& a, const RowPlan& plan, int64_t i, int64_t id,
                          bool fresh, int warp_lane, float* row) {
  const int lane = warp_lane % kTile;
  const int64_t occurrences = Occurrences(a.batch, i);
  const bool checks = ChecksValues(a, plan.mode);
  // Overwriting a row leaves nothing of the values before it.
  const bool only_last = plan.mode == RowMode::kAssign || plan.mode == RowMode::kLoad;
  bool blank = fresh;  // nothing is in the row yet
  int64_t bad = 0, last = -1;
  for (int64_t k = only_last && !checks ? occurrences - 1 : 0; k < occurrences; ++k) {
    if (occurrences > 1 && k % kTile == 0) {
      const int64_t ahead = k + lane;
      if (k == 0) FetchAhead(a, i, ahead, occurrences);
      FetchAhead(a, i, ahead + kTile, occurrences);
    }
    const float* const source = SourceOf(a, i, k);
    if (checks && HasNonFinite<kTile>(source, plan.dim, lane, warp_lane)) {
      ++bad;
      if (a.refuses) continue;
    }
    last = k;
    if (only_last) continue;
    ApplyToRow<kTile>(plan, id, source, blank, lane, warp_lane, row);
    if (a.existed != nullptr && lane == 0) a.existed[Position(a.batch, i, k)] = !blank;
    blank = false;
  }
  if (only_last && last >= 0) {
    ApplyToRow<kTile>(plan, id, SourceOf(a, i, last), blank, lane, warp_lane, row);
    blank = false;
  }
  // A filter has dropped all that is finite, and let in what is not.
  if (blank) InitializeRow<kTile>(plan, id, lane, row);
  // Those of a new row were counted when it was absent.
  if (fresh || bad == 0 || lane != 0) return;
  CountBad(a, id, bad);
  if (a.refuses && bad == occurrences) LeaveOut(a, i, true);
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
      const int64_t i = word * kWordIds + j;
      if (row == 0) continue;
      if (row == kAbsentRow) {
        CheckAbsent<kTile>(a, plan, i, id, lane);
      } else {
        ApplyAll<kTile>(a, plan, i, id, false, lane,
                        reinterpret_cast<float*>(a.rows + row * a.stride));
      }
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

// Four gradients of the i-th id of 16 bits. Where it comes more than once they were added before,
// so that this has few registers.
template <bool kSum>
MONO_DEVICE float4 LoadHalves(const WriteArguments& a, int dim, int64_t i,
                              const GradientPlace& place, int c) {
  if (kSum && place.count != 1) {
    return LoadFourOnce(a.batch.sums + static_cast<int64_t>(place.row) * dim + c);
  }
  const int64_t row = kSum ? static_cast<int64_t>(place.row) : i;
  const Pack<4> pack = a.source.type == FloatType::kBfloat16
                           ? a.source.LoadOnce<4, FloatType::kBfloat16>(row, c)
                           : a.source.LoadOnce<4, FloatType::kFloat16>(row, c);
  return make_float4(pack.values[0], pack.values[1], pack.values[2], pack.values[3]);
}

// Four gradients of the i-th id, or their sum.
template <bool kSum>
MONO_DEVICE float4 LoadGradient(const WriteArguments& a, int dim, int64_t i,
                                const GradientPlace& place, int c) {
  // All lanes of a launch go the same way.
  if (a.source.type != FloatType::kFloat32) return LoadHalves<kSum>(a, dim, i, place, c);
  if (!kSum) return LoadFourOnce(a.source.Floats(i) + c);
  if (place.count == 1) return LoadFourOnce(a.source.Floats(place.row) + c);
  if (place.count > kFusedRows) {
    return LoadFourOnce(a.batch.sums + static_cast<int64_t>(place.row) * dim + c);
  }
  float4 rows[kFusedRows];
  MONO_UNROLL
  for (uint32_t k = 0; k < kFusedRows; ++k) {
    if (k >= place.count) continue;
    rows[k] = LoadFourOnce(a.source.Floats(a.batch.order[place.row + k]) + c);
  }
  float4 sum = rows[0];
  MONO_UNROLL
  for (uint32_t k = 1; k < kFusedRows; ++k) {
    if (k < place.count) AddFour(rows[k], &sum);
  }
  return sum;
}

// The ids of a warp's tiles in which a lane says so, a bit for each tile.
template <int kTile>
MONO_DEVICE uint32_t TilesOf(unsigned lanes) {
  uint32_t tiles = 0;
  for (int t = 0; t < kWarpLanes / kTile; ++t) {
    tiles |= static_cast<uint32_t>((lanes & TileMask<kTile>(t * kTile)) != 0) << t;
  }
  return tiles;
}

// Counts the ids of a word that have a bit, each by its lane, and leaves them out. Not inlined: it
// hardly ever runs, and registers are what limits the warps in flight.
__device__ __noinline__ inline void CountBadIds(const WriteArguments& a, int64_t word, int lane,
                                                uint32_t bits, uint32_t row) {
  if ((bits >> lane & 1) == 0) return;
  const int64_t i = word * kWordIds + lane;
  CountBad(a, a.batch.ids[i], 1);
  if (a.refuses) LeaveOut(a, i, row != kAbsentRow);
}

// Rows of one segment with at most one state array, each stepped once: four floats a lane, and
// where kInParts several times four.
template <int kLanesOfRow, bool kInParts, bool kSum, typename Rule>
struct PackedRows {
  static constexpr int kTile = kLanesOfRow;
  static constexpr int kMinBlocks = kSum ? 4 : 5;
  static constexpr int kFloats = kTile * 4;  // of a row that a tile takes at once
  using Plan = PackedPlan;

  static Plan PlanOf(const RowPlan& plan) { return {plan.segments[0], plan.seed}; }
  static int64_t PlanBytes(const RowPlan&) { return sizeof(Plan); }

  MONO_DEVICE static void StepRow(const Rule& rule, int dim, float* row, int c, const float4& g) {
    float4 w = LoadFour(row + c), n;
    if (Rule::kHasState) n = LoadFour(row + dim + c);
    StepFour(rule, g, &w, &n);
    *reinterpret_cast<float4*>(row + c) = w;
    if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n;
  }

  MONO_DEVICE static void Step(const WriteArguments& a, const Plan& plan, int64_t word, int lane,
                               const PerId<int64_t>&, const PerId<uint32_t>& rows) {
    const Rule rule(plan.segment);
    const int dim = plan.segment.dim;
    constexpr int kTiles = kWarpLanes / kTile;
    const int tile = lane / kTile, c = lane % kTile * 4;
    PerId<uint32_t> counts, source_rows;
    if (kSum && rows.own[0] != 0) {
      const GradientPlace own = PlaceOf(a.batch, word * kWordIds + lane);
      counts.own[0] = own.count;
      source_rows.own[0] = own.row;
    }
    uint32_t bad_ids = 0;
    MONO_ROLLED
    for (int begin = 0; begin < kWordIds; begin += kTiles) {
      const int j = begin + tile;
      const uint32_t number = rows.Get(j);
      GradientPlace place = {};
      if (kSum) place = {counts.Get(j), source_rows.Get(j)};
      const auto load = [&](int at) {
        return LoadGradient<kSum>(a, dim, word * kWordIds + j, place, at);
      };
      float* const row = reinterpret_cast<float*>(a.rows + number * a.stride);
      bool steps = number != 0 && number != kAbsentRow;
      // All loads before the vote: they are under way together.
      float4 w, n, g;
      bool bad = false;
      if (steps && c < dim) {
        w = LoadFour(row + c);
        if (Rule::kHasState) n = LoadFour(row + dim + c);
      }
      if (number != 0 && c < dim) {
        g = load(c);
        bad = AnyNonFinite(g);
      }
      for (int at = c + kFloats; kInParts && at < dim; at += kFloats) {
        if (number != 0) bad |= AnyNonFinite(load(at));
      }
      const unsigned lanes = __ballot_sync(kAllLanes, bad);
      if (lanes != 0) {
        bad_ids |= TilesOf<kTile>(lanes) << begin;
        if (a.refuses && (lanes & TileMask<kTile>(lane)) != 0) steps = false;
      }
      if (steps && c < dim) {
        StepFour(rule, g, &w, &n);
        *reinterpret_cast<float4*>(row + c) = w;
        if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n;
      }
      for (int at = c + kFloats; kInParts && at < dim; at += kFloats) {
        if (steps) StepRow(rule, dim, row, at, load(at));
      }
    }
    if (bad_ids != 0) CountBadIds(a, word, lane, bad_ids, rows.own[0]);
  }

  // Made in registers and stored once.
  MONO_DEVICE static void Fill(const WriteArguments& a, const Plan& plan, int64_t i, int64_t id,
                               int lane, float* row) {
    const Rule rule(plan.segment);
    const SegmentPlan& segment = plan.segment;
    const int dim = segment.dim;
    const uint64_t stream = engine::ValueStream(plan.seed, id);
    const GradientPlace place = kSum ? PlaceOf(a.batch, i) : GradientPlace{};
    for (int c = lane % kTile * 4; c < dim; c += kFloats) {
      const float4 g = LoadGradient<kSum>(a, dim, i, place, c);
      float4 w, n;
      w.x = InitialValue(segment, stream, c);
      w.y = InitialValue(segment, stream, c + 1);
      w.z = InitialValue(segment, stream, c + 2);
      w.w = InitialValue(segment, stream, c + 3);
      n.x = n.y = n.z = n.w = segment.fields[0].initial;
      StepFour(rule, g, &w, &n);
      *reinterpret_cast<float4*>(row + c) = w;
      if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n;
    }
  }
};

#endif

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_WRITE_H_
