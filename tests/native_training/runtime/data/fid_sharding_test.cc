#include "monolith/native_training/runtime/data/fid_sharding.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace data {
namespace {

using engine::FIDV1;
using Ids = std::vector<uint64_t>;
using Offsets = std::vector<std::pair<uint64_t, uint64_t>>;

ShardingPlan PlanOf(const std::map<std::string, ShardedFeatureConfig>& features) {
  ShardingPlan plan;
  EXPECT_EQ(plan.Build(features, OffsetKind::kFloatOffset), "");
  return plan;
}

FeatureRows RowsOf(const std::vector<Ids>& rows, bool shared = false, bool is_v1 = false) {
  FeatureRows result;
  result.shared = shared;
  for (const Ids& row : rows) {
    result.spans.push_back({row.data(), static_cast<int64_t>(row.size()), is_v1});
    result.AddRow();
  }
  return result;
}

Offsets Halves(const std::vector<uint64_t>& offsets) {
  Offsets result;
  for (uint64_t offset : offsets) result.emplace_back(offset >> 32, offset & 0xffffffffu);
  return result;
}

ShardedFids Shard(const ShardingPlan& plan, const std::vector<FeatureRows>& rows, int64_t servers,
                  bool unique, OffsetKind kind) {
  ShardedFids out;
  EXPECT_EQ(ShardFids(plan, rows, servers, unique, kind, engine::InlineRunner(), &out), "");
  return out;
}

class WorkedExample : public ::testing::Test {
 protected:
  const ShardingPlan plan_ = PlanOf({{"a", {"t0", 3}}, {"b", {"t0", 2}}, {"c", {"t1", 1}}});
  const std::vector<Ids> a_ = {{10, 11}, {10}}, b_ = {{4}, {}}, c_ = {{7}, {7, 8}};
  const std::vector<FeatureRows> rows_ = {RowsOf(a_), RowsOf(b_), RowsOf(c_)};
};

TEST_F(WorkedExample, Unique) {
  const ShardedFids out = Shard(plan_, rows_, 2, true, OffsetKind::kFloatOffset);

  EXPECT_EQ(out.fid_lists, (std::vector<std::vector<int64_t>>{{10, 4}, {11}, {8}, {7}}));
  EXPECT_EQ(out.row_splits,
            (std::vector<std::vector<int64_t>>{{0, 1, 2}, {0, 1, 1}, {0, 1}, {0, 1}}));
  EXPECT_EQ(out.feature_offset, (std::vector<int32_t>{0, 2, 3, 4, 4, 5, 7}));
  EXPECT_EQ(out.nfl_offset, (std::vector<uint32_t>{0, 2, 4, 7}));
  EXPECT_EQ(Halves(out.fid_offset),
            (Offsets{{0, 0}, {1, 0}, {0, 0}, {0, 3}, {3, 0}, {3, 0}, {2, 0}}));
  EXPECT_EQ(out.embedding_sizes, (std::vector<int64_t>{5, 3, 1, 1}));
}

TEST_F(WorkedExample, OtherOffsetKinds) {
  const ShardedFids v1 = Shard(plan_, rows_, 2, true, OffsetKind::kListPosition);
  const ShardedFids v2 = Shard(plan_, rows_, 2, true, OffsetKind::kFeaturePosition);

  EXPECT_EQ(Halves(v1.fid_offset)[3], (std::pair<uint64_t, uint64_t>{0, 1}));
  EXPECT_EQ(Halves(v2.fid_offset),
            (Offsets{{0, 0}, {2, 0}, {0, 0}, {1, 0}, {5, 0}, {5, 0}, {4, 0}}));
}

TEST_F(WorkedExample, NotUnique) {
  const ShardedFids out = Shard(plan_, rows_, 2, false, OffsetKind::kFloatOffset);

  EXPECT_EQ(out.fid_lists[0], (std::vector<int64_t>{10, 10, 4}));
  EXPECT_EQ(Halves(out.fid_offset)[2], (std::pair<uint64_t, uint64_t>{0, 3}));
  EXPECT_EQ(Halves(out.fid_offset)[3], (std::pair<uint64_t, uint64_t>{0, 6}));
}

TEST(FidShardingTest, TwoTables) {
  const std::vector<Ids> a = {{4}, {4, 5}}, b = {{3, 6}, {}};
  const ShardedFids out = Shard(PlanOf({{"a", {"ta", 1}}, {"b", {"tb", 2}}}),
                                {RowsOf(a), RowsOf(b)}, 2, true, OffsetKind::kFloatOffset);

  EXPECT_EQ(out.fid_lists, (std::vector<std::vector<int64_t>>{{4}, {5}, {6}, {3}}));
  EXPECT_EQ(Halves(out.fid_offset), (Offsets{{0, 0}, {0, 0}, {1, 0}, {3, 0}, {2, 0}}));
  EXPECT_EQ(out.feature_offset, (std::vector<int32_t>{0, 1, 3, 5, 5}));
  EXPECT_EQ(out.nfl_offset, (std::vector<uint32_t>{0, 2, 5}));
  EXPECT_EQ(out.embedding_sizes, (std::vector<int64_t>{1, 1, 2, 2}));
}

TEST(FidShardingTest, OnePseudoTable) {
  const std::vector<Ids> a = {{4}, {4, 5}}, b = {{3, 6}, {}};
  const ShardedFids out = Shard(PlanOf({{"a", {"t", 1}}, {"b", {"t", 2}}}), {RowsOf(a), RowsOf(b)},
                                2, true, OffsetKind::kFloatOffset);

  EXPECT_EQ(out.fid_lists, (std::vector<std::vector<int64_t>>{{4, 6}, {5, 3}}));
  EXPECT_EQ(out.row_splits, (std::vector<std::vector<int64_t>>{{0, 1, 2}, {0, 1, 2}}));
  EXPECT_EQ(Halves(out.fid_offset), (Offsets{{0, 0}, {0, 0}, {1, 0}, {1, 1}, {0, 1}}));
  EXPECT_EQ(out.embedding_sizes, (std::vector<int64_t>{3, 3}));
}

TEST(FidShardingTest, NegativeIdsGoToTheirFloorModulo) {
  const uint64_t minus_one = std::numeric_limits<uint64_t>::max();
  const uint64_t lowest = uint64_t{1} << 63;
  const std::vector<Ids> a = {{minus_one, lowest, 0, minus_one}};
  const ShardedFids out =
      Shard(PlanOf({{"a", {"t", 1}}}), {RowsOf(a)}, 3, true, OffsetKind::kFloatOffset);

  EXPECT_EQ(out.fid_lists[2], (std::vector<int64_t>{-1}));
  EXPECT_EQ(out.fid_lists[1], (std::vector<int64_t>{std::numeric_limits<int64_t>::min()}));
  EXPECT_EQ(out.fid_lists[0], (std::vector<int64_t>{0}));
  EXPECT_EQ(Halves(out.fid_offset), (Offsets{{2, 0}, {1, 0}, {0, 0}, {2, 0}}));
}

TEST(FidShardingTest, ConvertsV1) {
  const std::vector<Ids> a = {{FIDV1(200, 12345)}};
  const ShardedFids out =
      Shard(PlanOf({{"a", {"t", 1}}}), {RowsOf(a, false, true)}, 1, true, OffsetKind::kFloatOffset);
  EXPECT_EQ(out.fid_lists[0], (std::vector<int64_t>{56294995342143545}));
}

TEST(FidShardingTest, SharedAndEmptyFeatures) {
  const std::vector<Ids> shared = {{1, 2}}, absent = {{}};
  const ShardedFids out =
      Shard(PlanOf({{"a", {"t", 1}}, {"b", {"t", 1}}}),
            {RowsOf(shared, true), RowsOf(absent, true)}, 1, true, OffsetKind::kFloatOffset);
  EXPECT_EQ(out.feature_offset, (std::vector<int32_t>{0, 2, 2}));
  EXPECT_EQ(out.nfl_offset, (std::vector<uint32_t>{0x80000000u, 0x80000001u, 3}));

  const ShardedFids none =
      Shard(PlanOf({{"a", {"t", 1}}}), {FeatureRows()}, 2, true, OffsetKind::kFloatOffset);
  EXPECT_EQ(none.feature_offset, (std::vector<int32_t>{0}));
  EXPECT_EQ(none.nfl_offset, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(none.fid_lists.size(), 2u);
}

TEST(FidShardingTest, OnlyFloatOffsetsNeedWidths) {
  for (OffsetKind kind : {OffsetKind::kListPosition, OffsetKind::kFeaturePosition}) {
    EXPECT_EQ(ShardingPlan().Build({{"a", {"t", 0}}}, kind), "");
    EXPECT_NE(ShardingPlan().Build({{"a", {"t", -1}}}, kind).find("'a'"), std::string::npos);
  }
  EXPECT_NE(ShardingPlan().Build({{"a", {"t", 0}}}, OffsetKind::kFloatOffset).find("'a'"),
            std::string::npos);
}

TEST(FidShardingTest, DoesNotDependOnThreads) {
  std::mt19937_64 random(7);
  std::map<std::string, ShardedFeatureConfig> configs;
  std::vector<std::vector<Ids>> values;
  for (int f = 0; f < 20; ++f) {
    configs["f" + std::to_string(100 + f)] = {"t" + std::to_string(f % 3), 1 + f % 5};
    values.emplace_back();
    for (int row = 0; row < 200; ++row) {
      values.back().emplace_back();
      for (uint64_t i = random() % 30; i > 0; --i) values.back().back().push_back(random() % 5000);
    }
  }
  const ShardingPlan plan = PlanOf(configs);
  std::vector<FeatureRows> rows;
  for (const auto& feature : values) rows.push_back(RowsOf(feature));

  const ShardedFids expected = Shard(plan, rows, 5, true, OffsetKind::kFloatOffset);
  ShardedFids out;
  ASSERT_EQ(ShardFids(plan, rows, 5, true, OffsetKind::kFloatOffset, engine::TestThreads(4), &out),
            "");

  EXPECT_EQ(out.fid_lists, expected.fid_lists);
  EXPECT_EQ(out.fid_offset, expected.fid_offset);
  EXPECT_EQ(out.embedding_sizes, expected.embedding_sizes);
  // Every occurrence finds its own id back through its offset.
  size_t occurrence = 0;
  for (size_t f = 0; f < values.size(); ++f) {
    const ShardingPlan::Feature& feature = plan.features()[f];
    for (const Ids& row : values[f]) {
      for (uint64_t id : row) {
        const auto [list, offset] = Halves({out.fid_offset[occurrence++]})[0];
        ASSERT_EQ(list, feature.table * 5 + id % 5);
        uint64_t floats = 0;
        const std::vector<int64_t>& splits = out.row_splits[list];
        for (int64_t k = 0; k < feature.index_in_table; ++k) {
          floats += static_cast<uint64_t>(splits[k + 1] - splits[k]) *
                    plan.features()[plan.tables()[feature.table][k]].width;
        }
        const uint64_t position =
            splits[feature.index_in_table] + (offset - floats) / feature.width;
        ASSERT_EQ(static_cast<uint64_t>(out.fid_lists[list][position]), id);
      }
    }
  }
}

}  // namespace
}  // namespace data
}  // namespace monolith
