#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "monolith/native_training/runtime/kafka/kafka_reader.h"

namespace monolith {
namespace kafka {
namespace {

TEST(KafkaSource, TakesTheLastOfEqualKeys) {
  KafkaSource source;
  const KafkaError error =
      ParseSource({"t", "u"},
                  {"conf.topic.x=1", " y = a=b ", "y=4", "group.id=g", "bootstrap.servers=a:1,b:2",
                   "empty=", "batch.num.messages=5"},
                  &source);
  EXPECT_FALSE(error) << error.text;
  EXPECT_EQ(source.batch_size, 5);
  const std::map<std::string, std::string> want = {{"bootstrap.servers", "a:1,b:2"},
                                                   {"empty", ""},
                                                   {"enable.partition.eof", "true"},
                                                   {"group.id", "g"},
                                                   {"x", "1"},
                                                   {"y", "4"}};
  EXPECT_EQ(source.settings, want);
  EXPECT_EQ(source.Describe(), "topics t,u, group g, servers a:1,b:2");
}

TEST(KafkaSource, ValuesMayContainEqualSigns) {
  KafkaSource source;
  EXPECT_FALSE(ParseSource({"t"}, {"k= a=b= "}, &source));
  EXPECT_EQ(source.settings["k"], "a=b=");
  EXPECT_EQ(source.batch_size, 1024);
}

TEST(KafkaSource, RefusesWhatIsNoSetting) {
  KafkaSource source;
  EXPECT_EQ(ParseSource({}, {}, &source).text, "topics is empty, want at least one topic");
  for (const std::string entry : {"", "a", "=b", "  = b"}) {
    const KafkaError error = ParseSource({"t"}, {entry}, &source);
    EXPECT_EQ(error.code, KafkaErrorCode::kBadArgument);
    EXPECT_EQ(error.text, "Kafka metadata has '" + entry + "', want key=value");
  }
  for (const std::string size : {"0", "-1", "", "many", "1x", "99999999999999999999"}) {
    const KafkaError error = ParseSource({"t"}, {"batch.num.messages=" + size}, &source);
    EXPECT_EQ(error.text, "batch.num.messages is " + size + ", want at least 1");
  }
}

TEST(KafkaTimeouts, StreamIsAtLeastAPoll) {
  for (const auto& [poll, stream, want] : {std::tuple<int64_t, int64_t, int64_t>(10000, -1, -1),
                                           {10000, 0, 10000},
                                           {10000, 25000, 25000},
                                           {1, INT64_MAX, INT64_MAX}}) {
    int64_t timeout = stream;
    EXPECT_FALSE(CheckTimeouts(poll, &timeout));
    EXPECT_EQ(timeout, want);
  }
  int64_t timeout = 1;
  EXPECT_TRUE(CheckTimeouts(0, &timeout));
  EXPECT_TRUE(CheckTimeouts(INT64_MAX, &timeout));
  timeout = -2;
  EXPECT_EQ(CheckTimeouts(1, &timeout).text,
            "stream_timeout is -2, want -1 (endless) or milliseconds of silence");
}

}  // namespace
}  // namespace kafka
}  // namespace monolith
