#include "monolith/native_training/runtime/distribution/segment_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace distribution {
namespace {

TEST(CheckSegmentsTest, FindsTheFirstBadSegmentAndWhetherTheyAreSorted) {
  const std::vector<int64_t> segments = {0, 2, 1, 3, -1};
  EXPECT_FALSE(CheckSegments(engine::InlineRunner(), segments.data(), 5, 4).sorted);
  EXPECT_EQ(CheckSegments(engine::InlineRunner(), segments.data(), 5, 4).bad, 4);
  EXPECT_EQ(CheckSegments(engine::InlineRunner(), segments.data(), 5, 3).bad, 3);
  EXPECT_EQ(CheckSegments(engine::InlineRunner(), segments.data(), 4, 4).bad, -1);
  EXPECT_TRUE(CheckSegments(engine::InlineRunner(), segments.data(), 2, 4).sorted);
  EXPECT_EQ(CheckSegments(engine::InlineRunner(), segments.data(), 0, 0).bad, -1);
}

template <Reduction kReduction>
void ExpectReduced(int64_t k, int64_t rows, int64_t dim, bool sorted, int threads) {
  std::mt19937_64 random(k + rows + dim);
  std::vector<int64_t> segments(k);
  for (int64_t& segment : segments) segment = static_cast<int64_t>(random() % rows);
  if (sorted) std::sort(segments.begin(), segments.end());
  std::vector<float> values(k * dim);
  for (float& value : values) value = static_cast<float>(random() % 9) - 4;

  // Two sinks, written over garbage.
  const int64_t left = dim / 2;
  std::vector<float> first(rows * left, 99), second(rows * (dim - left), 99);
  const engine::TestThreads parallel(threads);
  const SegmentCheck check =
      ReduceSegments<kReduction>(parallel, segments.data(), k, rows, values.data(), dim,
                                 {{first.data(), 0, left}, {second.data(), left, dim - left}});
  ASSERT_EQ(check.bad, -1);

  std::vector<double> want(rows * dim, 0);
  std::vector<int64_t> counts = CountSegments(segments.data(), k, rows);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < dim; ++j) {
      const double value = values[i * dim + j];
      want[segments[i] * dim + j] += kReduction == Reduction::kSquareNorm ? value * value : value;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < dim; ++j) {
      double expected = want[row * dim + j];
      if (kReduction == Reduction::kMean) expected /= std::max<int64_t>(1, counts[row]);
      if (kReduction == Reduction::kSquareNorm) expected = std::sqrt(expected);
      const float got = j < left ? first[row * left + j] : second[row * (dim - left) + (j - left)];
      ASSERT_NEAR(got, expected, 1e-4 * (1 + std::abs(expected))) << row << " " << j;
    }
  }
}

TEST(ReduceSegmentsTest, EqualsTheDefinition) {
  for (const bool sorted : {true, false}) {
    for (const int threads : {1, 4}) {
      const int64_t sizes[][3] = {{0, 3, 5},      {1, 1, 1},        {7, 20, 33},    {300, 10, 17},
                                  {20000, 1, 20}, {20000, 900, 40}, {500, 30000, 9}};
      for (const auto& size : sizes) {
        ExpectReduced<Reduction::kSum>(size[0], size[1], size[2], sorted, threads);
        ExpectReduced<Reduction::kMean>(size[0], size[1], size[2], sorted, threads);
        ExpectReduced<Reduction::kSquareNorm>(size[0], size[1], size[2], sorted, threads);
      }
    }
  }
}

TEST(ReduceSegmentsTest, OneWrongSegmentAmongSortedOnesIsFound) {
  const int64_t k = 20000, rows = 900, dim = 20;
  std::vector<float> values(k * dim, 1.0f), out(rows * dim);
  for (const int threads : {1, 4}) {
    for (const int64_t place : {int64_t{0}, int64_t{1}, k / 4, k / 2 + 1, k - 1}) {
      for (const int64_t wrong : {int64_t{-1}, rows, INT64_MIN, INT64_MAX}) {
        std::vector<int64_t> segments(k);
        for (int64_t i = 0; i < k; ++i) segments[i] = i * rows / k;
        segments[place] = wrong;
        const SegmentCheck check =
            ReduceSegments<Reduction::kSum>(engine::TestThreads(threads), segments.data(), k, rows,
                                            values.data(), dim, {{out.data(), 0, dim}});
        ASSERT_EQ(check.bad, place) << wrong << " with " << threads << " threads";
      }
    }
  }
}

TEST(ReduceSegmentsTest, OneSegmentOutOfOrderIsStillSummed) {
  const int64_t k = 20000, rows = 900, dim = 20;
  std::vector<float> values(k * dim, 1.0f);
  for (const int threads : {1, 4}) {
    for (const int64_t place : {int64_t{0}, int64_t{1}, k / 4, k / 2 + 1, k - 1}) {
      for (const int64_t other : {int64_t{0}, rows / 3, rows - 1}) {
        std::vector<int64_t> segments(k);
        for (int64_t i = 0; i < k; ++i) segments[i] = i * rows / k;
        segments[place] = other;
        std::vector<float> out(rows * dim, -1.0f);
        const SegmentCheck check =
            ReduceSegments<Reduction::kSum>(engine::TestThreads(threads), segments.data(), k, rows,
                                            values.data(), dim, {{out.data(), 0, dim}});
        ASSERT_EQ(check.bad, -1);
        const std::vector<int64_t> counts = CountSegments(segments.data(), k, rows);
        for (int64_t i = 0; i < rows * dim; ++i) {
          ASSERT_EQ(out[i], static_cast<float>(counts[i / dim])) << place << " " << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
