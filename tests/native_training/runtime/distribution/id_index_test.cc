#include "monolith/native_training/runtime/distribution/id_index.h"

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include "gtest/gtest.h"

namespace monolith {
namespace distribution {
namespace {

TEST(IdIndexTest, KeepsTheFirstValueOfAnId) {
  IdIndex index(0);
  EXPECT_EQ(index.FindOrInsert(5, index.Hash(5), 10), 10);
  EXPECT_EQ(index.FindOrInsert(5, index.Hash(5), 11), 10);
  EXPECT_EQ(index.Find(5, index.Hash(5)), 10);
  EXPECT_EQ(index.Find(6, index.Hash(6)), IdIndex::kMissing);
  EXPECT_EQ(index.size(), 1);
}

TEST(IdIndexTest, ZeroAndExtremeIdsAreIdsLikeOthers) {
  IdIndex index(0);
  const std::vector<int64_t> ids = {0, -1, std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<int64_t>::max()};
  for (const int64_t id : ids) EXPECT_EQ(index.Find(id, index.Hash(id)), IdIndex::kMissing);
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(index.FindOrInsert(ids[i], index.Hash(ids[i]), i), static_cast<int64_t>(i));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(index.Find(ids[i], index.Hash(ids[i])), static_cast<int64_t>(i));
  }
}

TEST(IdIndexTest, EqualsAnOrdinaryMapWhileItGrows) {
  // Ids that differ only in their low bits, only in their high bits, or everywhere.
  for (const int kind : {0, 1, 2}) {
    std::mt19937_64 random(kind);
    IdIndex index(0);
    std::unordered_map<int64_t, int64_t> map;
    for (int64_t i = 0; i < 50000; ++i) {
      int64_t id = static_cast<int64_t>(random() % 20000);
      if (kind == 1) id = static_cast<int64_t>(static_cast<uint64_t>(id) << 48);
      if (kind == 2) id = static_cast<int64_t>(static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull);
      const int64_t want = map.emplace(id, i).first->second;
      ASSERT_EQ(index.FindOrInsert(id, index.Hash(id), i), want);
    }
    EXPECT_EQ(index.size(), static_cast<int64_t>(map.size()));
    for (const auto& [id, value] : map) ASSERT_EQ(index.Find(id, index.Hash(id)), value);
  }
}

TEST(IdIndexTest, ClearForgetsWhateverTheSize) {
  IdIndex index(0);
  for (const int64_t n : {10, 5000, 20, 5000}) {
    index.Clear(n);
    EXPECT_EQ(index.size(), 0);
    for (int64_t id = 0; id < n; ++id) {
      ASSERT_EQ(index.Find(id, index.Hash(id)), IdIndex::kMissing);
      ASSERT_EQ(index.FindOrInsert(id, index.Hash(id), n - id), n - id);
    }
    EXPECT_EQ(index.size(), n);
  }
}

// Ids whose product with a well-known constant begins with the same bits: against a fixed
// multiplicative hash each of them would be compared with all before it.
TEST(IdIndexTest, ChosenIdsDoNotCollide) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
  uint64_t inverse = kFactor;  // three bits are right, and every round doubles them
  for (int i = 0; i < 6; ++i) inverse *= 2 - kFactor * inverse;
  ASSERT_EQ(inverse * kFactor, 1u);
  const IdIndex index(0);
  std::set<uint64_t> starts;
  for (uint64_t k = 0; k < 4096; ++k) {
    uint64_t x = k * inverse;
    x ^= x >> 32;
    starts.insert(index.Hash(static_cast<int64_t>(x * inverse)) >> 52);
  }
  EXPECT_GT(starts.size(), 2000u);
}

TEST(NumberIdsTest, NumbersInOrderOfFirstAppearance) {
  const std::vector<int64_t> ids = {7, 3, 7, -1, 3, 7};
  std::vector<int64_t> numbers, fresh;
  const int64_t distinct = NumberIds(
      ids.size(), [&](int64_t i) { return ids[i]; },
      [&](int64_t, int64_t id, int64_t number, bool is_new) {
        numbers.push_back(number);
        if (is_new) fresh.push_back(id);
      });
  EXPECT_EQ(distinct, 3);
  EXPECT_EQ(numbers, (std::vector<int64_t>{0, 1, 0, 2, 1, 0}));
  EXPECT_EQ(fresh, (std::vector<int64_t>{7, 3, -1}));
}

TEST(NumberIdsTest, NothingHasNoNumbers) {
  EXPECT_EQ(
      NumberIds(
          0, [](int64_t) { return int64_t{0}; }, [](int64_t, int64_t, int64_t, bool) { FAIL(); }),
      0);
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
