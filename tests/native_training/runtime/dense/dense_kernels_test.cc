#include "monolith/native_training/runtime/dense/dense_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace monolith {
namespace dense {
namespace {

std::vector<float> Random(int64_t n, float low, float high, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(random);
  return values;
}

// Sizes around the vector widths.
const std::vector<int64_t> kSizes = {0, 1, 3, 4, 5, 15, 16, 17, 31, 33, 1000};

TEST(DenseKernelsTest, SumOfSquares) {
  for (const int64_t n : kSizes) {
    const std::vector<float> values = Random(n, -2, 2, n);
    double want = 0;
    for (const float value : values) want += double{value} * value;
    // The kernel sums short runs in single precision and adds up the runs in double.
    EXPECT_NEAR(SumOfSquares(values.data(), n), want, 5e-7 * (1 + want));
  }
  const float large[2] = {3e38f, -2e38f};
  EXPECT_TRUE(std::isfinite(SumOfSquares(large, 2)));
  const float bad[3] = {1, std::numeric_limits<float>::quiet_NaN(), 2};
  EXPECT_TRUE(std::isnan(SumOfSquares(bad, 3)));
}

TEST(DenseKernelsTest, ScaleInPlaceAndElsewhere) {
  for (const int64_t n : kSizes) {
    std::vector<float> values = Random(n, -2, 2, n);
    std::vector<float> out(n);
    Scale(values.data(), 0.5f, n, out.data());
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(out[i], values[i] * 0.5f);
    Scale(values.data(), 0.5f, n, values.data());
    EXPECT_EQ(values, out);
  }
}

TEST(DenseKernelsTest, Adamom) {
  for (const bool use_v2 : {false, true}) {
    for (const int64_t n : kSizes) {
      const AdamomOptions options = {0.1f, 0.99f, 0.9f, 1e-3f, 0.01f, use_v2};
      const std::vector<float> grad = Random(n, -1, 1, 1), w0 = Random(n, -1, 1, 2),
                               m0 = Random(n, -1, 1, 3), v0 = Random(n, 0, 2, 4),
                               c0 = Random(n, 0, 5, 5);
      std::vector<float> w = w0, m = m0, v = v0, c = c0;
      AdamomStep(options, grad.data(), n, w.data(), m.data(), v.data(), c.data());
      std::vector<float> moved = w0;
      AdamomMove(options, m.data(), v.data(), c.data(), n, moved.data());
      for (int64_t i = 0; i < n; ++i) {
        const double g = 0.01 * w0[i] + grad[i];
        EXPECT_NEAR(m[i], 0.9 * m0[i] + 0.1 * g, 1e-6);
        EXPECT_NEAR(v[i], 0.99 * v0[i] + g * g, 1e-6);
        EXPECT_NEAR(c[i], 0.99 * c0[i] + 1, 1e-6);
        const double ratio = double{v[i]} / c[i];
        const double root = use_v2 ? std::sqrt(ratio) + 1e-3 : std::sqrt(ratio + 1e-3);
        EXPECT_NEAR(w[i], w0[i] - 0.1 * m[i] / root, 1e-5 * (1 + std::abs(0.1 * m[i] / root)));
        EXPECT_NEAR(moved[i], w[i], 1e-6 * (1 + std::abs(w[i])));
      }
    }
  }
}

TEST(DenseKernelsTest, Rmsprop) {
  for (const bool use_v2 : {false, true}) {
    for (const int64_t n : kSizes) {
      const RmspropOptions options = {0.1f, 0.9f, 0.8f, 1e-3f, 0.01f, use_v2};
      const std::vector<float> grad = Random(n, -1, 1, 1), w0 = Random(n, -1, 1, 2),
                               m0 = Random(n, -1, 1, 3), v0 = Random(n, 0, 2, 4);
      std::vector<float> w = w0, m = m0, v = v0;
      RmspropStep(options, grad.data(), n, w.data(), m.data(), v.data());
      for (int64_t i = 0; i < n; ++i) {
        const double g = 0.01 * w0[i] + grad[i];
        const double want_v = use_v2 ? 0.8 * v0[i] + g * g : v0[i] + (g * g - v0[i]) * 0.2;
        EXPECT_NEAR(v[i], want_v, 1e-6);
        const double root = use_v2 ? std::sqrt(want_v) + 1e-3 : std::sqrt(want_v + 1e-3);
        EXPECT_NEAR(m[i], 0.9 * m0[i] + 0.1 * g / root, 1e-5);
        EXPECT_NEAR(w[i], w0[i] - m[i], 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace dense
}  // namespace monolith
