#include "monolith/native_training/runtime/metrics/json_writer.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace monolith {
namespace metrics {
namespace {

using namespace std::string_literals;

TEST(JsonString, EscapesWhatJsonAsksFor) {
  EXPECT_EQ(JsonString("plain"), R"("plain")");
  EXPECT_EQ(JsonString("a\"b\\c"), R"("a\"b\\c")");
  EXPECT_EQ(JsonString("\n\t\x01\0"s), "\"\\u000a\\u0009\\u0001\\u0000\"");
}

TEST(JsonString, KeepsValidUtf8) {
  const std::string text = "\xC3\xA9 \xE4\xBD\xA0 \xF0\x9F\x98\x80";
  EXPECT_EQ(JsonString(text), "\"" + text + "\"");
}

TEST(JsonString, ReplacesInvalidUtf8) {
  const std::string replacement = "\xEF\xBF\xBD";
  // A lone byte, a truncated sequence, an overlong one, a surrogate, beyond the last code point.
  for (const char* bytes : {"\xFF", "\x80", "\xE4", "\xC3"}) {
    EXPECT_EQ(JsonString(bytes), "\"" + replacement + "\"");
  }
  EXPECT_EQ(JsonString("\xC0\xAF"), "\"" + replacement + replacement + "\"");
  EXPECT_EQ(JsonString("\xED\xA0\x80"), "\"" + replacement + replacement + replacement + "\"");
  EXPECT_EQ(JsonString("\xF4\x90\x80\x80").size(), 2 + 4 * replacement.size());
  EXPECT_EQ(JsonString("\xFFz"), "\"" + replacement + "z\"");
}

TEST(JsonNumber, IsTheShortestThatReadsBack) {
  EXPECT_EQ(JsonNumber(0.1f), "0.1");
  EXPECT_EQ(JsonNumber(1.0f), "1.0");
  EXPECT_EQ(JsonNumber(-0.0f), "-0.0");
  for (float value : {3.4e38f, 1e-37f, 16777216.0f, 0.3333333f}) {
    EXPECT_EQ(std::stof(JsonNumber(value)), value);
  }
}

TEST(JsonNumber, IsNullWhereJsonHasNoNumber) {
  EXPECT_EQ(JsonNumber(std::numeric_limits<float>::quiet_NaN()), "null");
  EXPECT_EQ(JsonNumber(std::numeric_limits<float>::infinity()), "null");
  EXPECT_EQ(JsonNumber(-std::numeric_limits<float>::infinity()), "null");
}

TEST(JsonObject, WritesMembersInOrder) {
  JsonObject inner;
  inner.AddFloat("p", 0.5f);
  JsonObject object;
  object.AddInt("uid", std::numeric_limits<int64_t>::min());
  object.AddString("name", "x");
  object.Add("predict", inner.Finish());
  EXPECT_EQ(object.Finish(),
            R"({"uid": -9223372036854775808, "name": "x", "predict": {"p": 0.5}})");
  EXPECT_EQ(JsonObject().Finish(), "{}");
}

}  // namespace
}  // namespace metrics
}  // namespace monolith
