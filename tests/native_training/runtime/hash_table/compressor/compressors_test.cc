// Codes of serving rows, retrievers and initializers.
#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/hash_table/batch/write_stages.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

// Lets this thread take subnormal floats for zeros.
class SubnormalsAreZero {
 public:
#if defined(__x86_64__)
  SubnormalsAreZero() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ | 0x8040u); }
  ~SubnormalsAreZero() { _mm_setcsr(mode_); }

 private:
  const uint32_t mode_;
#elif defined(__aarch64__)
  SubnormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    asm volatile("msr fpcr, %0" : : "r"(mode_ | (uint64_t{1} << 24)) : "memory");
  }
  ~SubnormalsAreZero() { asm volatile("msr fpcr, %0" : : "r"(mode_) : "memory"); }

 private:
  uint64_t mode_ = 0;
#endif
};

float FixedR8(float value, float range) {
  return DecodeFixedR8(EncodeFixedR8(value, range), range);
}

TEST(CompressorsTest, FixedR8RoundsHalfAwayFromZeroAndClamps) {
  EXPECT_EQ(FixedR8(100.0f, 5.0f), 4.9609375f);
  EXPECT_EQ(FixedR8(-7.0f, 5.0f), -5.0f);
  EXPECT_EQ(FixedR8(3.5f, 5.0f), 3.515625f);
  const float step = 5.0f / 128.0f;
  EXPECT_EQ(FixedR8(1.4f * step, 5.0f), step);
  EXPECT_EQ(FixedR8(1.6f * step, 5.0f), 2 * step);
  EXPECT_EQ(FixedR8(-1.4f * step, 5.0f), -step);
  EXPECT_EQ(FixedR8(-1.6f * step, 5.0f), -2 * step);
  EXPECT_EQ(FixedR8(1.0f, 1.0f), 0.9921875f);
  EXPECT_EQ(FixedR8(-1.0f, 1.0f), -1.0f);
  EXPECT_EQ(FixedR8(0.5f, 1.0f), 0.5f);
  EXPECT_EQ(FixedR8(0.003f, 1.0f), 0.0f);
  EXPECT_EQ(FixedR8(0.004f, 1.0f), 0.0078125f);
  EXPECT_EQ(FixedR8(std::numeric_limits<float>::quiet_NaN(), 1.0f), 0.0f);
  EXPECT_EQ(FixedR8(std::numeric_limits<float>::infinity(), 1.0f), 0.9921875f);
  EXPECT_EQ(FixedR8(-std::numeric_limits<float>::infinity(), 1.0f), -1.0f);
}

TEST(CompressorsTest, HalfIsExactBothWaysForEveryHalf) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(value))));
    } else if (std::isinf(value)) {
      EXPECT_EQ(HalfToFloat(FloatToHalf(value)), std::copysign(65504.0f, value));
    } else {
      ASSERT_EQ(FloatToHalf(value), half) << bits;
    }
  }
}

// TensorFlow's threads take subnormal floats for zeros. A half that is one is no such float.
TEST(CompressorsTest, HalvesAreTheSameWhereSubnormalFloatsAreZeros) {
  std::vector<float> want;
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const int exponent = static_cast<int>(bits >> 10);
    const int mantissa = static_cast<int>(bits & 0x3ffu) + (exponent > 0 ? 0x400 : 0);
    want.push_back(std::ldexp(static_cast<float>(mantissa), std::max(exponent, 1) - 25));
  }
  std::vector<float> found;
  std::vector<uint16_t> back;
  {
    const SubnormalsAreZero scope;
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
      found.push_back(HalfToFloat(static_cast<uint16_t>(bits)));
      back.push_back(FloatToHalf(found.back()));
    }
    const std::vector<float> tiny(2, 1e-19f);  // the squares alone are subnormal
    EXPECT_FALSE(IsZeroVector(tiny.data(), 2));
  }
  EXPECT_EQ(found, want);
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) ASSERT_EQ(back[bits], bits);
}

TEST(CompressorsTest, HalfRoundsToNearestEven) {
  EXPECT_FLOAT_EQ(HalfToFloat(FloatToHalf(0.1f)), 0.0999755859f);
  EXPECT_FLOAT_EQ(HalfToFloat(FloatToHalf(0.2f)), 0.1999511719f);
  EXPECT_EQ(HalfToFloat(FloatToHalf(10000.0f)), 10000.0f);
  EXPECT_EQ(HalfToFloat(FloatToHalf(65519.0f)), 65504.0f);
  EXPECT_EQ(HalfToFloat(FloatToHalf(1e9f)), 65504.0f);
  EXPECT_EQ(HalfToFloat(FloatToHalf(2049.0f)), 2048.0f);  // a tie, to even
  EXPECT_EQ(HalfToFloat(FloatToHalf(2051.0f)), 2052.0f);
  EXPECT_EQ(HalfToFloat(FloatToHalf(std::ldexp(1.0f, -25))),
            0.0f);  // half of the smallest, to even
  EXPECT_EQ(HalfToFloat(FloatToHalf(std::ldexp(1.5f, -25))), std::ldexp(1.0f, -24));
}

TEST(CompressorsTest, OneBitKeepsTheSign) {
  SegmentConfig segment = MakeSegment(7, OptimizerKind::kAbsent);
  segment.compressor.kind = CompressorKind::kOneBit;
  segment.compressor.amplitude = 1.0f;
  const auto table = MakeTable(MakeConfig({segment}, EntryType::kServing));
  Assign(table.get(), {1}, {100, 0.1f, 1e-5f, 0, -1e-5f, -0.1f, -100});
  EXPECT_EQ(Lookup(*table, {1}), (Floats{1, 1, 1, -1, -1, -1, -1}));
  EXPECT_EQ(table->layout().row_bytes, 1);
}

TEST(CompressorsTest, SegmentsOfOddSizesSitBesideOneAnother) {
  std::vector<SegmentConfig> segments;
  const CompressorKind kinds[] = {CompressorKind::kFixedR8, CompressorKind::kFp16,
                                  CompressorKind::kOneBit, CompressorKind::kFp32,
                                  CompressorKind::kFp16};
  for (int i = 0; i < 5; ++i) {
    SegmentConfig segment = MakeSegment(2 * i + 1, OptimizerKind::kAbsent);
    segment.compressor.kind = kinds[i];
    segment.compressor.amplitude = 0.5f;
    segments.push_back(segment);
  }
  const auto table = MakeTable(MakeConfig(segments, EntryType::kServing));
  const Floats values(table->dim(), 0.5f);
  for (int64_t id = 0; id < 100; ++id) Assign(table.get(), {id}, values);
  for (int64_t id = 0; id < 100; ++id) EXPECT_EQ(Lookup(*table, {id}), values);
}

TEST(RetrieversTest, FakeQuantAtLookupStoresFloats) {
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kSgd);
  segment.compressor.kind = CompressorKind::kFixedR8;
  segment.compressor.range = 5.0f;
  const auto table = MakeTable(MakeConfig({segment}));
  Assign(table.get(), {1}, {3.5f, 100});
  EXPECT_EQ(Lookup(*table, {1}), (Floats{3.515625f, 4.9609375f}));
  Step step;
  step.rates = {1};
  Optimize(table.get(), {1}, {0, 99},
           step);  // straight-through: the float moves by the full gradient
  EXPECT_EQ(Lookup(*table, {1}), (Floats{3.515625f, 1.015625f}));
}

Segment HashNetSegment(int64_t step_size) {
  SegmentConfig config = MakeSegment(1, OptimizerKind::kSgd);
  config.compressor.kind = CompressorKind::kOneBit;
  config.compressor.step_size = step_size;
  RowLayout layout;
  EXPECT_TRUE(CompileRowLayout(MakeConfig({config}), &layout).ok());
  return layout.segments[0];
}

TEST(RetrieversTest, HashNetForwardAndBackward) {
  const Segment segment = HashNetSegment(1000);
  const auto forward = [&](float w, int64_t step) {
    float out;
    RetrieveSegment(segment, &w, HashNetScale(segment.compressor, step), &out);
    return out;
  };
  const auto backward = [](const Segment& s, float w, float g, int64_t step) {
    float slice;
    HashNetBackward(s, &w, &g, HashNetScale(s.compressor, step), &slice);
    return slice;
  };
  EXPECT_NEAR(forward(1, 0), 0.07615941f, 1e-6f);
  EXPECT_NEAR(forward(2, 0), 0.09640275f, 1e-6f);
  EXPECT_NEAR(backward(segment, 2, 1, 0), 0.00706508f, 1e-6f);
  EXPECT_NEAR(backward(segment, 2, 2, 999), 0.01413016f, 1e-6f);
  EXPECT_NEAR(backward(segment, 2, 100, 1000), 0.0054426f, 0.0054426f * 1e-3f);
  EXPECT_NEAR(forward(2, 1000), 0.0999889f, 1e-6f);
  EXPECT_NEAR(HashNetScale(segment.compressor, 1000), 2.4494898f, 1e-6f);
  EXPECT_NEAR(backward(HashNetSegment(100), 1, 1, 100), 0.35840667f * 0.1f, 1e-6f);
}

TEST(RetrieversTest, HashNetInATableUsesTheLastStepAndKeepsTheGradient) {
  SegmentConfig segment = MakeSegment(1, OptimizerKind::kSgd);
  segment.compressor.kind = CompressorKind::kOneBit;
  segment.compressor.step_size = 1000;
  const auto table = MakeTable(MakeConfig({segment}));
  Assign(table.get(), {1, 2}, {2, 2});
  ExpectNear(Lookup(*table, {1}), {0.09640275f});
  const Floats gradient = {1};
  Step step;
  step.rates = {1};
  step.global_step = 1000;
  Optimize(table.get(), {2}, gradient, step);
  EXPECT_EQ(gradient[0], 1.0f);
  ExpectNear(Lookup(*table, {1}), {0.0999889f});
}

TEST(InitializersTest, ConstantsPerSegment) {
  std::vector<SegmentConfig> segments = {MakeSegment(1, OptimizerKind::kSgd),
                                         MakeSegment(2, OptimizerKind::kSgd),
                                         MakeSegment(1, OptimizerKind::kSgd)};
  for (int i = 0; i < 2; ++i) {
    segments[i].initializer.kind = InitializerKind::kConstants;
    segments[i].initializer.constant = 3.0f + static_cast<float>(i);
  }
  segments[2].initializer.kind = InitializerKind::kOnes;
  const auto table = MakeTable(MakeConfig(segments));
  AssignAdd(table.get(), {5}, {0, 0, 0, 0});
  EXPECT_EQ(Lookup(*table, {5}), (Floats{3, 4, 4, 1}));
}

TEST(InitializersTest, RandomUniformDependsOnSeedIdAndElementOnly) {
  SegmentConfig segment = MakeSegment(1000, OptimizerKind::kSgd);
  segment.initializer.kind = InitializerKind::kRandomUniform;
  segment.initializer.minval = -1.0f;
  segment.initializer.maxval = 1.0f;
  const auto a = MakeTable(MakeConfig({segment}));
  const auto b = MakeTable(MakeConfig({segment}));
  AssignAdd(a.get(), {1, 2}, Floats(2000, 0.0f));
  AssignAdd(b.get(), {2, 1}, Floats(2000, 0.0f));

  const Floats first = Lookup(*a, {1});

  EXPECT_EQ(first, Lookup(*b, {1}));
  EXPECT_NE(first, Lookup(*a, {2}));
  EXPECT_GT(*std::max_element(first.begin(), first.end()), 0.9f);
  EXPECT_LT(*std::max_element(first.begin(), first.end()), 1.0f);
  EXPECT_LT(*std::min_element(first.begin(), first.end()), -0.9f);
  EXPECT_GE(*std::min_element(first.begin(), first.end()), -1.0f);
  TableConfig other = MakeConfig({segment});
  other.seed = 43;
  const auto c = MakeTable(other);
  AssignAdd(c.get(), {1}, Floats(1000, 0.0f));
  EXPECT_NE(first, Lookup(*c, {1}));
}

}  // namespace
}  // namespace engine
}  // namespace monolith
