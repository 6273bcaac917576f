// The locks of some of a table's shards, taken in ascending order.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_SHARD_LOCKS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_SHARD_LOCKS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/hash_table/index/flat_index.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {

static_assert(kNumShards == 64, "sets of shards are words, bit s stands for shard s");

// All shards from `begin` to `end`.
inline uint64_t ShardRange(int begin, int end) {
  return (~uint64_t{0} >> (kNumShards - (end - begin))) << begin;
}

// The shards of n ids, key(i) each.
template <typename Key>
uint64_t ShardsOfIds(int64_t n, Key key) {
  const IdHash hash = TableHash();
  uint64_t shards = 0;
  for (int64_t i = 0; i < n; ++i) shards |= uint64_t{1} << ShardOf(hash(key(i)));
  return shards;
}

using TableShards = std::vector<std::unique_ptr<TableInternals::Shard>>;

class SharedShardLocks {
 public:
  SharedShardLocks(const TableShards& shards, uint64_t wanted) : shards_(shards), held_(wanted) {
    for (; wanted != 0; wanted &= wanted - 1) {
      shards_[__builtin_ctzll(wanted)]->mutex.lock_shared();
    }
  }
  ~SharedShardLocks() {
    for (; held_ != 0; held_ &= held_ - 1) shards_[__builtin_ctzll(held_)]->mutex.unlock_shared();
  }
  SharedShardLocks(const SharedShardLocks&) = delete;
  SharedShardLocks& operator=(const SharedShardLocks&) = delete;

 private:
  const TableShards& shards_;
  uint64_t held_;
};

class ShardLocks {
 public:
  ShardLocks(const TableShards& shards, uint64_t wanted) : shards_(shards), held_(wanted) {
    for (; wanted != 0; wanted &= wanted - 1) shards_[__builtin_ctzll(wanted)]->mutex.lock();
  }
  ~ShardLocks() {
    for (; held_ != 0; held_ &= held_ - 1) {
      TableInternals::Shard& shard = *shards_[__builtin_ctzll(held_)];
      shard.size.store(shard.index.live(), std::memory_order_relaxed);
      shard.mutex.unlock();
    }
  }
  ShardLocks(const ShardLocks&) = delete;
  ShardLocks& operator=(const ShardLocks&) = delete;

 private:
  const TableShards& shards_;
  uint64_t held_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_SHARD_LOCKS_H_
