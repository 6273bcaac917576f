#include "monolith/native_training/runtime/base/feature_id.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace monolith {
namespace engine {
namespace {

TEST(FeatureIdTest, BuildsV1AndConvertsToV2) {
  struct Case {
    int64_t slot;
    uint64_t signature, v1;
    int64_t as_signed;
    uint64_t v2;
  };
  const Case cases[] = {
      {1, 100, 18014398509482084u, 18014398509482084, 281474976710756u},
      {200, 12345, 3602879701896409145u, 3602879701896409145, 56294995342143545u},
      {512, 1, 9223372036854775809u, -9223372036854775807, 144115188075855873u},
      {1022, 5, 18410715276690587653u, -36028797018963963, 287667426198290437u},
      {1023, uint64_t{1} << 54, 18428729675200069632u, -18014398509481984, 287948901175001088u},
      {2, (uint64_t{1} << 50) + 9, 37154696925806601u, 37154696925806601, 562949953421321u},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(FIDV1(c.slot, c.signature), c.v1);
    EXPECT_EQ(static_cast<int64_t>(FIDV1(c.slot, c.signature)), c.as_signed);
    EXPECT_EQ(FidV1ToV2(c.v1), c.v2);
    EXPECT_EQ(FIDV1(c.v1).slot(), c.slot);
  }
}

TEST(FeatureIdTest, BuildsV2) {
  EXPECT_EQ(FIDV2(1024, uint64_t{1} << 54), 288230376151711744u);
  EXPECT_EQ(FIDV2(32767, (uint64_t{1} << 48) - 1), 9223372036854775807u);
  EXPECT_EQ(FIDV2(uint64_t{9223372036854775807u}).slot(), 32767);
  EXPECT_EQ(FIDV2(505, 3).signature(), 3u);
}

TEST(FeatureIdTest, SlotsOfSignedIds) {
  EXPECT_EQ(SlotOfV1(int64_t{-1}), kMaxSlotsV1 - 1);
  EXPECT_EQ(SlotOfV2(int64_t{-1}), kMaxSlotsV2 - 1);  // without the sign bit
  EXPECT_EQ(SlotOfV2(static_cast<int64_t>(FIDV2(7, 9))), 7);
}

template <typename F>
std::string MessageOf(F f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(FeatureIdTest, RejectsSlotsOutOfRange) {
  EXPECT_EQ(MessageOf([] { FIDV1(1024, 0); }), "slot should be less than 1024, while got 1024");
  EXPECT_EQ(MessageOf([] { FIDV2(32768, 0); }), "slot should be less than 32768, while got 32768");
  EXPECT_EQ(MessageOf([] { FIDV1(-1, 0); }), "slot should be less than 1024, while got -1");
  EXPECT_NE(MessageOf([] { FIDV2(uint64_t{1} << 63); }), "");
}

}  // namespace
}  // namespace engine
}  // namespace monolith
