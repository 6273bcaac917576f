// The index of a GPU table on the device: id -> row number and time of the last write.
//
//   64 shards by the top 6 bits of the hash; shard: an even number of lines of 4 slots
//   +-----------------+-----------------+-----------------+-----------------+
//   | key   row   ts  | key   row   ts  | key   row   ts  | key   row   ts  |   64 bytes
//   +-----------------+-----------------+-----------------+-----------------+
//     row 0: empty, 0xffffffff: erased; both with ts 0, whatever the key
//
// Probe order: the home line, its neighbour in the same 128 bytes, then other pairs of lines by
// double hashing. A search ends at a line with an empty slot, or after kMaxPairs pairs; a key that
// found no room on that way is in the spill list, which is empty as a rule.
//
// Writes find first (no slot changes but for times), then insert ids that are known to be absent
// and distinct: a slot is taken by one compare-and-swap of {row, ts}, then its key is stored.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_INDEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_INDEX_H_

#include <cstdint>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

constexpr int kTableShards = 64;
constexpr int kShardShift = 58;
constexpr int kSlotsPerLine = 4;
constexpr uint32_t kErasedRow = 0xffffffffu;
constexpr int kMaxPairs = 128;
// Ids that the lanes of a warp handle together, whose outcomes are one word of a bit map.
constexpr int kWordIds = 32;
// Stands for the row of an id that has none yet.
constexpr uint32_t kAbsentRow = kErasedRow;
// Ids of rows that were not finite, which messages name.
constexpr int kNamedIds = 8;

struct alignas(16) TableSlot {
  int64_t key;
  uint32_t row;
  uint32_t ts;
};

struct ShardView {
  TableSlot* slots;
  uint32_t lines;  // even
  uint32_t reserved;
};

// Counters of the device. Copied to the host after every write.
struct TableState {
  uint64_t next_row;   // first row that was never used
  uint64_t free_rows;  // height of the stack of rows to use again
  uint64_t spilled;
  uint64_t nonfinite;
  uint64_t filtered;
  uint64_t lost;               // keys for which the spill list was too short; must stay 0
  int64_t bad_ids[kNamedIds];  // the last of those that `nonfinite` counts, in turn
  int64_t live[kTableShards];
  int64_t erased[kTableShards];
  // State of the write under way:
  uint64_t new_ids;
  uint64_t free_before;
  uint64_t next_before;
  uint32_t any_absent;
  uint32_t blocks_done;
};

// Reports a write to the host: the number of the write is stored last.
struct PublishedState {
  TableState state;
  uint64_t sequence;
};

struct IndexView {
  engine::IdHash hash;
  const ShardView* shards;
  TableSlot* spill;
  uint64_t spill_capacity;
  TableState* state;
};

MONO_DEVICE bool IsLive(uint32_t row) { return row - 1u < kErasedRow - 1u; }

MONO_DEVICE int ShardOfHash(uint64_t hash) { return static_cast<int>(hash >> kShardShift); }

// The lines that may hold a key, one after the other.
struct ProbePath {
  TableSlot* slots;
  uint32_t lines;
  uint32_t line;
  uint32_t x;
  uint32_t step;
  int count;  // lines that were left behind

  MONO_DEVICE ProbePath(const ShardView& shard, uint64_t hash)
      : slots(shard.slots),
        lines(shard.lines),
        line(LineOf(static_cast<uint32_t>(hash), shard.lines)),
        x(static_cast<uint32_t>(hash)),
        // Never tiny: that would visit the same line again.
        step((static_cast<uint32_t>(hash >> 32) & 0x3ffffffu) << 6 | 0x80000001u),
        count(0) {}

  MONO_DEVICE static uint32_t LineOf(uint32_t x, uint32_t lines) {
    return static_cast<uint32_t>((static_cast<uint64_t>(x) * lines) >> 32);
  }
  MONO_DEVICE TableSlot* Line() const { return slots + static_cast<int64_t>(line) * kSlotsPerLine; }
  // False: the path ends here.
  MONO_DEVICE bool Next() {
    if (++count >= 2 * kMaxPairs) return false;
    if (count & 1) {
      line ^= 1;
    } else {
      const uint32_t half = (line & 1) ^ 1;  // of the pair that the home line is
      x += step;
      line = (LineOf(x, lines) & ~1u) | half;
    }
    return true;
  }
  // The same from pair to pair, at a home line or where NextPair led.
  MONO_DEVICE bool NextPair() {
    count += 2;
    if (count >= 2 * kMaxPairs) return false;
    x += step;
    line = (LineOf(x, lines) & ~1u) | (line & 1);
    return true;
  }
  MONO_DEVICE TableSlot* Pair() const {
    return slots + static_cast<int64_t>(line & ~1u) * kSlotsPerLine;
  }
};

// One access of 16 bytes.
MONO_DEVICE TableSlot LoadSlot(const TableSlot* slot) {
#if defined(__CUDACC__)
  const int4 bits = *reinterpret_cast<const int4*>(slot);
  return {static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(bits.y)) << 32 |
                               static_cast<uint32_t>(bits.x)),
          static_cast<uint32_t>(bits.z), static_cast<uint32_t>(bits.w)};
#else
  return *slot;
#endif
}

// Sets {row, ts} if the slot has `row`, 0 or kErasedRow with ts 0, before.
MONO_DEVICE bool TakeSlot(TableSlot* slot, uint32_t before, uint32_t row, uint32_t ts) {
#if defined(__CUDACC__)
  const auto word = reinterpret_cast<unsigned long long*>(&slot->row);
  return atomicCAS(word, static_cast<unsigned long long>(before),
                   static_cast<unsigned long long>(ts) << 32 | row) == before;
#else
  if (slot->row != before) return false;
  slot->row = row;
  slot->ts = ts;
  return true;
#endif
}

MONO_DEVICE uint64_t AtomicAdd(uint64_t* to, uint64_t value) {
#if defined(__CUDACC__)
  return atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
#else
  const uint64_t before = *to;
  *to += value;
  return before;
#endif
}

MONO_DEVICE void AtomicAnd(uint32_t* to, uint32_t bits) {
#if defined(__CUDACC__)
  atomicAnd(to, bits);
#else
  *to &= bits;
#endif
}

MONO_DEVICE int64_t AtomicAdd(int64_t* to, int64_t value) {
  return static_cast<int64_t>(
      AtomicAdd(reinterpret_cast<uint64_t*>(to), static_cast<uint64_t>(value)));
}

// The slot of `id` in the spill list, or null.
MONO_DEVICE TableSlot* FindSpilled(const IndexView& index, int64_t id) {
  const uint64_t spilled = index.state->spilled;
  for (uint64_t i = 0; i < spilled && i < index.spill_capacity; ++i) {
    if (index.spill[i].key == id && IsLive(index.spill[i].row)) return index.spill + i;
  }
  return nullptr;
}

// The slot of `id`, or null; each lane for itself.
MONO_DEVICE TableSlot* FindSlot(const IndexView& index, int64_t id) {
  const uint64_t hash = index.hash(id);
  ProbePath path(index.shards[ShardOfHash(hash)], hash);
  do {
    TableSlot* const line = path.Line();
    bool has_empty = false;
    for (int i = 0; i < kSlotsPerLine; ++i) {
      const TableSlot slot = LoadSlot(line + i);
      if (slot.key == id && IsLive(slot.row)) return line + i;
      has_empty |= slot.row == 0;
    }
    if (has_empty) return nullptr;
  } while (path.Next());
  return FindSpilled(index, id);
}

// Puts an absent id into a shard; each lane for itself. False: there is no room on its way.
MONO_DEVICE bool InsertSlot(const ShardView& shard, uint64_t hash, int64_t id, uint32_t row,
                            uint32_t ts, bool* took_erased) {
  ProbePath path(shard, hash);
  do {
    TableSlot* const line = path.Line();
    uint32_t rows[kSlotsPerLine];
    for (int i = 0; i < kSlotsPerLine; ++i) rows[i] = LoadSlot(line + i).row;
    for (int i = 0; i < kSlotsPerLine; ++i) {
      if (IsLive(rows[i]) || !TakeSlot(line + i, rows[i], row, ts)) continue;
      line[i].key = id;
      *took_erased = rows[i] == kErasedRow;
      return true;
    }
  } while (path.Next());
  return false;
}

// For a key that found no room.
MONO_DEVICE void SpillSlot(TableSlot* spill, uint64_t capacity, TableState* state,
                           const TableSlot& slot) {
  const uint64_t at = AtomicAdd(&state->spilled, uint64_t{1});
  if (at < capacity) {
    spill[at] = slot;
  } else {
    AtomicAdd(&state->lost, uint64_t{1});
  }
}

// -- Warps: 32 ids at a time. On the device each lane owns one of them; as loops one "lane" owns
// all.

#if defined(__CUDACC__)
constexpr int kWarpLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
#else
constexpr int kWarpLanes = 1;
#endif
constexpr int kIdsPerLane = kWordIds / kWarpLanes;

// One value for each of the 32 ids.
template <typename T>
struct PerId {
  T own[kIdsPerLane];

  // The value of id j; all lanes of the warp ask together.
  MONO_DEVICE T Get(int j) const {
#if defined(__CUDACC__)
    return __shfl_sync(kAllLanes, own[0], j);
#else
    return own[j];
#endif
  }
};

// A bit for each id.
MONO_DEVICE uint32_t WordOf(const PerId<bool>& flags) {
#if defined(__CUDACC__)
  return __ballot_sync(kAllLanes, flags.own[0]);
#else
  uint32_t word = 0;
  for (int j = 0; j < kWordIds; ++j) word |= static_cast<uint32_t>(flags.own[j]) << j;
  return word;
#endif
}

// Returns which of the 32 ids a lane's k-th is.
MONO_DEVICE int OwnId(int lane, int k) { return lane + k; }

#if defined(__CUDACC__)
// Searches the ids of a warp that are `pending` on: 32 lanes read four pairs of lines of one id,
// for several ids at a time. `path` is at a pair that was not read. Sets *ended where a path ends.
template <typename OnHit>
MONO_DEVICE void FindFarRows(int lane, int64_t id, bool pending, const OnHit& on_hit,
                             ProbePath* path, uint32_t* row, bool* ended) {
  constexpr int kIdsAtOnce = 8;
  constexpr int kPairsAtOnce = 4;
  const uint32_t ahead = static_cast<uint32_t>(lane) / 8;  // pairs
  for (unsigned left; (left = __ballot_sync(kAllLanes, pending)) != 0;) {
    TableSlot* slots[kIdsAtOnce];
    TableSlot seen[kIdsAtOnce];
    unsigned rest = left;
    MONO_UNROLL
    for (int u = 0; u < kIdsAtOnce; ++u, rest &= rest - 1) {
      if (rest == 0) break;
      const int j = __ffs(rest) - 1;
      const uint32_t x =
          __shfl_sync(kAllLanes, path->x, j) + ahead * __shfl_sync(kAllLanes, path->step, j);
      const uint32_t lines = __shfl_sync(kAllLanes, path->lines, j);
      const int before = __shfl_sync(kAllLanes, path->count, j) / 2;
      const auto first = reinterpret_cast<TableSlot*>(
          __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(path->slots), j));
      slots[u] = first + static_cast<int64_t>(ProbePath::LineOf(x, lines) & ~1u) * kSlotsPerLine +
                 lane % 8;
      seen[u] = {0, kErasedRow, 0};
      if (before + static_cast<int>(ahead) < kMaxPairs) seen[u] = LoadSlot(slots[u]);
    }
    rest = left;
    MONO_UNROLL
    for (int u = 0; u < kIdsAtOnce; ++u, rest &= rest - 1) {
      if (rest == 0) break;
      const int j = __ffs(rest) - 1;
      const bool hit = seen[u].key == __shfl_sync(kAllLanes, id, j) && IsLive(seen[u].row);
      const unsigned hits = __ballot_sync(kAllLanes, hit);
      const bool absent = __any_sync(kAllLanes, seen[u].row == 0) != 0;
      const uint32_t found = __shfl_sync(kAllLanes, seen[u].row, hits == 0 ? 0 : __ffs(hits) - 1);
      if (hit) on_hit(slots[u], seen[u], j);
      if (lane != j) continue;
      if (hits != 0) *row = found;
      path->x += kPairsAtOnce * path->step;
      path->count += 2 * kPairsAtOnce;
      *ended = hits == 0 && !absent && path->count >= 2 * kMaxPairs;
      pending = hits == 0 && !absent && !*ended;
    }
  }
}
#endif

// How a warp walks along the lines of its ids.
enum class Walk {
  kLines,  // one at a time: the fewest bytes
  kFar,  // a pair, then four pairs at a time: few ids are that far away, and the longest way counts
};

// Sets rows to those of the ids where `wanted`, 0 where absent. on_hit(slot, seen, j) is called by
// one lane for every id j that was found.
template <Walk kWalk, typename OnHit>
MONO_DEVICE void FindRows(const IndexView& index, int lane, const PerId<int64_t>& ids,
                          const PerId<bool>& wanted, const OnHit& on_hit, PerId<uint32_t>* rows) {
#if defined(__CUDACC__)
  constexpr bool kPairs = kWalk == Walk::kFar;
  // Four lanes read one line; the ids of four lanes are searched by these, all four at once.
  const int own = lane & 3;
  const int group = lane & 28;
  const int64_t id = ids.own[0];
  const uint64_t hash = index.hash(id);
  ProbePath path(index.shards[ShardOfHash(hash)], hash);
  bool pending = wanted.own[0];
  bool ended = false;
  uint32_t row = 0;
  while (true) {
    const unsigned all_pending = __ballot_sync(kAllLanes, pending);
    if (all_pending == 0) break;
    const uint64_t line = reinterpret_cast<uint64_t>(kPairs ? path.Pair() : path.Line());
    constexpr int kLines = kPairs ? 2 : 1;
    TableSlot seen[4][kLines];
    MONO_UNROLL
    for (int r = 0; r < 4; ++r) {
      const auto slot =
          reinterpret_cast<const TableSlot*>(__shfl_sync(kAllLanes, line, r, 4)) + own;
      MONO_UNROLL
      for (int l = 0; l < kLines; ++l) {
        seen[r][l] = {0, kErasedRow, 0};
        if (all_pending >> (group + r) & 1) seen[r][l] = LoadSlot(slot + l * kSlotsPerLine);
      }
    }
    MONO_UNROLL
    for (int r = 0; r < 4; ++r) {
      const int64_t key = __shfl_sync(kAllLanes, id, r, 4);
      // Once more, not kept: registers are what limits the warps in flight.
      const auto slot = reinterpret_cast<TableSlot*>(__shfl_sync(kAllLanes, line, r, 4)) + own;
      unsigned empty = 0;
      MONO_UNROLL
      for (int l = 0; l < kLines; ++l) {
        const bool hit = seen[r][l].key == key && IsLive(seen[r][l].row);
        const unsigned hits = __ballot_sync(kAllLanes, hit) >> group & 15;
        empty |= __ballot_sync(kAllLanes, seen[r][l].row == 0) >> group & 15;
        const uint32_t found =
            __shfl_sync(kAllLanes, seen[r][l].row, hits == 0 ? 0 : __ffs(hits) - 1, 4);
        if (hit) on_hit(slot + l * kSlotsPerLine, seen[r][l], group + r);
        if (own == r && pending && hits != 0) {
          row = found;
          pending = false;
        }
      }
      if (own == r && empty != 0) pending = false;
    }
    if (pending && !(kPairs ? path.NextPair() : path.Next())) {
      pending = false;
      ended = true;
    }
    if (kWalk == Walk::kFar) {
      FindFarRows(lane, id, pending, on_hit, &path, &row, &ended);
      break;
    }
  }
  if (ended) {
    TableSlot* const slot = FindSpilled(index, id);
    if (slot != nullptr) {
      row = slot->row;
      on_hit(slot, *slot, lane);
    }
  }
  __syncwarp();
  rows->own[0] = row;
#else
  (void)lane;
  for (int j = 0; j < kWordIds; ++j) {
    rows->own[j] = 0;
    if (!wanted.own[j]) continue;
    TableSlot* const slot = FindSlot(index, ids.own[j]);
    if (slot == nullptr) continue;
    rows->own[j] = slot->row;
    on_hit(slot, *slot, j);
  }
#endif
}

#if defined(__CUDACC__)
template <int kMinBlocks, typename Functor>
__global__ void __launch_bounds__(kLanes, kMinBlocks)
    WarpKernel(int64_t words, __grid_constant__ const Functor functor) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kLanes / kWarpLanes);
  const int lane = threadIdx.x % kWarpLanes;
  for (int64_t word =
           static_cast<int64_t>(blockIdx.x) * (kLanes / kWarpLanes) + threadIdx.x / kWarpLanes;
       word < words; word += warps) {
    functor(word, lane);
  }
}
#endif

// Calls functor(word, lane) with all lanes of a warp for every word in [0, words). At most
// `max_blocks` blocks.
template <int kMinBlocks = 1, typename Functor>
int ForWarps(Stream stream, int64_t words, int64_t max_blocks, const Functor& functor) {
  if (words <= 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  const int64_t blocks = std::min(CeilDiv(words, kLanes / kWarpLanes), max_blocks);
  WarpKernel<kMinBlocks, Functor>
      <<<static_cast<unsigned>(blocks), kLanes, 0, static_cast<cudaStream_t>(stream)>>>(words,
                                                                                        functor);
  return CheckCuda(cudaGetLastError(), "launch of a kernel");
#else
  (void)stream, (void)max_blocks;
  for (int64_t word = 0; word < words; ++word) functor(word, 0);
  return MONO_GPU_OK;
#endif
}

constexpr int64_t kAllBlocks = int64_t{1} << 30;
// Enough to fill any GPU; for kernels that often have nothing to do.
constexpr int64_t kFewBlocks = 1056;

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_INDEX_H_
