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

TEST(SumDuplicatesTest, InOrderOfFirstAppearance) {
  const int64_t smallest = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> ids = {7, smallest, 7, 0, smallest, 7};
  const std::vector<float> rows = {1, 10, 2, 20, 3, 30, 4, 40, 5, 50, 6, 60};
  std::vector<int64_t> unique(6, -1);
  std::vector<float> sums(12, -1);

  ASSERT_EQ(SumDuplicates(ids.data(), rows.data(), 6, 2, unique.data(), sums.data()), 3);
  unique.resize(3);
  sums.resize(6);
  EXPECT_EQ(unique, (std::vector<int64_t>{7, smallest, 0}));
  EXPECT_EQ(sums, (std::vector<float>{10, 100, 7, 70, 4, 40}));
}

TEST(SumDuplicatesTest, NothingIsNothing) {
  EXPECT_EQ(SumDuplicates(nullptr, nullptr, 0, 4, nullptr, nullptr), 0);
}

TEST(SumDuplicatesTest, EqualsAMap) {
  std::mt19937_64 random(5);
  const int64_t n = 5000;
  std::vector<int64_t> ids(n), unique(n);
  std::vector<float> rows(n * 3), sums(n * 3);
  std::map<int64_t, std::vector<float>> want;
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = static_cast<int64_t>(random() % 700) << (random() % 2 * 40);
    std::vector<float>& sum = want.try_emplace(ids[i], 3, 0.0f).first->second;
    for (int d = 0; d < 3; ++d) {
      rows[i * 3 + d] = static_cast<float>(random() % 1000) - 500;  // sums are exact
      sum[d] += rows[i * 3 + d];
    }
  }

  const int64_t distinct = SumDuplicates(ids.data(), rows.data(), n, 3, unique.data(), sums.data());
  ASSERT_EQ(distinct, static_cast<int64_t>(want.size()));
  for (int64_t i = 0; i < distinct; ++i) {
    const std::vector<float> sum(sums.begin() + i * 3, sums.begin() + i * 3 + 3);
    EXPECT_EQ(sum, want[unique[i]]) << unique[i];
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
