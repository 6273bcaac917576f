// How rows leave a GPU table: by id, and by their time.
#include <algorithm>

#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"

namespace monolith {
namespace gpu {
namespace {

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
      NewLines lines = {};
      for (int s = 0; s < kTableShards; ++s) {
        const uint32_t enough = ScheduledLines(s, known_.live[s] + 1);
        if (2 * int64_t{enough} <= int64_t{shards_[s].lines}) lines[s] = enough;
      }
      MONO_GPU_TRY(Rebuild(stream, lines));
    }
    buffer.Free(stream);
    expired_ += static_cast<int64_t>(found);
    *erased = static_cast<int64_t>(found);
    return MONO_GPU_OK;
  });
}

}  // namespace gpu
}  // namespace monolith
