#include "monolith/native_training/runtime/data/record_framing.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace data {
namespace {

HeaderFlags FlagsOf(int bits) {
  return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
}

std::string Length(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

TEST(RecordFramingTest, RoundTripsWithAllFlags) {
  for (int bits = 0; bits < 16; ++bits) {
    const HeaderFlags flags = FlagsOf(bits);
    std::string file;
    for (int size = 0; size < 16; ++size) {
      file += MakeRecordHeader(flags, "pc", size) + std::string(size, 'a' + size);
    }
    MemorySource source(file);
    RecordReader reader(&source, flags);
    std::string payload;
    uint32_t key;
    for (int size = 0; size < 16; ++size) {
      ASSERT_EQ(reader.Next(&payload, &key), ReadResult::kRecord) << bits;
      EXPECT_EQ(payload, std::string(size, 'a' + size));
      EXPECT_EQ(key, flags.lagrangex_header ? 914176u : 0u);
    }
    EXPECT_EQ(reader.Next(&payload, &key), ReadResult::kEnd);
    EXPECT_EQ(reader.offset(), static_cast<int64_t>(file.size()));
  }
}

TEST(RecordFramingTest, EveryCutIsTruncated) {
  for (int bits = 0; bits < 16; ++bits) {
    const HeaderFlags flags = FlagsOf(bits);
    const std::string file = MakeRecordHeader(flags, "", 3) + "xyz";
    for (size_t size = 1; size < file.size(); ++size) {
      const std::string cut = file.substr(0, size);
      MemorySource source(cut);
      RecordReader reader(&source, flags);
      std::string payload;
      uint32_t key;
      EXPECT_EQ(reader.Next(&payload, &key), ReadResult::kTruncated) << bits << " " << size;
    }
  }
}

TEST(RecordFramingTest, ReadsSortIds) {
  const std::string file = Length(2) + "ab" + Length(3) + "xyz";
  MemorySource source(file);
  HeaderFlags flags;
  flags.has_sort_id = true;
  RecordReader reader(&source, flags);
  std::string payload;
  uint32_t key;
  ASSERT_EQ(reader.Next(&payload, &key), ReadResult::kRecord);
  EXPECT_EQ(payload, "xyz");
}

TEST(RecordFramingTest, PrefixCanBeTheSizeOfTheSortId) {
  const std::string file = Length(2) + "ab" + Length(9) + Length(3) + "xyz";
  MemorySource source(file);
  HeaderFlags flags;
  flags.has_sort_id = flags.kafka_dump = flags.kafka_dump_prefix = true;
  RecordReader reader(&source, flags);
  std::string payload;
  uint32_t key;
  ASSERT_EQ(reader.Next(&payload, &key), ReadResult::kRecord);
  EXPECT_EQ(payload, "xyz");
}

TEST(RecordFramingTest, RejectsImpossibleLengths) {
  for (const auto& [length, want] :
       std::vector<std::pair<uint64_t, ReadResult>>{{0xfefefefe, ReadResult::kDeadBeef},
                                                    {uint64_t{1} << 60, ReadResult::kTooLarge},
                                                    {~uint64_t{0}, ReadResult::kTooLarge},
                                                    {uint64_t{1} << 30, ReadResult::kTruncated}}) {
    const std::string file = Length(length) + "abc";
    MemorySource source(file);
    RecordReader reader(&source, HeaderFlags());
    std::string payload;
    uint32_t key;
    EXPECT_EQ(reader.Next(&payload, &key), want);
    EXPECT_NE(reader.Explain(want), "");
  }
}

TEST(RecordFramingTest, DataSourceKeys) {
  EXPECT_EQ(JavaHash("datasource_inst"), -1487072768);
  EXPECT_EQ(DataSourceKey("datasource_inst"), 1561460736u);
  EXPECT_EQ(JavaHash("pc"), 3571);
  EXPECT_EQ(DataSourceKey("pc"), 914176u);
  EXPECT_EQ(JavaHash("mobile"), -1068855134);
  EXPECT_EQ(DataSourceKey("mobile"), 1250992640u);
  EXPECT_EQ(JavaHash("cloud"), 94756405);
  EXPECT_EQ(DataSourceKey("cloud"), 2782803200u);
  EXPECT_EQ(DataSourceKey(""), 0u);
  EXPECT_EQ(DataSourceKey("1"), 12544u);
  EXPECT_EQ(DataSourceKey("2"), 12800u);
  EXPECT_EQ(DataSourceKey("3"), 13056u);
  HeaderFlags flags;
  flags.lagrangex_header = true;
  EXPECT_EQ(MakeRecordHeader(flags, "pc", 0).substr(0, 8), std::string("\0\xf3\x0d\0\0\0\0\0", 8));
}

}  // namespace
}  // namespace data
}  // namespace monolith
