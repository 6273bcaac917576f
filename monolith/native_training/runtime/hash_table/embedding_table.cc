#include "monolith/native_training/runtime/hash_table/embedding_table.h"

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <utility>

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

constexpr int64_t kMaxReserve = int64_t{1} << 36;

}  // namespace

Status EmbeddingTable::Create(const TableConfig& config, std::unique_ptr<EmbeddingTable>* table) {
  RowLayout layout;
  Status status = CompileRowLayout(config, &layout);
  if (!status.ok()) return status;
  ExpiryPolicy expiry;
  status = ExpiryPolicy::Create(config.expiry, &expiry);
  if (!status.ok()) return status;
  std::unique_ptr<EmbeddingTable> result(
      new EmbeddingTable(config, std::move(layout), std::move(expiry), ChooseSeed(config.seed)));
  if (config.initial_capacity > 1) {
    status = result->Reserve(config.initial_capacity);
    if (!status.ok()) return status;
  }
  *table = std::move(result);
  return Status::Ok();
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

void EmbeddingTable::RaiseMaxUpdateTs(int64_t ts) {
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
  if (rows < 0 || rows > kMaxReserve) {
    return Status::InvalidArgument("capacity is " + std::to_string(rows) + ", want 0 to " +
                                   std::to_string(kMaxReserve));
  }
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
}

int64_t EmbeddingTable::Evict(const ExpiryPolicy& policy) {
  const WriteRoom room(&room_);
  const int64_t newest = MaxUpdateTs();
  int64_t erased = 0;
  for (const auto& shard : shards_) {
    std::unique_lock<FairSharedMutex> lock(shard->mutex);
    shard->index.ForEachLine([&](FlatIndex::Line* line) {
      for (FlatIndex::Slot& slot : line->slots) {
        if (!slot.live() || !policy.IsExpired(slot.key, slot.ts, newest)) continue;
        shard->rows.Free(slot.row);
        shard->index.Erase(&slot);
        ++erased;
      }
    });
    shard->index.Compact();
    shard->size.store(shard->index.live(), std::memory_order_relaxed);
  }
  counters_.expired.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

std::string EmbeddingTable::DebugString() const {
  int64_t size = 0, slots = 0, index_bytes = 0, reused = 0;
  for (const auto& shard : shards_) {
    std::shared_lock<FairSharedMutex> lock(shard->mutex);
    size += shard->index.live();
    slots += shard->index.num_slots();
    index_bytes += shard->index.Bytes();
    reused += shard->rows.reused();
  }
  const double load = slots == 0 ? 0.0 : static_cast<double>(size) / static_cast<double>(slots);
  const auto number = [](const char* key, int64_t value) {
    return std::string(", \"") + key + "\": " + std::to_string(value);
  };
  return std::string("{\"accessor\": \"") +
         (layout_.serving() ? "ServingEntryAccessor" : "EntryAccessor") + "\"" +
         number("size", size) + number("memory", index_bytes + size * layout_.stride) +
         number("memory_if_not_compressed", index_bytes + size * 4 * layout_.dim) +
         ", \"load_factor\": " + std::to_string(load) + number("rows_reused", reused) +
         number("expired", counters_.expired.load()) +
         number("filtered", counters_.filtered.load()) +
         number("nonfinite_gradients", counters_.nonfinite.load()) +
         number("restore_skipped", counters_.restore_skipped.load()) +
         number("restore_state_reset", counters_.restore_state_reset.load()) + "}";
}

}  // namespace engine
}  // namespace monolith
