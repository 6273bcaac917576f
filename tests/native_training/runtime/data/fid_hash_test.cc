#include "monolith/native_training/runtime/data/fid_hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "monolith/native_training/runtime/base/feature_id.h"

namespace monolith {
namespace data {
namespace {

using engine::FIDV2;
using engine::MakeFidV2;

TEST(FidHashTest, HashesNumbers) { EXPECT_EQ(MakeFidV2(4, HashNumber(185)), 1153447759131936u); }

TEST(FidHashTest, CombinesIds) {
  const auto combine = [](int64_t a, int64_t b) { return MakeFidV2(505, CombineFids(a, b)); };
  EXPECT_EQ(combine(FIDV2(1, 3), FIDV2(2, 5)), 142144871828815887u);
  EXPECT_EQ(combine(3, 5), 142144863238881295u);
}

TEST(FidHashTest, CombinesExtremes) {
  const int64_t lowest = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(CombineFids(lowest, lowest), uint64_t{1} << 62);
  EXPECT_EQ(CombineFids(-1, 1), 0u);
}

}  // namespace
}  // namespace data
}  // namespace monolith
