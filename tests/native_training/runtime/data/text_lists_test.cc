#include "monolith/native_training/runtime/data/text_lists.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace monolith {
namespace data {
namespace {

using Ints = std::vector<int64_t>;
using Tuples = std::vector<std::vector<std::string>>;

TEST(TextListsTest, ParsesIntegers) {
  int64_t number = 0;
  EXPECT_TRUE(ParseNumber(" -9223372036854775808\n", &number));
  EXPECT_EQ(number, std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(ParseNumber("+7", &number));
  EXPECT_EQ(number, 7);
  for (const char* bad : {"", " ", "+", "-", "+-1", "1 2", "1.0", "0x10", "9223372036854775808"}) {
    EXPECT_FALSE(ParseNumber(bad, &number)) << bad;
  }
}

TEST(TextListsTest, ParsesFloats) {
  float number = 0;
  EXPECT_TRUE(ParseNumber(" +1.5e-3 ", &number));
  EXPECT_EQ(number, 1.5e-3f);
  EXPECT_TRUE(ParseNumber("nan", &number));
  EXPECT_TRUE(std::isnan(number));
  for (const char* bad : {"", "1,5", "one", "1e", "1e999"}) {
    EXPECT_FALSE(ParseNumber(bad, &number)) << bad;
  }
}

TEST(TextListsTest, ParsesListsOfIntegers) {
  Ints numbers;
  EXPECT_TRUE(ParseInts("priority", "2, 3 ,,-4, ", &numbers).ok());
  EXPECT_EQ(numbers, (Ints{2, 3, -4}));
  numbers.clear();
  EXPECT_TRUE(ParseInts("priority", "", &numbers).ok());
  EXPECT_TRUE(numbers.empty());
  EXPECT_EQ(ParseInts("priority", "1,b,c", &numbers).message,
            "priority is '1,b,c', in which 'b' is not an integer");
}

TEST(TextListsTest, ParsesTuples) {
  Tuples tuples;
  EXPECT_TRUE(ParseTuples("conf", "a:b,,c::d,", 2, 3, &tuples).ok());
  EXPECT_EQ(tuples, (Tuples{{"a", "b"}, {"c", "", "d"}}));
  EXPECT_EQ(ParseTuples("conf", "a:b,c", 2, 3, &tuples).message,
            "conf is 'a:b,c', in which 'c' has 1 parts, want 2 to 3");
  EXPECT_EQ(ParseTuples("conf", "a:b:c:d", 2, 3, &tuples).message,
            "conf is 'a:b:c:d', in which 'a:b:c:d' has 4 parts, want 2 to 3");
}

}  // namespace
}  // namespace data
}  // namespace monolith
