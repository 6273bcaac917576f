// One id, one home: the fast path of IdSharder equals the definition for every kind of id.
#include "monolith/native_training/runtime/distribution/id_sharding.h"

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace monolith {
namespace distribution {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::vector<int64_t> ExtremeIds() {
  std::vector<int64_t> ids;
  for (int bit = 0; bit < 63; ++bit) {
    for (int64_t delta = -2; delta <= 2; ++delta) {
      ids.push_back((int64_t{1} << bit) + delta);
      ids.push_back(-(int64_t{1} << bit) + delta);
    }
  }
  for (int64_t delta = 0; delta < 5; ++delta) {
    ids.push_back(kMin + delta);
    ids.push_back(kMax - delta);
  }
  return ids;
}

std::vector<int64_t> ShardCounts() {
  std::vector<int64_t> counts;
  for (int64_t n = 1; n <= 300; ++n) counts.push_back(n);
  for (int bit = 8; bit < 63; ++bit) {
    for (int64_t delta = -1; delta <= 1; ++delta) counts.push_back((int64_t{1} << bit) + delta);
  }
  counts.push_back(kMax);
  return counts;
}

// Computes the floor modulo with 128-bit integers.
int64_t FloorMod(int64_t id, int64_t n) {
  const __int128 wide = id;
  return static_cast<int64_t>(((wide % n) + n) % n);
}

TEST(IdShardingTest, WorkedValues) {
  EXPECT_EQ(ShardOfId(7, 3), 1);
  EXPECT_EQ(ShardOfId(-1, 3), 2);
  EXPECT_EQ(ShardOfId(-1, 5), 4);
  EXPECT_EQ(ShardOfId(-3, 3), 0);
  EXPECT_EQ(ShardOfId(kMin, 1), 0);
}

TEST(IdShardingTest, SharderEqualsTheDefinitionAtTheExtremes) {
  const std::vector<int64_t> ids = ExtremeIds();
  for (const int64_t n : ShardCounts()) {
    const IdSharder shard_of(n);
    EXPECT_EQ(shard_of.num_shards(), n);
    for (const int64_t id : ids) {
      ASSERT_EQ(ShardOfId(id, n), FloorMod(id, n)) << id << " of " << n;
      ASSERT_EQ(shard_of(id), FloorMod(id, n)) << id << " of " << n;
    }
  }
}

TEST(IdShardingTest, SharderEqualsTheDefinitionForRandomIds) {
  std::mt19937_64 random(1);
  const std::vector<int64_t> counts = ShardCounts();
  for (int i = 0; i < 200000; ++i) {
    const int64_t id = static_cast<int64_t>(random());
    const int64_t n = counts[random() % counts.size()];
    ASSERT_EQ(IdSharder(n)(id), FloorMod(id, n)) << id << " of " << n;
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
