#include "monolith/native_training/runtime/distribution/sum_duplicates.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

namespace monolith {
namespace distribution {
namespace {

constexpr auto kInOrder = [](int64_t k) { return k; };

TEST(SumsByIdTest, InOrderOfFirstAppearance) {
  const int64_t smallest = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> ids = {7, smallest, 7, 0, smallest, 7};
  const std::vector<float> rows = {1, 10, 2, 20, 3, 30, 4, 40, 5, 50, 6, 60};
  SumsById sums;
  sums.Clear(6, 2);
  sums.Add(ids.data(), rows.data(), 2, 6, kInOrder);

  ASSERT_EQ(sums.size(), 3);
  EXPECT_EQ(std::vector<int64_t>(sums.ids(), sums.ids() + 3),
            (std::vector<int64_t>{7, smallest, 0}));
  EXPECT_EQ(std::vector<uint32_t>(sums.counts(), sums.counts() + 3),
            (std::vector<uint32_t>{3, 2, 1}));
  EXPECT_EQ(std::vector<float>(sums.sums(), sums.sums() + 6),
            (std::vector<float>{10, 100, 7, 70, 4, 40}));
}

TEST(SumsByIdTest, TakesPositionsAndForgetsWhatWasBefore) {
  const std::vector<int64_t> ids = {1, 2, 3, 2, 1};
  const std::vector<float> rows = {1, 2, 4, 8, 16};
  SumsById sums;
  sums.Clear(5, 1);
  sums.Add(ids.data(), rows.data(), 1, 5, kInOrder);
  ASSERT_EQ(sums.size(), 3);
  sums.Clear(3, 1);
  EXPECT_EQ(sums.size(), 0);
  const std::vector<int64_t> positions = {4, 1, 0};
  sums.Add(ids.data(), rows.data(), 1, 3, [&](int64_t k) { return positions[k]; });
  ASSERT_EQ(sums.size(), 2);
  EXPECT_EQ(sums.ids()[0], 1);
  EXPECT_EQ(sums.sums()[0], 17);
  EXPECT_EQ(sums.ids()[1], 2);
  EXPECT_EQ(sums.sums()[1], 2);
}

TEST(SumsByIdTest, RowsAreColumnsOfALargerMatrix) {
  const std::vector<int64_t> ids = {7, 8, 7};
  const std::vector<float> matrix = {0, 1, 10, 0, 2, 20, 0, 3, 30};
  SumsById sums;
  sums.Clear(3, 2);
  sums.Add(ids.data(), matrix.data() + 1, 3, 3, kInOrder);

  ASSERT_EQ(sums.size(), 2);
  EXPECT_EQ(std::vector<float>(sums.sums(), sums.sums() + 4), (std::vector<float>{4, 40, 2, 20}));
}

TEST(SumsByIdTest, NothingIsNothing) {
  SumsById sums;
  EXPECT_EQ(sums.size(), 0);
  sums.Clear(0, 4);
  sums.Add(nullptr, nullptr, 4, 0, kInOrder);
  EXPECT_EQ(sums.size(), 0);
}

// One object for all sizes: memory that is kept must not show.
TEST(SumsByIdTest, EqualsAMap) {
  std::mt19937_64 random(5);
  SumsById sums;
  for (const int64_t n : {5000, 3, 100000, 17, 5000}) {
    std::vector<int64_t> ids(n);
    std::vector<float> rows(n * 3);
    std::map<int64_t, std::vector<float>> want;
    for (int64_t i = 0; i < n; ++i) {
      ids[i] = static_cast<int64_t>(random() % (n / 7 + 1)) << (random() % 2 * 40);
      std::vector<float>& sum = want.try_emplace(ids[i], 3, 0.0f).first->second;
      for (int d = 0; d < 3; ++d) {
        rows[i * 3 + d] = static_cast<float>(random() % 1000) - 500;  // sums are exact
        sum[d] += rows[i * 3 + d];
      }
    }
    sums.Clear(n, 3);
    sums.Add(ids.data(), rows.data(), 3, n / 2, kInOrder);
    sums.Add(ids.data() + n / 2, rows.data() + n / 2 * 3, 3, n - n / 2, kInOrder);
    ASSERT_EQ(sums.size(), static_cast<int64_t>(want.size()));
    for (int64_t i = 0; i < sums.size(); ++i) {
      const std::vector<float> sum(sums.sums() + i * 3, sums.sums() + i * 3 + 3);
      ASSERT_EQ(sum, want[sums.ids()[i]]) << sums.ids()[i];
    }
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
