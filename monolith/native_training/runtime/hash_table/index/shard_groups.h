// Ids of a tile by groups of shards, so that threads that write a batch never meet at a row.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_SHARD_GROUPS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_SHARD_GROUPS_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/hash_table/index/flat_index.h"

namespace monolith {
namespace engine {

// Where each group, or each shard, begins, and the end of the last.
using ShardOffsets = uint32_t[kNumShards + 1];

// The first shard of one of 2^group_bits groups of neighbouring shards.
inline int FirstShard(int group, int group_bits) { return group << (kShardBits - group_bits); }

// Sorts the positions of n <= 2^32 ids into 2^group_bits groups, ascending inside a group:
// positions[offsets[g] .. offsets[g + 1]) belong to group g. `groups` is scratch for n bytes.
inline void GroupPositions(const int64_t* ids, int64_t n, int group_bits, uint8_t* groups,
                           uint32_t* positions, ShardOffsets& offsets) {
  const int num_groups = 1 << group_bits;
  const int shift = kShardBits - group_bits;
  const IdHash hash = TableHash();
  if (num_groups == 2) {
    // One pass, from both ends, without counting first: this is what two threads wait for.
    int64_t low = 0, high = n - 1;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t group = ShardOf(hash(ids[i])) >> shift;
      positions[low] = positions[high] = static_cast<uint32_t>(i);
      low += 1 - group;
      high -= group;
    }
    std::reverse(positions + low, positions + n);
    offsets[0] = 0;
    offsets[1] = static_cast<uint32_t>(low);
    offsets[2] = static_cast<uint32_t>(n);
    return;
  }
  uint32_t next[kNumShards] = {};
  for (int64_t i = 0; i < n; ++i) {
    const int group = ShardOf(hash(ids[i])) >> shift;
    groups[i] = static_cast<uint8_t>(group);
    ++next[group];
  }
  uint32_t sum = 0;
  for (int g = 0; g < num_groups; ++g) {
    offsets[g] = sum;
    sum += next[g];
    next[g] = offsets[g];
  }
  offsets[num_groups] = sum;
  for (int64_t i = 0; i < n; ++i) positions[next[groups[i]]++] = static_cast<uint32_t>(i);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_SHARD_GROUPS_H_
