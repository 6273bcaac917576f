#include "monolith/native_training/runtime/data/value_filter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace data {
namespace {

template <typename T>
ValueFilter<T> FilterOf(const std::string& name, std::vector<T> operands) {
  Comparison op;
  EXPECT_TRUE(ParseComparison(name, &op)) << name;
  ValueFilter<T> filter;
  EXPECT_EQ(filter.Build(op, std::move(operands)), "");
  return filter;
}

TEST(ValueFilterTest, Integers) {
  const auto matches = [](const std::string& op, std::vector<int64_t> operands) {
    return FilterOf<int64_t>(op, std::move(operands)).Matches(2);
  };
  EXPECT_TRUE(matches("between", {1, 3}));
  EXPECT_TRUE(matches("between", {2, 3}));
  EXPECT_FALSE(matches("between", {1, 2}));
  EXPECT_FALSE(matches("neq", {2}));
  EXPECT_TRUE(matches("eq", {2}));
  EXPECT_TRUE(matches("gt", {1}));
  EXPECT_FALSE(matches("gt", {2}));
  EXPECT_TRUE(matches("ge", {2}));
  EXPECT_TRUE(matches("lt", {3}));
  EXPECT_TRUE(matches("le", {2}));
  EXPECT_TRUE(matches("in", {5, 2}));
  EXPECT_FALSE(matches("in", {}));
  EXPECT_FALSE(matches("not-in", {5, 2}));
  EXPECT_TRUE(matches("not-in", {}));
}

TEST(ValueFilterTest, Lists) {
  const std::vector<int64_t> actions = {3, 2};
  const auto matches = [&actions](const std::string& op, std::vector<int64_t> operands) {
    return FilterOf<int64_t>(op, std::move(operands)).MatchesList(actions);
  };
  EXPECT_TRUE(matches("any", {1, 2}));
  EXPECT_FALSE(matches("any", {1, 4}));
  EXPECT_TRUE(matches("all", {2, 3}));
  EXPECT_FALSE(matches("all", {2, 3, 4}));
  EXPECT_TRUE(matches("diff", {1, 4}));
  EXPECT_FALSE(matches("diff", {1, 2, 4}));
}

TEST(ValueFilterTest, Strings) {
  const auto matches = [](const std::string& op, std::vector<std::string> operands) {
    return FilterOf<std::string>(op, std::move(operands)).Matches("hello");
  };
  EXPECT_TRUE(matches("le", {"hello1"}));
  EXPECT_TRUE(matches("ge", {"hell"}));
  EXPECT_TRUE(matches("startswith", {"x", "he"}));
  EXPECT_FALSE(matches("startswith", {"hello!"}));
  EXPECT_TRUE(matches("endswith", {"llo"}));
  EXPECT_FALSE(matches("endswith", {"hel"}));
}

TEST(ValueFilterTest, RejectsBadOperands) {
  Comparison op;
  EXPECT_FALSE(ParseComparison("like", &op));
  EXPECT_NE(ValueFilter<int64_t>().Build(Comparison::kBetween, {1}), "");
  EXPECT_NE(ValueFilter<int64_t>().Build(Comparison::kGt, {}), "");
  EXPECT_NE(ValueFilter<double>().Build(Comparison::kStartsWith, {1}), "");
}

}  // namespace
}  // namespace data
}  // namespace monolith
