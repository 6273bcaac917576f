#include "monolith/native_training/runtime/distribution/unique_offsets.h"

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace distribution {
namespace {

struct Result {
  std::vector<int64_t> keys, key_splits, offsets, offset_splits;
};

Result FindUnique(const engine::ParallelRunner& parallel, const std::vector<int64_t>& keys,
                  const std::vector<int64_t>& splits, const std::vector<int64_t>& dims) {
  const UniqueOffsets unique(parallel, keys.data(), splits.data(), dims.size());
  Result result;
  result.keys.resize(unique.num_unique());
  result.key_splits.resize(splits.size());
  result.offsets.resize(keys.size());
  result.offset_splits.resize(unique.num_unique() + 1);
  unique.Fill(parallel, dims, result.keys.data(), result.key_splits.data(), result.offsets.data(),
              result.offset_splits.data());
  return result;
}

TEST(UniqueOffsetsTest, WorkedExample) {
  const Result result =
      FindUnique(engine::InlineRunner(), {0, 1, 2, 1, 0, 0, 1, 0}, {0, 0, 5, 8, 8}, {1, 2, 3, 4});
  EXPECT_EQ(result.keys, (std::vector<int64_t>{0, 1, 2, 0, 1}));
  EXPECT_EQ(result.key_splits, (std::vector<int64_t>{0, 0, 3, 5, 5}));
  EXPECT_EQ(result.offsets, (std::vector<int64_t>{0, 8, 2, 6, 4, 10, 16, 13}));
  EXPECT_EQ(result.offset_splits, (std::vector<int64_t>{0, 2, 4, 5, 7, 8}));
}

TEST(UniqueOffsetsTest, Nothing) {
  const Result result = FindUnique(engine::TestThreads(4), {}, {0, 0, 0}, {1, 2});
  EXPECT_TRUE(result.keys.empty());
  EXPECT_EQ(result.key_splits, (std::vector<int64_t>{0, 0, 0}));
  EXPECT_EQ(result.offset_splits, (std::vector<int64_t>{0}));
}

TEST(UniqueOffsetsTest, EqualsAMapPerRowOnAnyNumberOfThreads) {
  std::mt19937_64 random(1);
  std::vector<int64_t> keys, splits = {0}, dims;
  for (int row = 0; row < 40; ++row) {
    const int64_t length = row % 3 == 0 ? 0 : static_cast<int64_t>(random() % 3000);
    for (int64_t i = 0; i < length; ++i) keys.push_back(static_cast<int64_t>(random() % 500) - 250);
    splits.push_back(static_cast<int64_t>(keys.size()));
    dims.push_back(1 + static_cast<int64_t>(random() % 5));
  }
  Result want;
  want.key_splits = want.offset_splits = {0};
  int64_t offset = 0;
  for (size_t row = 0; row < dims.size(); ++row) {
    std::vector<int64_t> order;
    std::map<int64_t, std::vector<int64_t>> places;
    for (int64_t i = splits[row]; i < splits[row + 1]; ++i, offset += dims[row]) {
      if (places.count(keys[i]) == 0) order.push_back(keys[i]);
      places[keys[i]].push_back(offset);
    }
    for (const int64_t key : order) {
      want.keys.push_back(key);
      want.offsets.insert(want.offsets.end(), places[key].begin(), places[key].end());
      want.offset_splits.push_back(static_cast<int64_t>(want.offsets.size()));
    }
    want.key_splits.push_back(static_cast<int64_t>(want.keys.size()));
  }
  for (const int threads : {1, 2, 8}) {
    const Result result = FindUnique(engine::TestThreads(threads), keys, splits, dims);
    EXPECT_EQ(result.keys, want.keys);
    EXPECT_EQ(result.key_splits, want.key_splits);
    EXPECT_EQ(result.offsets, want.offsets);
    EXPECT_EQ(result.offset_splits, want.offset_splits);
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
