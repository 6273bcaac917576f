#include "monolith/native_training/runtime/hash_table/embedding_table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <new>
#include <random>
#include <shared_mutex>
#include <utility>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/base/log.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {
namespace {

uint64_t ChooseSeed(uint64_t configured) {
  if (configured != 0) return configured;
  const char* value = std::getenv("MONOLITH_TABLE_SEED");
  if (value != nullptr && value[0] != '\0') return std::strtoull(value, nullptr, 10);
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

// False: there is no memory for another id. An eviction goes on without.
bool Remember(int64_t id, std::vector<int64_t>* ids) {
  try {
    ids->push_back(id);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Row number 0 means "empty" in the index, the last one "erased".
constexpr int64_t kMaxRows = (int64_t{1} << 32) - 2;
// The index at its fullest.
constexpr int64_t kMinIndexBytesPerRow = 19;

// Whether `rows` rows, called `what`, of at least `bytes_per_row` can ever be had.
Status CheckCapacity(const char* what, int64_t rows, int64_t bytes_per_row) {
  if (rows < 0 || rows > kMaxRows) {
    return Status::InvalidArgument(std::string(what) + " is " + std::to_string(rows) +
                                   ", want 0 to " + std::to_string(kMaxRows) + " rows");
  }
  const int64_t memory = MachineMemoryBytes();
  if (rows > memory / bytes_per_row) {
    return Status::InvalidArgument(std::string(what) + " is " + std::to_string(rows) +
                                   " rows of at least " + std::to_string(bytes_per_row) +
                                   " bytes, which do not fit into the " + std::to_string(memory) +
                                   " bytes of memory that this machine has");
  }
  return Status::Ok();
}

}  // namespace

Status EmbeddingTable::Create(const TableConfig& config, std::unique_ptr<EmbeddingTable>* table) {
  RowLayout layout;
  Status status = CompileRowLayout(config, &layout);
  if (!status.ok()) return status;
  ExpiryPolicy expiry;
  status = ExpiryPolicy::Create(config.expiry, &expiry);
  if (!status.ok()) return status;
  status = CheckCapacity("initial_capacity", config.initial_capacity,
                         layout.stride + kMinIndexBytesPerRow);
  if (!status.ok()) return status;
  try {
    std::unique_ptr<EmbeddingTable> result(
        new EmbeddingTable(config, std::move(layout), std::move(expiry), ChooseSeed(config.seed)));
    if (config.initial_capacity > 1) {
      status = result->Reserve(config.initial_capacity);
      if (!status.ok()) return status;
    }
    *table = std::move(result);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return Status::ResourceExhausted("no memory for another table");
  }
}

EmbeddingTable::EmbeddingTable(const TableConfig& config, RowLayout layout, ExpiryPolicy expiry,
                               uint64_t seed)
    : config_(config),
      layout_(std::move(layout)),
      expiry_(std::move(expiry)),
      codec_(layout_),
      seed_(seed) {
  MakeShards();
}

EmbeddingTable::~EmbeddingTable() = default;

void EmbeddingTable::MakeShards() {
  index_pool_ = std::make_unique<RunPool>();
  arena_ = std::make_unique<RowArena>(layout_.stride, kNumShards);
  directory_ = std::make_unique<FlatIndex::Directory>();
  for (int s = 0; s < kNumShards; ++s) {
    shards_.push_back(
        std::make_unique<Shard>(s, index_pool_.get(), arena_.get(), directory_.get()));
  }
}

std::unique_ptr<EmbeddingTable> EmbeddingTable::NewEmptyTwin() const {
  return std::unique_ptr<EmbeddingTable>(new EmbeddingTable(config_, layout_, expiry_, seed_));
}

int64_t EmbeddingTable::Size() const {
  int64_t size = 0;
  for (const auto& shard : shards_) size += shard->size.load(std::memory_order_relaxed);
  return size;
}

void EmbeddingTable::RaiseMaxUpdateTs(int64_t requested) {
  const int64_t ts = ClampTimestamp(requested);
  if (ts != requested && !warned_of_time_.exchange(true, std::memory_order_relaxed)) {
    Log(LogLevel::kWarning,
        "a table of dim " + std::to_string(layout_.dim) + " was given the request time " +
            std::to_string(requested) + ", which is not within 32 bits of seconds" +
            (requested > 0 ? ": it is probably in milliseconds" : "") + ". It counts as " +
            std::to_string(ts) + "; times like it make other rows expire early, or never expire");
  }
  int64_t current = max_update_ts_.load(std::memory_order_relaxed);
  while (current < ts &&
         !max_update_ts_.compare_exchange_weak(current, ts, std::memory_order_relaxed)) {
  }
}

bool EmbeddingTable::DeepenIndex(int min_depth, bool wait) {
  size_t locked = 0;
  for (; locked < shards_.size(); ++locked) {
    if (wait) {
      shards_[locked]->mutex.lock();
    } else if (!shards_[locked]->mutex.try_lock()) {
      break;
    }
  }
  bool deep = locked == shards_.size();
  // Another thread may have been first.
  if (deep && directory_->wants_depth()) deep = directory_->Deepen();
  while (deep && directory_->depth() < min_depth) deep = directory_->Deepen();
  while (locked > 0) shards_[--locked]->mutex.unlock();
  return deep;
}

Status EmbeddingTable::Reserve(int64_t rows) {
  Status status = CheckCapacity("capacity", rows, kMinIndexBytesPerRow);
  if (!status.ok()) return status;
  // Shards fill unevenly: three standard deviations above the mean.
  const double mean = static_cast<double>(rows) / kNumShards;
  const int64_t per_shard = static_cast<int64_t>(std::ceil(mean + 3.0 * std::sqrt(mean)));
  const Status no_memory =
      Status::ResourceExhausted("no memory for an index of " + std::to_string(rows) + " rows");
  const WriteRoom room(&room_);
  if (!DeepenIndex(FlatIndex::DepthFor(per_shard), true)) return no_memory;
  for (const auto& shard : shards_) {
    std::unique_lock<FairSharedMutex> lock(shard->mutex);
    if (!shard->index.Reserve(per_shard)) return no_memory;
  }
  return Status::Ok();
}

void EmbeddingTable::Clear() {
  const std::unique_ptr<EmbeddingTable> empty = NewEmptyTwin();
  SwapContent(empty.get());
}

void EmbeddingTable::SwapContent(EmbeddingTable* other) {
  const WriteRoom room(&room_);
  for (const auto& shard : shards_) shard->mutex.lock();
  for (int s = 0; s < kNumShards; ++s) {
    Shard* mine = shards_[s].get();
    Shard* theirs = other->shards_[s].get();
    mine->index.Swap(&theirs->index);
    mine->rows.Swap(&theirs->rows);
    mine->size.store(mine->index.live(), std::memory_order_relaxed);
    theirs->size.store(theirs->index.live(), std::memory_order_relaxed);
  }
  directory_->Swap(other->directory_.get());
  std::swap(index_pool_, other->index_pool_);
  std::swap(arena_, other->arena_);
  RaiseMaxUpdateTs(other->MaxUpdateTs());
  for (auto shard = shards_.rbegin(); shard != shards_.rend(); ++shard) (*shard)->mutex.unlock();
  if (replaced_ != nullptr) replaced_();
}

void EmbeddingTable::ReportErased(const std::vector<int64_t>& ids) {
  if (erased_ == nullptr || ids.empty()) return;
  try {
    erased_(ids.data(), static_cast<int64_t>(ids.size()));
  } catch (const std::bad_alloc&) {
    if (replaced_ != nullptr) replaced_();
  }
}

int64_t EmbeddingTable::Evict(const ExpiryPolicy& policy) {
  const WriteRoom room(&room_);
  const int64_t newest = MaxUpdateTs();
  int64_t erased = 0;
  std::vector<int64_t> ids;  // of one shard, if someone wants to know them
  bool forgot = false;
  for (const auto& shard : shards_) {
    ids.clear();
    {
      std::unique_lock<FairSharedMutex> lock(shard->mutex);
      shard->index.ForEachLine([&](FlatIndex::Line* line) {
        for (FlatIndex::Slot& slot : line->slots) {
          if (!slot.live() || !policy.IsExpired(slot.key, slot.ts, newest)) continue;
          if (erased_ != nullptr) forgot |= !Remember(slot.key, &ids);
          shard->rows.Free(slot.row);
          shard->index.Erase(&slot);
          ++erased;
        }
      });
      shard->index.Compact();
      shard->size.store(shard->index.live(), std::memory_order_relaxed);
    }
    ReportErased(ids);
  }
  if (forgot && replaced_ != nullptr) replaced_();
  counters_.expired.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

TableStats EmbeddingTable::Stats() const {
  TableStats stats;
  int64_t slots = 0, untouched = 0;
  for (const auto& shard : shards_) {
    std::shared_lock<FairSharedMutex> lock(shard->mutex);
    stats.size += shard->index.live();
    stats.index_memory += shard->index.Bytes();
    stats.free_rows += shard->rows.FreeRows();
    stats.rows_reused += shard->rows.reused();
    slots += shard->index.num_slots();
    untouched += shard->rows.UntouchedBytes();
  }
  {
    // Any shard's lock keeps SwapContent, which takes all of them, from exchanging these.
    std::shared_lock<FairSharedMutex> lock(shards_[0]->mutex);
    // Small indexes are not in the pool, large ones only as far as they were written to.
    stats.index_memory = std::max<int64_t>(0, stats.index_memory - index_pool_->bytes_in_use()) +
                         index_pool_->bytes_held();
    stats.free_rows += arena_->FreeRows();
    stats.row_memory = std::max<int64_t>(0, arena_->HeldBytes() - untouched);
    stats.index_memory += directory_->Bytes();
    stats.memory = stats.row_memory + stats.index_memory + arena_->MetadataBytes();
  }
  stats.memory_if_not_compressed = stats.index_memory + stats.size * 4 * layout_.dim;
  if (slots > 0) stats.load_factor = static_cast<double>(stats.size) / static_cast<double>(slots);
  stats.expired = counters_.expired.load(std::memory_order_relaxed);
  stats.filtered = counters_.filtered.load(std::memory_order_relaxed);
  stats.nonfinite_gradients = counters_.nonfinite.load(std::memory_order_relaxed);
  stats.restore_skipped = counters_.restore_skipped.load(std::memory_order_relaxed);
  stats.restore_state_reset = counters_.restore_state_reset.load(std::memory_order_relaxed);
  return stats;
}

std::string EmbeddingTable::DebugString() const {
  const TableStats stats = Stats();
  const auto number = [](const char* key, int64_t value) {
    return std::string(", \"") + key + "\": " + std::to_string(value);
  };
  return std::string("{\"accessor\": \"") +
         (layout_.serving() ? "ServingEntryAccessor" : "EntryAccessor") + "\"" +
         number("size", stats.size) + number("memory", stats.memory) +
         number("memory_if_not_compressed", stats.memory_if_not_compressed) +
         ", \"load_factor\": " + std::to_string(stats.load_factor) +
         number("rows_reused", stats.rows_reused) + number("expired", stats.expired) +
         number("filtered", stats.filtered) +
         number("nonfinite_gradients", stats.nonfinite_gradients) +
         number("restore_skipped", stats.restore_skipped) +
         number("restore_state_reset", stats.restore_state_reset) + "}";
}

}  // namespace engine
}  // namespace monolith
