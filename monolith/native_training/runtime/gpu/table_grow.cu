// How GPU tables grow and shrink: room for writes, rebuilt shards, erasing and eviction.
#include <algorithm>
#include <cmath>
#include <string>

#include "monolith/native_training/runtime/gpu/sort.h"
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

// Puts the keys of old lines into new ones.
struct MoveSlots {
  engine::IdHash hash;
  const TableSlot* from;
  ShardView to;
  TableSlot* spill;
  uint64_t spill_capacity;
  TableState* state;

  MONO_DEVICE void operator()(int64_t i) const {
    const TableSlot slot = LoadSlot(from + i);
    bool took_erased;
    if (!IsLive(slot.row) ||
        InsertSlot(to, hash(slot.key), slot.key, slot.row, slot.ts, &took_erased)) {
      return;
    }
    SpillSlot(spill, spill_capacity, state, slot);
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

struct EraseIds {
  IndexView index;
  const int64_t* ids;
  uint32_t* free_stack;

  MONO_DEVICE void operator()(int64_t i) const {
    TableSlot* const slot = FindSlot(index, ids[i]);
    if (slot != nullptr) EraseSlot(index, slot, free_stack);
  }
};

struct Expiry {
  const int64_t* limits;  // of every slot of ids, or null
  int64_t limit;
  int64_t newest;

  MONO_DEVICE bool operator()(const TableSlot& slot) const {
    const int64_t allowed = limits == nullptr ? limit : limits[engine::SlotOfV2(slot.key)];
    return newest - static_cast<int64_t>(slot.ts) >= allowed;
  }
};

struct CountExpired {
  const TableSlot* slots;
  Expiry expired;
  uint64_t* count;

  MONO_DEVICE void operator()(int64_t i) const {
    const TableSlot slot = LoadSlot(slots + i);
    if (IsLive(slot.row) && expired(slot)) AtomicAdd(count, uint64_t{1});
  }
};

struct EraseExpired {
  IndexView index;
  TableSlot* slots;
  Expiry expired;
  uint32_t* free_stack;

  MONO_DEVICE void operator()(int64_t i) const {
    const TableSlot slot = LoadSlot(slots + i);
    if (IsLive(slot.row) && expired(slot)) EraseSlot(index, slots + i, free_stack);
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
  const int64_t bytes = CeilDiv(n, kWordIds) * 4;
  if (absent_.bytes() >= bytes) return MONO_GPU_OK;
  absent_.Free(stream);
  prefix_.Free(stream);
  MONO_GPU_TRY(absent_.Allocate(stream, bytes, "the absent ids of a batch"));
  return prefix_.Allocate(stream, bytes, "the absent ids of a batch");
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
  uint64_t rebuilt = 0;
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t keys = known_.live[s] + static_cast<int64_t>(absent[s]);
    if (keys + known_.erased[s] <= FullSlots(shards_[s].num_slots())) continue;
    MONO_GPU_TRY(Rebuild(stream, s, ScheduledLines(s, keys)));
    rebuilt |= uint64_t{1} << s;
  }
  return rebuilt == 0 ? MONO_GPU_OK : PublishShards(stream, rebuilt);
}

// Makes room for n new ids if there is memory for that; not having it is no error.
int GpuTable::MakeRoomAhead(Stream stream, int64_t n) {
  const int64_t rows = static_cast<int64_t>(known_.next_row) + n -
                       std::min(n, static_cast<int64_t>(known_.free_rows));
  if (rows <= static_cast<int64_t>(kErasedRow)) {
    const int code = arena_.Grow(rows * stride_);
    if (code != MONO_GPU_OK && code != MONO_GPU_OUT_OF_MEMORY) return code;
  }
  uint32_t lines[kTableShards];
  uint64_t rebuilt = 0;
  int64_t more = 0;
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t keys = known_.live[s] + Allowance(n);
    lines[s] = shards_[s].lines;
    if (keys + known_.erased[s] <= FullSlots(shards_[s].num_slots())) continue;
    lines[s] = ScheduledLines(s, keys);
    more += (int64_t{lines[s]} - shards_[s].lines) * kSlotsPerLine *
            static_cast<int64_t>(sizeof(TableSlot));
    rebuilt |= uint64_t{1} << s;
  }
  if (rebuilt == 0 || more > kAheadBytes) return MONO_GPU_OK;
  uint64_t done = 0;
  for (int s = 0; s < kTableShards; ++s) {
    if ((rebuilt >> s & 1) == 0) continue;
    const int code = Rebuild(stream, s, lines[s]);
    if (code == MONO_GPU_OUT_OF_MEMORY) break;
    MONO_GPU_TRY(code);
    done |= uint64_t{1} << s;
  }
  return done == 0 ? MONO_GPU_OK : PublishShards(stream, done);
}

int GpuTable::GrowCrowdedShards(Stream stream) {
  uint64_t rebuilt = 0;
  int64_t allowance = 0;
  for (const InFlight& write : in_flight_) allowance += Allowance(write.n);
  for (int s = 0; s < kTableShards; ++s) {
    const int64_t slots = shards_[s].num_slots();
    if (known_.live[s] + known_.erased[s] <= CrowdedSlots(slots)) continue;
    // One step at least, unless it is the erased slots that crowd it.
    const bool many_erased = known_.live[s] < CrowdedSlots(slots) * 3 / 4;
    const int64_t keys =
        many_erased ? known_.live[s] + 1 : std::max(known_.live[s], CrowdedSlots(slots)) + 1;
    MONO_GPU_TRY(Rebuild(stream, s, ScheduledLines(s, keys + std::min(allowance, keys / 8))));
    rebuilt |= uint64_t{1} << s;
  }
  return rebuilt == 0 ? MONO_GPU_OK : PublishShards(stream, rebuilt);
}

int GpuTable::Rebuild(Stream stream, int shard, uint32_t lines) {
  Shard& s = shards_[shard];
  DeviceBuffer fresh;
  const int64_t bytes = int64_t{lines} * kSlotsPerLine * static_cast<int64_t>(sizeof(TableSlot));
  MONO_GPU_TRY(fresh.Allocate(stream, bytes, "the index of a table"));
  int code = FillBytes(stream, fresh.As<char>(), 0, bytes);
  if (code == MONO_GPU_OK) {
    code = ForEach(stream, s.num_slots(),
                   MoveSlots{engine::TableHash(),
                             s.slots.As<TableSlot>(),
                             {fresh.As<TableSlot>(), lines, 0},
                             spill_.As<TableSlot>(),
                             View().spill_capacity,
                             state_.As<TableState>()});
  }
  if (code == MONO_GPU_OK) {
    fresh.Swap(&s.slots);
    s.lines = lines;
    known_.erased[shard] = 0;
    ++rebuilds_;
  }
  fresh.Free(stream);
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
    uint64_t rebuilt = 0;
    for (const TableSlot& slot : spilled) {
      rebuilt |= uint64_t{1} << (engine::HashId(slot.key) >> kShardShift);
    }
    for (int s = 0; s < kTableShards; ++s) {
      if ((rebuilt >> s & 1) == 0) continue;
      const int64_t keys = std::max(known_.live[s], CrowdedSlots(shards_[s].num_slots()));
      MONO_GPU_TRY(Rebuild(stream, s, ScheduledLines(s, keys + keys / 8 + 1)));
    }
    MONO_GPU_TRY(PublishShards(stream, rebuilt));
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
    // What `rows` rows need, not the next size of the schedule: the caller knows how many will
    // come.
    const int64_t lines = 2 * (static_cast<int64_t>(keys / (kCrowded * kSlotsPerLine)) / 2 + 1);
    uint64_t rebuilt = 0;
    for (int s = 0; s < kTableShards; ++s) {
      if (int64_t{shards_[s].lines} >= lines) continue;
      MONO_GPU_TRY(Rebuild(stream, s, static_cast<uint32_t>(lines)));
      rebuilt |= uint64_t{1} << s;
    }
    if (rebuilt != 0) MONO_GPU_TRY(PublishShards(stream, rebuilt));
    return MONO_GPU_OK;
  });
}

// -- Erasing.

int GpuTable::EnsureFreeStack(Stream stream, int64_t rows) {
  const int64_t bytes = rows * 4;
  if (free_stack_.bytes() >= bytes) return MONO_GPU_OK;
  DeviceBuffer larger;
  MONO_GPU_TRY(larger.Allocate(stream, std::max(bytes, free_stack_.bytes() * 3 / 2),
                               "the free rows of a table"));
  int code = MONO_GPU_OK;
  if (free_stack_.bytes() > 0) {
    code = mono_gpu_copy(stream, free_stack_.As<char>(), larger.As<char>(),
                         static_cast<int64_t>(known_.free_rows) * 4);
  }
  if (code == MONO_GPU_OK) free_stack_.Swap(&larger);
  larger.Free(stream);
  return code;
}

// Lanes push in any order; the same calls shall give the same rows.
int GpuTable::SortFreed(Stream stream, int64_t before) {
  const int64_t n = static_cast<int64_t>(known_.free_rows) - before;
  if (n <= 1) return MONO_GPU_OK;
  int64_t scratch = 0;
  MONO_GPU_TRY(SortScratch<uint32_t>(n, 32, &scratch));
  DeviceBuffer buffer;
  const int64_t part = CeilDiv(n * 4, 256) * 256;
  MONO_GPU_TRY(buffer.Allocate(stream, 2 * part + scratch, "sorting free rows"));
  uint32_t* const rows = free_stack_.As<uint32_t>() + before;
  uint32_t* const sorted = buffer.As<uint32_t>();
  int code = SortPairs<uint32_t>(stream, buffer.As<char>() + 2 * part, scratch, rows, sorted, rows,
                                 reinterpret_cast<uint32_t*>(buffer.As<char>() + part), n, 32);
  if (code == MONO_GPU_OK) code = mono_gpu_copy(stream, sorted, rows, n * 4);
  buffer.Free(stream);
  return code;
}

int GpuTable::Erase(Stream stream, const int64_t* ids, int64_t n) {
  if (n < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(n));
  }
  if (n == 0) return MONO_GPU_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  return AsWrite(stream, [&]() -> int {
    MONO_GPU_TRY(ReadState(stream));
    const int64_t before = static_cast<int64_t>(known_.free_rows);
    MONO_GPU_TRY(EnsureFreeStack(stream, before + n));
    MONO_GPU_TRY(ForEach(stream, n, EraseIds{View(), ids, free_stack_.As<uint32_t>()}));
    MONO_GPU_TRY(ReadState(stream));
    MONO_GPU_TRY(SortFreed(stream, before));
    return MONO_GPU_OK;
  });
}

int GpuTable::Evict(Stream stream, const engine::ExpiryPolicy& policy, int64_t* erased) {
  *erased = 0;
  std::lock_guard<std::mutex> lock(mutex_);
  return AsWrite(stream, [&]() -> int {
    MONO_GPU_TRY(ReadState(stream));
    MONO_GPU_TRY(MoveSpilled(stream));
    const std::vector<int64_t>& limits = policy.slot_seconds();
    const int64_t limit_bytes = static_cast<int64_t>(limits.size() * sizeof(int64_t));
    DeviceBuffer buffer;
    MONO_GPU_TRY(buffer.Allocate(stream, 8 + limit_bytes, "expiry times"));
    uint64_t* const count = buffer.As<uint64_t>();
    Expiry expired = {limits.empty() ? nullptr : buffer.As<int64_t>() + 1, policy.default_seconds(),
                      max_update_ts_};
    MONO_GPU_TRY(FillBytes(stream, count, 0, 8));
    MONO_GPU_TRY(CopyToDevice(stream, limits.data(), buffer.As<int64_t>() + 1, limit_bytes));
    for (const Shard& shard : shards_) {
      MONO_GPU_TRY(ForEach(stream, shard.num_slots(),
                           CountExpired{shard.slots.As<TableSlot>(), expired, count}));
    }
    uint64_t found = 0;
    MONO_GPU_TRY(CopyToHost(stream, count, &found, 8));
    if (found > 0) {
      const int64_t before = static_cast<int64_t>(known_.free_rows);
      MONO_GPU_TRY(EnsureFreeStack(stream, before + static_cast<int64_t>(found)));
      for (const Shard& shard : shards_) {
        MONO_GPU_TRY(ForEach(stream, shard.num_slots(),
                             EraseExpired{View(), shard.slots.As<TableSlot>(), expired,
                                          free_stack_.As<uint32_t>()}));
      }
      MONO_GPU_TRY(ReadState(stream));
      MONO_GPU_TRY(SortFreed(stream, before));
      // Lines that are not needed any more go back.
      uint64_t rebuilt = 0;
      for (int s = 0; s < kTableShards; ++s) {
        const uint32_t lines = ScheduledLines(s, known_.live[s] + 1);
        if (2 * int64_t{lines} > int64_t{shards_[s].lines}) continue;
        MONO_GPU_TRY(Rebuild(stream, s, lines));
        rebuilt |= uint64_t{1} << s;
      }
      if (rebuilt != 0) MONO_GPU_TRY(PublishShards(stream, rebuilt));
    }
    buffer.Free(stream);
    expired_ += static_cast<int64_t>(found);
    *erased = static_cast<int64_t>(found);
    return MONO_GPU_OK;
  });
}

}  // namespace gpu
}  // namespace monolith
