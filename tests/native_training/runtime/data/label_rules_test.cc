#include "monolith/native_training/runtime/data/label_rules.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace data {
namespace {

Actions SpanOf(const std::vector<int32_t>& actions) {
  return {actions.data(), static_cast<int64_t>(actions.size())};
}

TEST(TaskLabelTest, ActionsDecide) {
  const TaskLabel task = {{1, 2}, {3}, 0.5f};
  const auto label = [&task](const std::vector<int32_t>& actions, float random) {
    return task.Decide(SpanOf(actions), -1.0f, [random] { return random; });
  };

  EXPECT_EQ(label({3, 2}, 0.9f), 1.0f);
  EXPECT_EQ(label({3}, 0.4f), -1.0f);
  EXPECT_EQ(label({3}, 0.5f), kInvalidLabel);
  EXPECT_EQ(label({4}, 0.0f), kInvalidLabel);
  EXPECT_EQ(label({}, 0.0f), kInvalidLabel);
}

TEST(TaskLabelTest, WithoutNegativeActionsTheRestIsNegative) {
  const TaskLabel task = {{1}, {}, 1.0f};
  EXPECT_EQ(task.Decide({}, 0.0f, [] { return 0.99f; }), 0.0f);
}

TEST(TaskLabelTest, BadTasks) {
  EXPECT_TRUE(CheckTasks({}).ok());
  EXPECT_TRUE(CheckTasks({{{1}, {2}, 1}}).ok());
  EXPECT_EQ(CheckTasks({{{1}, {}, 1}, {{}, {2}, 1}}).message,
            "config: task 1 has no positive action");
  EXPECT_EQ(CheckTasks({{{1, 2}, {3, 2}, 1}}).message,
            "config: action 2 of task 0 is positive and negative");
}

TEST(ActionLabelsTest, TheBestActionDecides) {
  const ActionLabels labels = {{5, 6}, {5, 1}, {6, 2}, 3.0f, -3.0f};
  EXPECT_EQ(labels.Of({}), kInvalidLabel);
  EXPECT_EQ(labels.Of(SpanOf({6, 5})), 3.0f);
  EXPECT_EQ(labels.Of(SpanOf({1, 6})), -3.0f);
  EXPECT_EQ(labels.Of(SpanOf({1, 2})), 3.0f);  // none has a priority: the first
  EXPECT_EQ(labels.Of(SpanOf({9})), kInvalidLabel);
}

class ReweightTest : public testing::Test {
 protected:
  // How often a sample of label 7 is emitted; its label after that is in label_.
  int64_t Count(const std::vector<int32_t>& actions, const std::vector<int32_t>& before) {
    label_ = 7;
    return rules_.Apply(SpanOf(actions), SpanOf(before), &label_);
  }

  // Best first: 1, 2. Action 3 weighs, but has no priority.
  const ReweightRules rules_{
      {{1, {5, 1.0f}}, {2, {3, 0.0f}}, {3, {2, 4.0f}}, {4, {int64_t{1} << 20, 1.0f}}}, {1, 2}};
  float label_ = 0;
};

TEST_F(ReweightTest, WithoutActionsOnce) {
  EXPECT_EQ(Count({}, {}), 1);
  EXPECT_EQ(label_, 7.0f);
}

TEST_F(ReweightTest, NothingBetterNothingEmitted) {
  EXPECT_EQ(Count({2}, {1}), 0);
  EXPECT_EQ(Count({1}, {1}), 0);
  EXPECT_EQ(Count({}, {9}), 0);
}

TEST_F(ReweightTest, NewActionsWeigh) {
  EXPECT_EQ(Count({1}, {}), 5);
  EXPECT_EQ(label_, 1.0f);
  EXPECT_EQ(Count({2, 1}, {}), 5);      // a listed one that is not the best does not count
  EXPECT_EQ(Count({2, 3, 3}, {}), 12);  // those without a priority do
  EXPECT_EQ(label_, 0.0f);
  EXPECT_EQ(Count({9}, {}), 1);  // without a rule: once, as it is
  EXPECT_EQ(label_, 7.0f);
}

TEST_F(ReweightTest, WhatWasEmittedBeforeIsTakenBack) {
  EXPECT_EQ(Count({1}, {2}), 3 + 5);  // another label: both
  EXPECT_EQ(label_, 1.0f);
  EXPECT_EQ(Count({1}, {4}), (1 << 20) - 5);  // the same label: the difference
  EXPECT_EQ(label_, -1.0f);
}

TEST_F(ReweightTest, HugeCountsDoNotOverflow) {
  const std::vector<int32_t> many(10, 4);
  EXPECT_EQ(Count(many, {}), int64_t{1} << 40);
}

TEST(NormalizationTest, Methods) {
  const auto normalize = [](const char* name, float x, float v) {
    Normalization method{};
    EXPECT_TRUE(ParseNormalization(name, &method)) << name;
    return Normalize(method, x, v);
  };
  EXPECT_FLOAT_EQ(normalize("log", 2, 1), std::log(3.0f));
  EXPECT_EQ(normalize("log", -2, 1), -INFINITY);
  EXPECT_EQ(normalize("scale", 5, 2), 2.5f);
  EXPECT_EQ(normalize("scale2int", -5, 2), -2.0f);
  EXPECT_FLOAT_EQ(normalize("pow", 2, 2), 9.0f);
  EXPECT_FLOAT_EQ(normalize("repow", 2, 3), 8.0f);
  EXPECT_EQ(normalize("repow", -2, 3), 0.0f);
  EXPECT_FLOAT_EQ(normalize("scalelog", 4, 2), std::log(3.0f));
  Normalization method{};
  EXPECT_FALSE(ParseNormalization("exp", &method));
}

}  // namespace
}  // namespace data
}  // namespace monolith
