#include "monolith/native_training/runtime/hash_table/index/shard_groups.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace monolith {
namespace engine {
namespace {

struct GroupedTile {
  std::vector<uint8_t> groups;
  std::vector<uint32_t> positions;
  ShardOffsets offsets;

  void Group(const int64_t* ids, int64_t n, int group_bits) {
    groups.resize(n);
    positions.resize(n);
    GroupPositions(ids, n, group_bits, groups.data(), positions.data(), offsets);
  }
};

TEST(ShardGroupsTest, FirstShardsDivideAllShards) {
  for (int bits = 0; bits <= kShardBits; ++bits) {
    EXPECT_EQ(FirstShard(0, bits), 0);
    EXPECT_EQ(FirstShard(1 << bits, bits), kNumShards);
  }
  EXPECT_EQ(FirstShard(1, 1), 32);
  EXPECT_EQ(FirstShard(5, 3), 40);
}

TEST(ShardGroupsTest, EveryPositionIsInTheGroupOfItsShardInOrder) {
  std::mt19937_64 random(1);
  GroupedTile tile;
  for (const int64_t n : {4097, 0, 1, 2, 3, 500}) {
    std::vector<int64_t> ids(n);
    for (int64_t& id : ids) id = static_cast<int64_t>(random());
    if (n > 2) {
      ids[0] = std::numeric_limits<int64_t>::min();
      ids[1] = ids[2];
    }
    for (int bits = 0; bits <= kShardBits; ++bits) {
      tile.Group(ids.data(), n, bits);
      ASSERT_EQ(tile.offsets[0], 0u);
      ASSERT_EQ(tile.offsets[1 << bits], n);
      std::vector<bool> seen(n, false);
      for (int g = 0; g < 1 << bits; ++g) {
        ASSERT_LE(tile.offsets[g], tile.offsets[g + 1]);
        for (uint32_t i = tile.offsets[g]; i < tile.offsets[g + 1]; ++i) {
          const uint32_t position = tile.positions[i];
          ASSERT_LT(position, n);
          EXPECT_FALSE(seen[position]);
          seen[position] = true;
          EXPECT_TRUE(i == tile.offsets[g] || position > tile.positions[i - 1]);
          const int shard = ShardOf(HashId(ids[position]));
          EXPECT_GE(shard, FirstShard(g, bits));
          EXPECT_LT(shard, FirstShard(g + 1, bits));
        }
      }
    }
  }
}

TEST(ShardGroupsTest, AllIdsInOneGroup) {
  const std::vector<int64_t> ids(100, 7);
  GroupedTile tile;
  tile.Group(ids.data(), 100, 1);
  const int group = ShardOf(HashId(7)) / (kNumShards / 2);
  EXPECT_EQ(tile.offsets[group + 1] - tile.offsets[group], 100u);
  for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(tile.positions[i], i);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
