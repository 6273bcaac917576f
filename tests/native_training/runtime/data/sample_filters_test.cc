#include "monolith/native_training/runtime/data/sample_filters.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace monolith {
namespace data {
namespace {

template <typename T>
Span<T> SpanOf(const std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

float Never() {
  ADD_FAILURE() << "nothing is left to chance here";
  return 0;
}

// Ids with their slots; `slots_only` come without the id.
struct Sample {
  std::vector<std::pair<uint64_t, int64_t>> ids;
  std::vector<int64_t> slots_only;
  std::vector<int32_t> actions;
  int64_t req_time = 0;
};

bool Keeps(const FidFilter::Config& config, const Sample& sample) {
  return FidFilter(config).Keeps(sample.req_time, SpanOf(sample.actions), [&](const auto& visit) {
    for (const auto& [fid, slot] : sample.ids) visit(&fid, slot);
    for (const int64_t slot : sample.slots_only) visit(nullptr, slot);
  });
}

TEST(FidFilterTest, WithoutListsKeepsAll) {
  EXPECT_TRUE(Keeps({}, {}));
  EXPECT_TRUE(Keeps({}, {{{5, 1}}, {2}, {3}, 4}));
}

TEST(FidFilterTest, ByRequestTimeAndActions) {
  FidFilter::Config config;
  config.req_time_min = 100;
  EXPECT_FALSE(Keeps(config, {{}, {}, {}, 99}));
  EXPECT_TRUE(Keeps(config, {{}, {}, {}, 100}));
  config.has_actions = {2, -1};
  EXPECT_FALSE(Keeps(config, {{}, {}, {1, 3}, 100}));
  EXPECT_TRUE(Keeps(config, {{}, {}, {1, -1}, 100}));
}

TEST(FidFilterTest, ByIds) {
  const uint64_t large = ~uint64_t{0};
  const Sample sample = {{{1, 10}, {2, 10}, {large, 11}}, {}, {}, 0};
  FidFilter::Config config;
  config.filter_fids = {7, 8};
  EXPECT_TRUE(Keeps(config, sample));
  config.filter_fids = {7, -1};
  EXPECT_FALSE(Keeps(config, sample));

  config = {};
  config.has_fids = {7, 2};
  EXPECT_TRUE(Keeps(config, sample));
  config.has_fids = {7};
  EXPECT_FALSE(Keeps(config, sample));

  config = {};
  config.select_fids = {1, -1, 1};  // twice is once
  EXPECT_TRUE(Keeps(config, sample));
  config.select_fids = {1, 7};
  EXPECT_FALSE(Keeps(config, sample));
  // The same id twice is no other one.
  config.select_fids = {1, 2};
  EXPECT_FALSE(Keeps(config, {{{1, 10}, {1, 10}}, {}, {}, 0}));
}

TEST(FidFilterTest, BySlots) {
  FidFilter::Config config;
  config.select_slots = {10, 11};
  EXPECT_FALSE(Keeps(config, {{{1, 10}}, {}, {}, 0}));
  EXPECT_TRUE(Keeps(config, {{{1, 10}}, {11}, {}, 0}));
  // Ids of which only the slot counts are no ids.
  config.select_slots.clear();
  config.has_fids = {11};
  EXPECT_FALSE(Keeps(config, {{}, {11}, {}, 0}));
}

TEST(KeepsByLabelTest, AnyLabelAboveItsThreshold) {
  EXPECT_TRUE(KeepsByLabel(SpanOf<float>({0, 2}), {1, 1}, true));
  EXPECT_FALSE(KeepsByLabel(SpanOf<float>({0, 1}), {1, 1}, true));
  EXPECT_TRUE(KeepsByLabel(SpanOf<float>({0, 1}), {1, 1}, false));
  EXPECT_FALSE(KeepsByLabel(SpanOf<float>({2}), {1, 1}, false));  // too few labels
  EXPECT_FALSE(KeepsByLabel(SpanOf<float>({2}), {}, false));
}

TEST(StrategyFilterTest, TheFirstOfThePrioritiesCounts) {
  StrategyFilter filter;
  ASSERT_TRUE(filter.Build({3, 1, 5}, "1:0.5:9,3:0.25", false).ok());
  const auto at = [](float value) { return [value] { return value; }; };

  EXPECT_FALSE(filter.Decide({}, Never).keeps);
  EXPECT_FALSE(filter.Decide(SpanOf<int32_t>({2}), Never).keeps);
  EXPECT_TRUE(filter.Decide(SpanOf<int32_t>({5}), Never).keeps);  // has no rate
  EXPECT_FALSE(filter.Decide(SpanOf<int32_t>({1, 3}), at(0.25f)).keeps);
  EXPECT_TRUE(filter.Decide(SpanOf<int32_t>({1, 3}), at(0.24f)).keeps);
  EXPECT_FALSE(filter.Decide(SpanOf<int32_t>({1, 3}), at(0.24f)).has_label);
  const StrategyFilter::Decision labelled = filter.Decide(SpanOf<int32_t>({1}), at(0.4f));
  EXPECT_TRUE(labelled.keeps && labelled.has_label);
  EXPECT_EQ(labelled.label, 9.0f);
}

TEST(StrategyFilterTest, SamplesWithoutAStrategy) {
  StrategyFilter filter;
  ASSERT_TRUE(filter.Build({1}, "", true).ok());
  EXPECT_TRUE(filter.Decide({}, Never).keeps);
}

TEST(StrategyFilterTest, BadText) {
  StrategyFilter filter;
  EXPECT_EQ(filter.Build({}, "1:x", false).message,
            "strategy_conf is '1:x', want strategy:rate[:label] numbers");
  EXPECT_EQ(filter.Build({}, "1", false).message,
            "strategy_conf is '1', in which '1' has 1 parts, want 2 to 3");
}

TEST(NegativeFilterTest, DropsAShareOfNegatives) {
  NegativeFilter filter;
  ASSERT_TRUE(filter.Build({0.5f, 1, 1.0f, "", ""}).ok());
  const auto at = [](float value) { return [value] { return value; }; };

  EXPECT_TRUE(filter.Keeps(SpanOf<float>({0, 1}), {}, Never));
  EXPECT_FALSE(filter.Keeps(SpanOf<float>({1, 0}), {}, at(0.4f)));
  EXPECT_TRUE(filter.Keeps(SpanOf<float>({1, 0}), {}, at(0.5f)));
  EXPECT_FALSE(filter.Keeps(SpanOf<float>({9}), {}, at(0.4f)));  // no such label: negative
}

TEST(NegativeFilterTest, ActionsHaveRatesOfTheirOwn) {
  NegativeFilter filter;
  ASSERT_TRUE(filter.Build({1.0f, 0, 1.0f, "7,0,8", "7:0,0:0,8:0.5"}).ok());
  const auto keeps = [&filter](const std::vector<int32_t>& actions) {
    return filter.Keeps({}, SpanOf(actions), [] { return 0.75f; });
  };

  EXPECT_FALSE(keeps({}));
  EXPECT_FALSE(keeps({9}));
  EXPECT_TRUE(keeps({8}));
  EXPECT_TRUE(keeps({8, 7}));
  EXPECT_FALSE(keeps({8, 0}));  // actions up to 0 have no rate
}

TEST(NegativeFilterTest, BadConfig) {
  NegativeFilter filter;
  EXPECT_EQ(filter.Build({0, -1, 0, "", ""}).message, "label_index is -1, want 0 or more");
  EXPECT_EQ(filter.Build({0, 0, 0, "a", "1:1"}).message,
            "action_priority is 'a', in which 'a' is not an integer");
  EXPECT_EQ(filter.Build({0, 0, 0, "1", "1:b"}).message,
            "per_action_drop_rate is '1:b', want action:rate numbers");
}

}  // namespace
}  // namespace data
}  // namespace monolith
