// How GPU tables grow: room for writes, rebuilt shards.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/table_jobs.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"

namespace monolith {
namespace gpu {
namespace {

// Slots of a shard that keys and erased ones may take before it grows, and at the very most while
// the host has not looked.
constexpr double kCrowded = 0.80;
constexpr double kFull = 0.94;
constexpr double kGrowth = 1.25;
// Lines that may be made for ids of which nobody knows whether they are new.
constexpr int64_t kAheadBytes = int64_t{64} << 20;

int64_t CrowdedSlots(int64_t slots) { return static_cast<int64_t>(kCrowded * slots); }
int64_t FullSlots(int64_t slots) { return static_cast<int64_t>(kFull * slots); }

int64_t LineBytes(int64_t lines) {
  return lines * kSlotsPerLine * static_cast<int64_t>(sizeof(TableSlot));
}

struct ShardViews {
  ShardView views[kTableShards];
};

struct SetShards {
  ShardViews from;
  ShardView* to;
  TableState* state;
  uint64_t rebuilt;

  MONO_DEVICE void operator()(int64_t s) const {
    to[s] = from.views[s];
    if (rebuilt >> s & 1) state->erased[s] = 0;
  }
};

// Shards that one launch rebuilds: what fits into the parameters of a kernel.
constexpr int kMovesAtOnce = 32;
// Bytes of new lines beside old ones, if it is more than one shard.
constexpr int64_t kMoveBytes = int64_t{32} << 20;

struct Moves {
  const TableSlot* from[kMovesAtOnce];
  ShardView to[kMovesAtOnce];
  int64_t from_begins[kMovesAtOnce];  // slots of the shards before
  int64_t to_begins[kMovesAtOnce];
  int64_t from_slots, to_slots;  // of all
  int count;
};

struct ClearSlots {
  Moves moves;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    for (int k = 0; k < kIdsPerLane; ++k) {
      const int64_t i = word * kWordIds + OwnId(lane, k);
      if (i >= moves.to_slots) return;
      const int job = JobAt(moves.to_begins, moves.count, i);
      moves.to[job].slots[i - moves.to_begins[job]] = TableSlot{0, 0, 0};
    }
  }
};

// Puts the keys of old lines into new ones.
struct MoveSlots {
  engine::IdHash hash;
  Moves moves;
  TableSlot* spill;
  uint64_t spill_capacity;
  TableState* state;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    for (int k = 0; k < kIdsPerLane; ++k) {
      const int64_t i = word * kWordIds + OwnId(lane, k);
      if (i >= moves.from_slots) return;
      const int job = JobAt(moves.from_begins, moves.count, i);
      const TableSlot slot = LoadSlot(moves.from[job] + (i - moves.from_begins[job]));
      if (!IsLive(slot.row)) continue;
      bool took_erased;
      if (!InsertSlot(moves.to[job], hash(slot.key), slot.key, slot.row, slot.ts, &took_erased)) {
        SpillSlot(spill, spill_capacity, state, slot);
      }
    }
  }
};

// One lane: there is hardly ever anything to do.
struct TakeBackSpilled {
  IndexView index;

  MONO_DEVICE void operator()(int64_t) const {
    uint64_t left = 0;
    const uint64_t spilled = index.state->spilled;
    for (uint64_t i = 0; i < spilled; ++i) {
      const TableSlot slot = index.spill[i];
      if (!IsLive(slot.row)) continue;
      const uint64_t hash = index.hash(slot.key);
      const int shard = ShardOfHash(hash);
      bool took_erased = false;
      if (InsertSlot(index.shards[shard], hash, slot.key, slot.row, slot.ts, &took_erased)) {
        if (took_erased) AtomicAdd(&index.state->erased[shard], int64_t{-1});
      } else {
        index.spill[left++] = slot;
      }
    }
    index.state->spilled = left;
  }
};

}  // namespace

// Ids of a batch of n that fall into one shard: the mean and six standard deviations.
int64_t GpuTable::Allowance(int64_t n) {
  const double mean = static_cast<double>(n) / kTableShards;
  return std::min(n, static_cast<int64_t>(std::ceil(mean + 6.0 * std::sqrt(mean))) + 1);
}

// Sizes follow 1.25^(k + shard / 64), so that shards do not grow all at once.
uint32_t GpuTable::ScheduledLines(int shard, int64_t keys) const {
  const double lines = static_cast<double>(keys) / (kCrowded * kSlotsPerLine) + 1;
  const double phase = static_cast<double>(shard) / kTableShards;
  const double k = std::ceil(std::log(lines) / std::log(kGrowth) - phase);
  const double scheduled = std::pow(kGrowth, std::max(k, 0.0) + phase);
  return static_cast<uint32_t>(
      std::max<int64_t>(2, 2 * CeilDiv(static_cast<int64_t>(scheduled), 2)));
}

int GpuTable::EnsureScratch(Stream stream, int64_t n) {
  const int64_t words = CeilDiv(n, kWordIds);
  // The first one last: its size stands for all.
  if (times_.bytes() >= words * kWordIds * 4) return MONO_GPU_OK;
  for (DeviceBuffer* const buffer : {&times_, &absent_, &prefix_}) buffer->Free(stream);
  MONO_GPU_TRY(prefix_.Allocate(stream, words * 4, "the absent ids of a batch"));
  MONO_GPU_TRY(absent_.Allocate(stream, words * 4, "the absent ids of a batch"));
  return times_.Allocate(stream, words * kWordIds * 4, "the times of a batch");
}

// Whether n ids more have room for certain, as far as the host knows.
bool GpuTable::Fits(int64_t n, bool rows_only) const {
  const int64_t free = static_cast<int64_t>(known_.free_rows) + mapped_rows() -
                       static_cast<int64_t>(known_.next_row) - in_flight_ids_;
  if (free < n) return false;
  if (rows_only) return true;
  const int64_t spill = spill_.bytes() / static_cast<int64_t>(sizeof(TableSlot));
  if (known_.spilled > 0 || in_flight_ids_ + n > spill) return false;
  int64_t allowance = Allowance(n);
  for (const InFlight& write : in_flight_) allowance += Allowance(write.n);
  for (int s = 0; s < kTableShards; ++s) {
    if (known_.live[s] + known_.erased[s] + allowance > FullSlots(shards_[s].num_slots())) {
      return false;
    }
  }
  return true;
}

int GpuTable::MakeRoom(Stream stream, const Batch& batch) {
  MONO_GPU_TRY(Poll(kPublishedRing));
  MONO_GPU_TRY(GrowCrowdedShards(stream));
  if (Fits(batch.n, false)) return MONO_GPU_OK;
  ++waits_;
  MONO_GPU_TRY(ReadState(stream));
  const int64_t spill_bytes = 2 * batch.n * static_cast<int64_t>(sizeof(TableSlot));
  MONO_GPU_TRY(MoveSpilled(stream));
  if (spill_.bytes() < spill_bytes) {
    spill_.Free(stream);
    MONO_GPU_TRY(spill_.Allocate(stream, spill_bytes, "the spill list of a table"));
  }
  MONO_GPU_TRY(GrowCrowdedShards(stream));
  // Room for a batch of new ids costs little and spares all later ones of that size a look.
  MONO_GPU_TRY(MakeRoomAhead(stream, batch.n));
  if (Fits(batch.n, false)) return MONO_GPU_OK;
  // How many rows and slots the batch really needs.
  DeviceBuffer counts;
  uint64_t absent[kTableShards];
  MONO_GPU_TRY(counts.Allocate(stream, sizeof(absent), "counting absent ids"));
  int code = LaunchCountAbsent(stream, View(), batch, counts.As<uint64_t>());
  if (code == MONO_GPU_OK) code = CopyToHost(stream, counts.As<uint64_t>(), absent, sizeof(absent));
  counts.Free(stream);
  MONO_GPU_TRY(code);
  int64_t all = 0;
  for (const uint64_t count : absent) all += static_cast<int64_t>(count);
  const int64_t new_rows = std::max<int64_t>(0, all - static_cast<int64_t>(known_.free_rows)) +
                           static_cast<int64_t>(known_.next_row);
  if (new_rows > static_cast<int64_t>(kErasedRow)) {
    return Fail(MONO_GPU_OUT_OF_MEMORY, "a table of dim " + std::to_string(layout_.dim) +
                                            " has no numbers for more than 2^32 - 2 rows");
  }
  const int mapped = arena_.Grow(new_rows * stride_);
  if (mapped != MONO_GPU_OK) {
    int64_t live = 0;
    for (const int64_t count : known_.live) live += count;
    return Fail(mapped, "a GPU table of dim " + std::to_string(layout_.dim) + " has " +
                            std::to_string(live) + " rows of " + std::to_string(stride_) +
                            " bytes and needs " + std::to_string(all) +
                            " more: " + mono_gpu_last_error());
  }
  NewLines lines = {};
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t keys = known_.live[s] + static_cast<int64_t>(absent[s]);
    if (keys + known_.erased[s] <= FullSlots(shards_[s].num_slots())) continue;
    lines[s] = ScheduledLines(s, keys);
  }
  return Rebuild(stream, lines);
}

// Makes room for n new ids if there is memory for that; not having it is no error.
int GpuTable::MakeRoomAhead(Stream stream, int64_t n) {
  const int64_t rows = static_cast<int64_t>(known_.next_row) + n -
                       std::min(n, static_cast<int64_t>(known_.free_rows));
  if (rows <= static_cast<int64_t>(kErasedRow)) {
    const int code = arena_.Grow(rows * stride_);
    if (code != MONO_GPU_OK && code != MONO_GPU_OUT_OF_MEMORY) return code;
  }
  NewLines lines = {};
  int64_t more = 0;
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t keys = known_.live[s] + Allowance(n);
    if (keys + known_.erased[s] <= FullSlots(shards_[s].num_slots())) continue;
    lines[s] = ScheduledLines(s, keys);
    more += LineBytes(lines[s]) - LineBytes(shards_[s].lines);
  }
  if (more > kAheadBytes) return MONO_GPU_OK;
  const int code = Rebuild(stream, lines);
  return code == MONO_GPU_OUT_OF_MEMORY ? MONO_GPU_OK : code;
}

int GpuTable::GrowCrowdedShards(Stream stream) {
  NewLines lines = {};
  int64_t allowance = 0;
  for (const InFlight& write : in_flight_) allowance += Allowance(write.n);
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t slots = shards_[s].num_slots();
    if (known_.live[s] + known_.erased[s] <= CrowdedSlots(slots)) continue;
    // One step at least, unless it is the erased slots that crowd it.
    const bool many_erased = known_.live[s] < CrowdedSlots(slots) * 3 / 4;
    const int64_t keys =
        many_erased ? known_.live[s] + 1 : std::max(known_.live[s], CrowdedSlots(slots)) + 1;
    lines[s] = ScheduledLines(s, keys + std::min(allowance, keys / 8));
  }
  return Rebuild(stream, lines);
}

// Gives the shards s with lines[s] > 0 this many lines, several in one launch, and tells the
// device. If memory runs out, some have theirs.
int GpuTable::Rebuild(Stream stream, const NewLines& lines) {
  uint64_t rebuilt = 0;
  int code = MONO_GPU_OK;
  for (int s = 0; s < kTableShards && code == MONO_GPU_OK;) {
    if (lines[s] == 0) {
      ++s;
      continue;
    }
    std::vector<int> shards;
    int64_t bytes = 0;
    for (; s < kTableShards && shards.size() < kMovesAtOnce && bytes < kMoveBytes; ++s) {
      if (lines[s] == 0) continue;
      shards.push_back(s);
      bytes += LineBytes(lines[s]);
    }
    code = MoveShards(stream, shards, lines);
    if (code != MONO_GPU_OK) break;
    for (const int shard : shards) rebuilt |= uint64_t{1} << shard;
  }
  const int published = rebuilt == 0 ? MONO_GPU_OK : PublishShards(stream, rebuilt);
  return code != MONO_GPU_OK ? code : published;
}

int GpuTable::MoveShards(Stream stream, const std::vector<int>& shards, const NewLines& lines) {
  std::vector<DeviceBuffer> fresh(shards.size());
  Moves moves = {};
  moves.count = static_cast<int>(shards.size());
  int64_t from = 0, to = 0;
  int code = MONO_GPU_OK;
  for (size_t i = 0; i < shards.size() && code == MONO_GPU_OK; ++i) {
    const Shard& old = shards_[shards[i]];
    const uint32_t count = lines[shards[i]];
    code = fresh[i].Allocate(stream, LineBytes(count), "the index of a table");
    moves.from[i] = old.slots.As<TableSlot>();
    moves.to[i] = {fresh[i].As<TableSlot>(), count, 0};
    moves.from_begins[i] = from;
    moves.to_begins[i] = to;
    from += old.num_slots();
    to += int64_t{count} * kSlotsPerLine;
  }
  moves.from_slots = from;
  moves.to_slots = to;
  if (code == MONO_GPU_OK) {
    code = ForWarps(stream, CeilDiv(to, kWordIds), kAllBlocks, ClearSlots{moves});
  }
  if (code == MONO_GPU_OK) {
    code = ForWarps(stream, CeilDiv(from, kWordIds), kAllBlocks,
                    MoveSlots{engine::TableHash(), moves, spill_.As<TableSlot>(),
                              View().spill_capacity, state_.As<TableState>()});
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    if (code == MONO_GPU_OK) {
      Shard& shard = shards_[shards[i]];
      fresh[i].Swap(&shard.slots);
      shard.lines = lines[shards[i]];
      known_.erased[shards[i]] = 0;
      ++rebuilds_;
    }
    fresh[i].Free(stream);
  }
  return code;
}

int GpuTable::PublishShards(Stream stream, uint64_t rebuilt) {
  SetShards set = {{}, shard_views_.As<ShardView>(), state_.As<TableState>(), rebuilt};
  for (int s = 0; s < kTableShards; ++s) {
    set.from.views[s] = {shards_[s].slots.As<TableSlot>(), shards_[s].lines, 0};
  }
  MONO_GPU_TRY(ForEach(stream, kTableShards, set));
  // A spilled key of a shard that was rebuilt is not found behind its full lines any more.
  return rebuilt == 0 ? MONO_GPU_OK : ForEach(stream, 1, TakeBackSpilled{View()});
}

// Makes the shards of spilled keys larger until all have room. The state was read just now.
int GpuTable::MoveSpilled(Stream stream) {
  while (known_.spilled > 0) {
    std::vector<TableSlot> spilled(known_.spilled);
    MONO_GPU_TRY(CopyToHost(stream, spill_.As<TableSlot>(), spilled.data(),
                            static_cast<int64_t>(spilled.size() * sizeof(TableSlot))));
    NewLines lines = {};
    for (const TableSlot& slot : spilled) {
      const int shard = static_cast<int>(engine::HashId(slot.key) >> kShardShift);
      const int64_t keys = std::max(known_.live[shard], CrowdedSlots(shards_[shard].num_slots()));
      lines[shard] = ScheduledLines(shard, keys + keys / 8 + 1);
    }
    MONO_GPU_TRY(Rebuild(stream, lines));
    MONO_GPU_TRY(CopyToHost(stream, state_.As<TableState>(), &known_, sizeof(known_)));
  }
  return MONO_GPU_OK;
}

int GpuTable::Reserve(Stream stream, int64_t rows) {
  if (rows < 0 || rows > static_cast<int64_t>(kErasedRow) - 1) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "capacity is " + std::to_string(rows) + ", want 0 to " +
                    std::to_string(static_cast<int64_t>(kErasedRow) - 1));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return AsWrite(stream, [&]() -> int {
    MONO_GPU_TRY(ReadState(stream));
    MONO_GPU_TRY(MoveSpilled(stream));
    MONO_GPU_TRY(arena_.Grow((rows + 1) * stride_));
    // Shards fill unevenly: three standard deviations above the mean.
    const double mean = static_cast<double>(rows) / kTableShards;
    const int64_t keys = static_cast<int64_t>(std::ceil(mean + 3.0 * std::sqrt(mean)));
    // As many lines as `rows` rows need, not the next size of the schedule: the caller knows how
    // many will come.
    const int64_t enough = 2 * (static_cast<int64_t>(keys / (kCrowded * kSlotsPerLine)) / 2 + 1);
    NewLines lines = {};
    for (int s = 0; s < kTableShards; ++s) {
      if (int64_t{shards_[s].lines} < enough) lines[s] = static_cast<uint32_t>(enough);
    }
    MONO_GPU_TRY(Rebuild(stream, lines));
    return MONO_GPU_OK;
  });
}

}  // namespace gpu
}  // namespace monolith
