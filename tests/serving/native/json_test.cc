// The JSON reader of the model server takes what RFC 8259 allows and nothing else.
#include "monolith/serving/native/rest/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

namespace monolith {
namespace serving {
namespace {

Json Parsed(const std::string& text) {
  Json value;
  const Status status = ParseJson(text, &value);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message;
  return value;
}

TEST(JsonTest, KeepsAll64BitsOfIds) {
  const Json value = Parsed("[9223372036854775807, -9223372036854775808, 18446744073709551615]");

  ASSERT_EQ(value.items.size(), 3u);
  EXPECT_EQ(value.items[0].integer, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(value.items[1].integer, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(value.items[2].kind, Json::Kind::kUnsigned);
  EXPECT_EQ(value.items[2].unsigned_integer, std::numeric_limits<uint64_t>::max());
}

TEST(JsonTest, ReadsEveryKindOfValue) {
  const Json value =
      Parsed(R"( {"a": [null, true, false], "b": -1.5e2, "c": "x\n\u00e4\ud83d\ude00"} )");

  EXPECT_EQ(value.Find("a")->items[0].kind, Json::Kind::kNull);
  EXPECT_TRUE(value.Find("a")->items[1].boolean);
  EXPECT_FALSE(value.Find("a")->items[2].boolean);
  EXPECT_EQ(value.Find("b")->number, -150);
  EXPECT_EQ(value.Find("c")->text, "x\n\xc3\xa4\xf0\x9f\x98\x80");
  EXPECT_EQ(value.Find("d"), nullptr);
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1,]",
                           "{\"a\":}",
                           "{\"a\" 1}",
                           "{a: 1}",
                           "[1 2]",
                           "01",
                           "+1",
                           "1.",
                           ".5",
                           "1e",
                           "-",
                           "nul",
                           "truee",
                           "\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\n\"",
                           "\"\xff\"",
                           "\"\xed\xa0\x80\"",
                           "[1] 2",
                           "1e999",
                           "NaN",
                           "{\"a\":1,\"a\":2}"}) {
    Json value;
    EXPECT_EQ(ParseJson(text, &value).code, Code::kInvalidArgument) << text;
  }
  Json value;
  EXPECT_FALSE(ParseJson(std::string(100'000, '['), &value).ok());
}

TEST(JsonTest, NumbersReadBackAsTheSame) {
  std::mt19937 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    float number = 0;
    static_assert(sizeof(bits) == sizeof(number));
    memcpy(&number, &bits, sizeof(number));
    if (!std::isfinite(number)) continue;
    EXPECT_EQ(static_cast<float>(Parsed(JsonNumber(number)).number), number);
  }
  EXPECT_EQ(JsonNumber(0.1f), "0.1");
  EXPECT_EQ(JsonNumber(2.0), "2.0");
}

TEST(JsonTest, StringsReadBackAsTheSame) {
  for (const std::string& text : {std::string("a\"b\\c\x01\x7f/"), std::string("\xc3\xa4\0x", 4)}) {
    std::string quoted;
    AppendJsonString(text, &quoted);
    EXPECT_EQ(Parsed(quoted).text, text);
  }
  std::string quoted;
  AppendJsonString("\xff", &quoted);
  EXPECT_EQ(quoted, "\"\\ufffd\"");
}

TEST(JsonTest, Base64ThereAndBack) {
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    std::string decoded;
    ASSERT_TRUE(DecodeBase64(EncodeBase64(bytes), &decoded));
    EXPECT_EQ(decoded, bytes);
    bytes += static_cast<char>(i * 7);
  }
  for (const char* text : {"A", "AA", "AAA", "A===", "AA=A", "A A=", "====", "AAAA="}) {
    std::string decoded;
    EXPECT_FALSE(DecodeBase64(text, &decoded)) << text;
  }
}

TEST(JsonTest, SurvivesAnything) {
  const std::string valid =
      R"({"signature_name": "s", "instances": [[1, -2.5e3, "\u00e4"], {"b64": "AA=="}]})";
  std::mt19937 random(2);
  for (int i = 0; i < 50'000; ++i) {
    std::string text = valid;
    for (uint32_t changes = random() % 4 + 1; changes > 0; --changes) {
      const size_t place = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[place] = static_cast<char>(random());
          break;
        case 1:
          text.erase(place, random() % 8);
          break;
        default:
          text.insert(place, valid, random() % valid.size(), random() % 8);
      }
      if (text.empty()) text = "[";
    }
    Json value;
    const Status status = ParseJson(text, &value);
    EXPECT_TRUE(status.ok() || status.code == Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace serving
}  // namespace monolith
