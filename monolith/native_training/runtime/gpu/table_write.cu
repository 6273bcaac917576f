// The kernels that write batches: find and step, number what is absent, insert.
#include <type_traits>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"

// Blocks that a multiprocessor holds, and rows that a tile steps at once; -D tries others.
#ifndef MONO_UPDATE_BLOCKS
#define MONO_UPDATE_BLOCKS 5
#endif
#ifndef MONO_UPDATE_AT_ONCE
#define MONO_UPDATE_AT_ONCE 1
#endif

namespace monolith {
namespace gpu {
namespace {

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

// Where the occurrences of id i are.
MONO_DEVICE uint32_t Skipped(const Batch& batch, int64_t i) {
  return batch.skips == nullptr ? 0 : batch.skips[i];
}
MONO_DEVICE int64_t Occurrences(const Batch& batch, int64_t i) {
  if (batch.starts == nullptr) return 1;
  return int64_t{batch.starts[i + 1]} - batch.starts[i] - Skipped(batch, i);
}
MONO_DEVICE int64_t Position(const Batch& batch, int64_t i, int64_t k) {
  if (batch.starts == nullptr) return i;
  return batch.order[batch.starts[i] + Skipped(batch, i) + k];
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
template <typename OnHit>
MONO_DEVICE void FindBatch(const WriteArguments& a, int64_t word, int lane, const OnHit& on_hit,
                           PerId<int64_t>* ids, PerId<uint32_t>* rows) {
  PerId<bool> wanted, absent;
  LoadBatch(a.batch, word, lane, ids, &wanted);
  FindRows(a.index, lane, *ids, wanted, on_hit, rows);
  for (int k = 0; k < kIdsPerLane; ++k) absent.own[k] = wanted.own[k] && rows->own[k] == 0;
  const uint32_t bits = WordOf(absent);
  if (lane == 0) {
    a.absent[word] = bits;
    if (bits != 0) a.index.state->any_absent = 1;
  }
}

// All occurrences of id i, in order.
template <int kTile>
MONO_DEVICE void ApplyAll(const WriteArguments& a, const RowPlan& plan, int64_t i, int64_t id,
                          bool fresh, int warp_lane, float* row) {
  const int64_t occurrences = Occurrences(a.batch, i);
  int bad = 0;
  for (int64_t k = 0; k < occurrences; ++k) {
    const int64_t position = Position(a.batch, i, k);
    const float* const source = a.source + position * a.source_floats;
    bad += ApplyToRow<kTile>(plan, id, source, fresh && k == 0, warp_lane % kTile, warp_lane, row);
    if (a.existed != nullptr && warp_lane % kTile == 0) a.existed[position] = !(fresh && k == 0);
  }
  if (bad > 0 && warp_lane % kTile == 0) {
    AtomicAdd(&a.index.state->nonfinite, static_cast<uint64_t>(bad));
  }
}

template <int kTile>
struct UpdateRows {
  WriteArguments a;
  RowPlan plan;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    PerId<int64_t> ids;
    PerId<uint32_t> rows;
    FindBatch(a, word, lane, SetTime{a, word * kWordIds}, &ids, &rows);
    for (int j = lane / kTile; j < kWordIds; j += kWarpLanes / kTile) {
      const uint32_t row = rows.Get(j);
      const int64_t id = ids.Get(j);
      if (row == 0) continue;
      ApplyAll<kTile>(a, plan, word * kWordIds + j, id, false, lane,
                      reinterpret_cast<float*>(a.rows + row * a.stride));
    }
  }
};

// Number of the row for the absent id of this rank: rows that were freed first, then new ones.
MONO_DEVICE uint32_t NewRow(const WriteArguments& a, uint64_t rank) {
  const TableState& state = *a.index.state;
  if (rank < state.free_before) return a.free_stack[state.free_before - 1 - rank];
  return static_cast<uint32_t>(state.next_before + rank - state.free_before);
}

MONO_DEVICE int BitCount(uint32_t bits) {
#if defined(__CUDACC__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// What the lanes of a block have inserted: 64 counters of the whole table would be fought for.
struct InsertCounts {
  uint32_t live[kTableShards];
  uint32_t reused[kTableShards];  // slots that were erased
};

MONO_DEVICE void AddOne(uint32_t* counter) {
#if defined(__CUDACC__)
  atomicAdd(counter, 1u);
#else
  ++*counter;
#endif
}

MONO_DEVICE void InsertOrSpill(const IndexView& index, int64_t id, uint32_t row, uint32_t ts,
                               InsertCounts* counts) {
  const uint64_t hash = index.hash(id);
  const int shard = ShardOfHash(hash);
  bool took_erased = false;
  if (InsertSlot(index.shards[shard], hash, id, row, ts, &took_erased)) {
    if (took_erased) AddOne(counts->reused + shard);
  } else {
    SpillSlot(index.spill, index.spill_capacity, index.state, {id, row, ts});
  }
  AddOne(counts->live + shard);
}

// New rows of any kind.
template <int kTile>
struct FillAnyRow {
  static constexpr int kLanesPerRow = kTile;
  RowPlan plan;

  MONO_DEVICE void operator()(const WriteArguments& a, int64_t i, int64_t id, int lane,
                              float* row) const {
    ApplyAll<kTile>(a, plan, i, id, true, lane, row);
  }
};

template <typename FillRow>
struct InsertRows {
  WriteArguments a;
  FillRow fill;

  MONO_DEVICE void operator()(int64_t word, int lane, InsertCounts* counts) const {
    constexpr int kTile = FillRow::kLanesPerRow;
    const uint32_t bits = a.absent[word];
    if (bits == 0) return;
    PerId<int64_t> ids;
    PerId<bool> wanted;
    LoadBatch(a.batch, word, lane, &ids, &wanted);
    PerId<uint32_t> rows;
    const uint64_t base = a.prefix[word];
    for (int k = 0; k < kIdsPerLane; ++k) {
      const int j = OwnId(lane, k);
      rows.own[k] = 0;
      if ((bits >> j & 1) == 0) continue;
      rows.own[k] = NewRow(a, base + BitCount(bits & ((1u << j) - 1)));
      InsertOrSpill(a.index, ids.own[k], rows.own[k], TimeOf(a, word * kWordIds + j), counts);
    }
#if defined(__CUDACC__)
    __syncwarp();
#endif
    for (int j = lane / kTile; j < kWordIds; j += kWarpLanes / kTile) {
      const uint32_t row = rows.Get(j);
      const int64_t id = ids.Get(j);
      if (row == 0) continue;
      fill(a, word * kWordIds + j, id, lane, reinterpret_cast<float*>(a.rows + row * a.stride));
    }
  }
};

#if defined(__CUDACC__)

// The last block hands the state to the host.
template <typename Functor>
__global__ void __launch_bounds__(kLanes, 2)
    InsertKernel(int64_t words, __grid_constant__ const Functor functor, TableState* host) {
  __shared__ InsertCounts counts;
  __shared__ bool last;
  TableState* const state = functor.a.index.state;
  if (state->any_absent != 0) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(counts) / 4); i += kLanes) {
      reinterpret_cast<uint32_t*>(&counts)[i] = 0;
    }
    __syncthreads();
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (kLanes / kWarpLanes);
    for (int64_t word =
             static_cast<int64_t>(blockIdx.x) * (kLanes / kWarpLanes) + threadIdx.x / kWarpLanes;
         word < words; word += warps) {
      functor(word, threadIdx.x % kWarpLanes, &counts);
    }
    __syncthreads();
    if (threadIdx.x < kTableShards) {
      const int s = threadIdx.x;
      if (counts.live[s] != 0) AtomicAdd(&state->live[s], static_cast<int64_t>(counts.live[s]));
      if (counts.reused[s] != 0) {
        AtomicAdd(&state->erased[s], -static_cast<int64_t>(counts.reused[s]));
      }
      __threadfence();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&state->blocks_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) {
    state->any_absent = 0;
    state->blocks_done = 0;
  }
  __syncthreads();
  const auto from = reinterpret_cast<const unsigned long long*>(state);
  const auto to = reinterpret_cast<unsigned long long*>(host);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(TableState) / 8); i += kLanes) {
    to[i] = __ldcg(from + i);
  }
}

template <typename Functor>
int ForAbsent(Stream stream, int64_t words, const Functor& functor, TableState* host) {
  const int64_t blocks = std::min(CeilDiv(words, kLanes / kWarpLanes), kFewBlocks);
  InsertKernel<Functor>
      <<<static_cast<unsigned>(blocks), kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
          words, functor, host);
  return CheckCuda(cudaGetLastError(), "launch of a kernel");
}

#else

template <typename Functor>
int ForAbsent(Stream, int64_t words, const Functor& functor, TableState* host) {
  InsertCounts counts = {};
  TableState* const state = functor.a.index.state;
  for (int64_t word = 0; word < words; ++word) functor(word, 0, &counts);
  for (int s = 0; s < kTableShards; ++s) {
    state->live[s] += counts.live[s];
    state->erased[s] -= counts.reused[s];
  }
  state->any_absent = 0;
  *host = *state;
  return MONO_GPU_OK;
}

#endif

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
  MONO_DEVICE void operator()(float g, float* w, float* n) const {
    engine::AdagradRule(lr, weight_decay, g, w, n);
  }
};

struct PackedSgd {
  static constexpr bool kHasState = false;
  float lr;
  MONO_DEVICE void operator()(float g, float* w, float*) const { engine::SgdRule(lr, g, w); }
};

// Rows of one segment with at most one state array, distinct ids: four floats a lane, several rows
// at once.
template <int kTile, int kAtOnce, typename Rule>
struct UpdatePacked {
  WriteArguments a;
  int dim;
  Rule rule;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    PerId<int64_t> ids;
    PerId<uint32_t> rows;
    FindBatch(a, word, lane, SetSameTime{a.ts}, &ids, &rows);
    constexpr int kTiles = kWarpLanes / kTile;
    const int tile = lane / kTile;
    MONO_ROLLED
    for (int begin = 0; begin < kWordIds; begin += kTiles * kAtOnce) {
      uint32_t numbers[kAtOnce];
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) numbers[u] = rows.Get(begin + u * kTiles + tile);
      bool bad[kAtOnce] = {};
      for (int c = lane % kTile * 4; c < dim; c += kTile * 4) {
        float4 w[kAtOnce], n[kAtOnce], g[kAtOnce];
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          if (numbers[u] == 0) continue;
          const float* const row = reinterpret_cast<const float*>(a.rows + numbers[u] * a.stride);
          const int64_t i = word * kWordIds + begin + u * kTiles + tile;
          w[u] = LoadFour(row + c);
          if (Rule::kHasState) n[u] = LoadFour(row + dim + c);
          g[u] = LoadFourOnce(a.source + i * dim + c);
        }
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          if (numbers[u] == 0) continue;
          float* const row = reinterpret_cast<float*>(a.rows + numbers[u] * a.stride);
          bad[u] |= AnyNonFinite(g[u]);
          rule(g[u].x, &w[u].x, &n[u].x);
          rule(g[u].y, &w[u].y, &n[u].y);
          rule(g[u].z, &w[u].z, &n[u].z);
          rule(g[u].w, &w[u].w, &n[u].w);
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
};

// New rows of that kind: made in registers and stored once.
template <int kTile, typename Rule>
struct FillPackedRow {
  static constexpr int kLanesPerRow = kTile;
  SegmentPlan segment;
  uint64_t seed;
  Rule rule;

  MONO_DEVICE void operator()(const WriteArguments& a, int64_t i, int64_t id, int lane,
                              float* row) const {
    const int dim = segment.dim;
    const uint64_t stream = engine::ValueStream(seed, id);
    bool bad = false;
    for (int c = lane % kTile * 4; c < dim; c += kTile * 4) {
      const float4 g = LoadFourOnce(a.source + i * dim + c);
      float4 w, n;
      w.x = InitialValue(segment, stream, c);
      w.y = InitialValue(segment, stream, c + 1);
      w.z = InitialValue(segment, stream, c + 2);
      w.w = InitialValue(segment, stream, c + 3);
      n.x = n.y = n.z = n.w = segment.fields[0].initial;
      bad |= AnyNonFinite(g);
      rule(g.x, &w.x, &n.x);
      rule(g.y, &w.y, &n.y);
      rule(g.z, &w.z, &n.z);
      rule(g.w, &w.w, &n.w);
      *reinterpret_cast<float4*>(row + c) = w;
      if (Rule::kHasState) *reinterpret_cast<float4*>(row + dim + c) = n;
    }
    if (AnyOfTile<kTile>(bad, lane) && lane % kTile == 0) {
      AtomicAdd(&a.index.state->nonfinite, uint64_t{1});
    }
  }
};

template <typename Rule>
int InsertPacked(Stream stream, const WriteArguments& a, const RowPlan& plan, const Rule& rule,
                 TableState* host) {
  const int64_t words = CeilDiv(a.batch.n, kWordIds);
  const auto insert = [&](auto tile) {
    using Fill = FillPackedRow<decltype(tile)::value, Rule>;
    return ForAbsent(stream, words, InsertRows<Fill>{a, Fill{plan.segments[0], plan.seed, rule}},
                     host);
  };
  if (plan.dim <= 16) return insert(std::integral_constant<int, 4>());
  if (plan.dim <= 32) return insert(std::integral_constant<int, 8>());
  return insert(std::integral_constant<int, 16>());
}

template <typename Rule>
int LaunchPacked(Stream stream, const WriteArguments& a, int dim, const Rule& rule) {
  const int64_t words = CeilDiv(a.batch.n, kWordIds);
  if (dim <= 16)
    return ForWarps<MONO_UPDATE_BLOCKS>(stream, words, kAllBlocks,
                                        UpdatePacked<4, MONO_UPDATE_AT_ONCE, Rule>{a, dim, rule});
  if (dim <= 32)
    return ForWarps<MONO_UPDATE_BLOCKS>(stream, words, kAllBlocks,
                                        UpdatePacked<8, MONO_UPDATE_AT_ONCE, Rule>{a, dim, rule});
  if (dim <= 64) {
    return ForWarps<MONO_UPDATE_BLOCKS>(stream, words, kAllBlocks,
                                        UpdatePacked<16, MONO_UPDATE_AT_ONCE, Rule>{a, dim, rule});
  }
  return ForWarps<MONO_UPDATE_BLOCKS>(stream, words, kAllBlocks,
                                      UpdatePacked<32, MONO_UPDATE_AT_ONCE, Rule>{a, dim, rule});
}

bool IsPacked(const WriteArguments& a, const RowPlan& plan) {
  return plan.mode == RowMode::kOptimize && plan.num_segments == 1 && plan.dim % 4 == 0 &&
         a.stride % 16 == 0 && a.batch.starts == nullptr &&
         reinterpret_cast<uintptr_t>(a.source) % 16 == 0 &&
         (plan.segments[0].flags & (SegmentPlan::kRounded | SegmentPlan::kDecoupled)) == 0 &&
         plan.segments[0].retriever != engine::RetrieverKind::kHashNet;
}

constexpr int kScanThreads = 1024;
constexpr int kScanWords = 32;  // of a thread

// One block: there are few words, and what follows needs the total at once.
__global__ void __launch_bounds__(kScanThreads)
    ScanKernel(const uint32_t* words, int64_t num_words, uint32_t* prefix, uint32_t* total,
               TableState* state) {
  __shared__ uint32_t warp_sums[kScanThreads / 32];
  __shared__ uint32_t carry;
  if (state != nullptr && state->any_absent == 0) {
    if (threadIdx.x == 0) state->new_ids = 0;
    return;
  }
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t begin = 0; begin < num_words; begin += kScanThreads * kScanWords) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kScanWords;
    uint32_t sum = 0;
    for (int i = 0; i < kScanWords; ++i) {
      if (first + i < num_words) sum += __popc(words[first + i]);
    }
    uint32_t inclusive = sum;
    for (int width = 1; width < 32; width *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, width);
      if (lane >= width) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
      uint32_t value = warp_sums[lane];
      for (int width = 1; width < 32; width *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, value, width);
        if (lane >= width) value += other;
      }
      warp_sums[lane] = value;
    }
    __syncthreads();
    uint32_t before = carry + inclusive - sum + (warp == 0 ? 0 : warp_sums[warp - 1]);
    for (int i = 0; i < kScanWords; ++i) {
      if (first + i >= num_words) break;
      prefix[first + i] = before;
      before += __popc(words[first + i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) carry += warp_sums[kScanThreads / 32 - 1];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (total != nullptr) *total = carry;
  if (state == nullptr) return;
  const uint64_t from_free = carry < state->free_rows ? carry : state->free_rows;
  state->new_ids = carry;
  state->free_before = state->free_rows;
  state->next_before = state->next_row;
  state->free_rows -= from_free;
  state->next_row += carry - from_free;
}

int Scan(Stream stream, const uint32_t* words, int64_t num_words, uint32_t* prefix, uint32_t* total,
         TableState* state) {
  ScanKernel<<<1, kScanThreads, 0, static_cast<cudaStream_t>(stream)>>>(words, num_words, prefix,
                                                                        total, state);
  return CheckCuda(cudaGetLastError(), "launch of a scan");
}

#else

int Scan(Stream, const uint32_t* words, int64_t num_words, uint32_t* prefix, uint32_t* total,
         TableState* state) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < num_words; ++i) {
    prefix[i] = sum;
    sum += BitCount(words[i]);
  }
  if (total != nullptr) *total = sum;
  if (state == nullptr) return MONO_GPU_OK;
  const uint64_t from_free = sum < state->free_rows ? sum : state->free_rows;
  state->new_ids = sum;
  state->free_before = state->free_rows;
  state->next_before = state->next_row;
  state->free_rows -= from_free;
  state->next_row += sum - from_free;
  return MONO_GPU_OK;
}

#endif

// Calls launch(tile) with the lanes that a row of `dim` floats takes, one at a time.
template <typename Launch>
int WithTile(int dim, const Launch& launch) {
#if defined(__CUDACC__)
  if (dim <= 4) return launch(std::integral_constant<int, 4>());
  if (dim <= 8) return launch(std::integral_constant<int, 8>());
  if (dim <= 16) return launch(std::integral_constant<int, 16>());
  return launch(std::integral_constant<int, 32>());
#else
  (void)dim;
  return launch(std::integral_constant<int, 1>());
#endif
}

struct CountAbsent {
  IndexView index;
  Batch batch;
  uint64_t* counts;

  MONO_DEVICE void operator()(int64_t i) const {
    if (i >= CountOf(batch) || FindSlot(index, batch.ids[i]) != nullptr) return;
    AtomicAdd(counts + ShardOfHash(index.hash(batch.ids[i])), uint64_t{1});
  }
};

}  // namespace

int ScanBits(Stream stream, const uint32_t* words, int64_t num_words, uint32_t* prefix,
             uint32_t* total) {
  return Scan(stream, words, num_words, prefix, total, nullptr);
}

int LaunchUpdate(Stream stream, const WriteArguments& a, const RowPlan& plan) {
#if defined(__CUDACC__)
  if (IsPacked(a, plan)) {
    const SegmentPlan& segment = plan.segments[0];
    if (segment.optimizer == engine::OptimizerKind::kAdagrad) {
      return LaunchPacked(stream, a, plan.dim, PackedAdagrad{segment.lr, segment.weight_decay});
    }
    if (segment.optimizer == engine::OptimizerKind::kSgd) {
      return LaunchPacked(stream, a, plan.dim, PackedSgd{segment.lr});
    }
  }
#endif
  return WithTile(plan.dim, [&](auto tile) {
    return ForWarps<2>(stream, CeilDiv(a.batch.n, kWordIds), kAllBlocks,
                       UpdateRows<decltype(tile)::value>{a, plan});
  });
}

int LaunchInsert(Stream stream, const WriteArguments& a, const RowPlan& plan, TableState* host) {
  const int64_t words = CeilDiv(a.batch.n, kWordIds);
  MONO_GPU_TRY(Scan(stream, a.absent, words, a.prefix, nullptr, a.index.state));
#if defined(__CUDACC__)
  if (IsPacked(a, plan)) {
    const SegmentPlan& segment = plan.segments[0];
    if (segment.optimizer == engine::OptimizerKind::kAdagrad) {
      const PackedAdagrad rule = {segment.lr, segment.weight_decay};
      return InsertPacked(stream, a, plan, rule, host);
    }
    if (segment.optimizer == engine::OptimizerKind::kSgd) {
      return InsertPacked(stream, a, plan, PackedSgd{segment.lr}, host);
    }
  }
#endif
  return WithTile(plan.dim, [&](auto tile) {
    using Fill = FillAnyRow<decltype(tile)::value>;
    return ForAbsent(stream, words, InsertRows<Fill>{a, Fill{plan}}, host);
  });
}

int LaunchCountAbsent(Stream stream, const IndexView& index, const Batch& batch, uint64_t* counts) {
  MONO_GPU_TRY(FillBytes(stream, counts, 0, kTableShards * static_cast<int64_t>(sizeof(*counts))));
  return ForEach(stream, batch.n, CountAbsent{index, batch, counts});
}

}  // namespace gpu
}  // namespace monolith
