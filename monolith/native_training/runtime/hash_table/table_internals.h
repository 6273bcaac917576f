// Opens the inside of a table to the batch code (table_lookup.cc, table_update.cc, table_save.cc).
// Not for callers.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_INTERNALS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_INTERNALS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"

namespace monolith {
namespace engine {

struct TableInternals {
  using Shard = EmbeddingTable::Shard;
  using Counters = EmbeddingTable::Counters;

  static const std::vector<std::unique_ptr<Shard>>& Shards(const EmbeddingTable& table) {
    return table.shards_;
  }
  // Its view is to be read in the read room, or under the lock of some shard.
  static const FlatIndex::Directory& Directory(const EmbeddingTable& table) {
    return *table.directory_;
  }
  static void DeepenIndexIfWanted(EmbeddingTable* table, bool wait) {
    if (table->directory_->wants_depth()) table->DeepenIndex(0, wait);
  }
  // The rows of all shards.
  static const RowArena& Arena(const EmbeddingTable& table) { return *table.arena_; }
  static int64_t LastGlobalStep(const EmbeddingTable& table) {
    return table.last_global_step_.load(std::memory_order_relaxed);
  }
  static void SetLastGlobalStep(EmbeddingTable* table, int64_t step) {
    table->last_global_step_.store(step, std::memory_order_relaxed);
  }
  static RoomLock* Room(const EmbeddingTable& table) { return &table.room_; }
  static void RaiseMaxUpdateTs(EmbeddingTable* table, int64_t ts) { table->RaiseMaxUpdateTs(ts); }
  static uint64_t Seed(const EmbeddingTable& table) { return table.seed_; }
  static Counters* CountersOf(EmbeddingTable* table) { return &table->counters_; }
  static const EmbeddingTable::TouchedCallback& Touched(const EmbeddingTable& table) {
    return table.touched_;
  }
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_INTERNALS_H_
