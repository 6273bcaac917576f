// The JSON reader of the model server takes what RFC 8259 allows and nothing else.
#include "monolith/serving/native/rest/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>

#include "monolith/serving/native/rest/json_reader.h"

namespace monolith {
namespace serving {
namespace {

// Writes down what it is told, and ends the reading at the string "stop".
class Recorder : public JsonVisitor {
 public:
  bool Null() override { return Add("null"); }
  bool Boolean(bool value) override { return Add(value ? "true" : "false"); }
  bool Number(std::string_view text) override { return Add(std::string(text)); }
  bool String(std::string_view text) override {
    return Add("'" + std::string(text) + "'") && text != "stop";
  }
  bool StartObject() override { return Add("{"); }
  bool Key(std::string_view text) override { return Add(std::string(text) + ":"); }
  bool EndObject() override { return Add("}"); }
  bool StartArray() override { return Add("["); }
  bool EndArray() override { return Add("]"); }
  Status error() const override { return Status(Code::kNotFound, "stopped"); }

  std::string text;

 private:
  bool Add(const std::string& piece) {
    text += piece + " ";
    return true;
  }
};

std::string Read(const std::string& text) {
  Recorder recorder;
  const Status status = VisitJson(text, &recorder);
  EXPECT_TRUE(status.ok()) << text << ": " << status.message;
  return recorder.text;
}

JsonNumberValue NumberOf(const std::string& text) {
  JsonNumberValue value;
  EXPECT_TRUE(ReadJsonNumber(text, &value)) << text;
  return value;
}

TEST(JsonTest, KeepsAll64BitsOfIds) {
  EXPECT_EQ(NumberOf("9223372036854775807").integer, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(NumberOf("-9223372036854775808").integer, std::numeric_limits<int64_t>::min());
  const JsonNumberValue largest = NumberOf("18446744073709551615");
  EXPECT_EQ(largest.kind, JsonNumberValue::Kind::kUnsigned);
  EXPECT_EQ(largest.unsigned_integer, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(NumberOf("18446744073709551616").kind, JsonNumberValue::Kind::kFloat);
  EXPECT_EQ(NumberOf("-1.5e2").number, -150);
  EXPECT_EQ(NumberOf("1e-999").number, 0);
  JsonNumberValue value;
  EXPECT_FALSE(ReadJsonNumber("1e999", &value));
}

TEST(JsonTest, ReadsEveryKindOfValue) {
  EXPECT_EQ(Read(R"( {"a": [null, true, false], "b": -1.5e2, "c": "x\u00e4\ud83d\ude00"} )"),
            "{ a: [ null true false ] b: -1.5e2 c: 'x\xc3\xa4\xf0\x9f\x98\x80' } ");
}

TEST(JsonTest, AVisitorMayEndTheReading) {
  Recorder recorder;

  EXPECT_EQ(VisitJson(R"(["stop", 1])", &recorder).code, Code::kNotFound);

  EXPECT_EQ(recorder.text, "[ 'stop' ");
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
                           "NaN"}) {
    Recorder recorder;
    EXPECT_EQ(VisitJson(text, &recorder).code, Code::kInvalidArgument) << text;
  }
  Recorder recorder;
  EXPECT_FALSE(VisitJson(std::string(100'000, '['), &recorder).ok());
  EXPECT_FALSE(VisitJson(std::string("1\0", 2), &recorder).ok());
}

TEST(JsonTest, NumbersReadBackAsTheSame) {
  std::mt19937 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    float number = 0;
    static_assert(sizeof(bits) == sizeof(number));
    memcpy(&number, &bits, sizeof(number));
    if (!std::isfinite(number)) continue;
    EXPECT_EQ(static_cast<float>(NumberOf(JsonNumber(number)).number), number);
  }
  EXPECT_EQ(JsonNumber(0.1f), "0.1");
  EXPECT_EQ(JsonNumber(2.0), "2.0");
}

TEST(JsonTest, StringsReadBackAsTheSame) {
  for (const std::string& text : {std::string("a\"b\\c\x01\x7f/"), std::string("\xc3\xa4\0x", 4)}) {
    std::string quoted;
    AppendJsonString(text, &quoted);
    EXPECT_EQ(Read(quoted), "'" + text + "' ");
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
    Recorder recorder;
    const Status status = VisitJson(text, &recorder);
    EXPECT_TRUE(status.ok() || status.code == Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace serving
}  // namespace monolith
