// Bytes of checkpoint records, and what the parser makes of good and bad ones.
#include "monolith/native_training/runtime/hash_table/records/entry_codec.h"

#include <gtest/gtest.h>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

const char kSgdRecord[] = "09 0100000000000000 | 15 0000803f | 1a04 0a02 1200 | 20 00";
const char kAdagradRecord[] =
    "09 ffffffffffffffff 150000003f 15000000c0 1a0e0a0c0a0a 0dcdcccc3d 0d0000803e 20 80e2cfaa06";

std::unique_ptr<EmbeddingTable> AdagradTable(int64_t dim) {
  return MakeTable(MakeConfig({MakeSegment(dim, OptimizerKind::kAdagrad)}));
}

Status Load(EmbeddingTable* table, const std::string& record, LoadStats* stats) {
  return LoadAll(table, {record}, stats);
}

TEST(EntryCodecTest, WireBytesOfSgd) {
  const auto table = SgdTable(1);
  Assign(table.get(), {1}, {1});
  EXPECT_EQ(DumpRecords(*table), (std::vector<std::string>{FromHex(kSgdRecord)}));
}

TEST(EntryCodecTest, FramedRecord) {
  const auto table = SgdTable(1);
  Assign(table.get(), {1}, {1});
  std::string framed;
  int64_t count = 0;
  for (int shard = 0; shard < EmbeddingTable::NumShards(); ++shard) {
    ShardCursor cursor;
    while (!cursor.done) {
      ASSERT_TRUE(
          table->SaveShard(shard, nullptr, 100, true, &cursor, &framed, nullptr, &count).ok());
    }
  }
  EXPECT_EQ(count, 1);
  EXPECT_EQ(framed,
            FromHex("1600000000000000 4f61be28") + FromHex(kSgdRecord) + FromHex("b8cda29f"));
}

TEST(EntryCodecTest, AdagradRoundTrip) {
  const auto table = AdagradTable(2);
  LoadStats stats;
  ASSERT_TRUE(Load(table.get(), FromHex(kAdagradRecord), &stats).ok());
  EXPECT_EQ(stats.loaded, 1);
  EXPECT_EQ(stats.state_reset, 0);
  EXPECT_EQ(Lookup(*table, {-1}), (Floats{0.5f, -2.0f}));
  EXPECT_EQ(table->MaxUpdateTs(), 1700000000);
  EXPECT_EQ(DumpRecords(*table), (std::vector<std::string>{FromHex(kAdagradRecord)}));
}

TEST(EntryCodecTest, LookupEntryLeavesOutTheId) {
  const auto table = SgdTable(1);
  Assign(table.get(), {1}, {1});
  const Ids ids = {1, 2};
  std::vector<std::string> entries;
  ASSERT_TRUE(table->LookupEntries(ids.data(), 2, &entries).ok());
  EXPECT_EQ(entries, (std::vector<std::string>{FromHex(kSgdRecord).substr(9), ""}));
}

TEST(EntryCodecTest, MovingAverageHasNoDumpElement) {
  const auto table = MakeTable(MakeConfig(
      {MakeSegment(1, OptimizerKind::kMovingAverage), MakeSegment(1, OptimizerKind::kAdagrad)}));
  Assign(table.get(), {1}, {1, 1});
  const std::vector<std::string> records = DumpRecords(*table);
  EXPECT_EQ(records[0],
            FromHex("09 0100000000000000 15 0000803f 15 0000803f 1a09 0a07 0a05 0dcdcccc3d 20 00"));
  EXPECT_EQ(Restore(table.get(), records).state_reset, 0);
}

TEST(EntryCodecTest, VarintStateUsesTheGeneralWriter) {
  const auto table = MakeTable(MakeConfig({MakeSegment(1, OptimizerKind::kBatchSoftmax)}));
  Step step;
  step.rates = {0};
  step.global_step = 300;
  Optimize(table.get(), {1}, {0}, step);
  EXPECT_EQ(DumpRecords(*table)[0],
            FromHex("09 0100000000000000 15 00000000 1a07 0a05 7203 08ac02 20 00"));
}

TEST(EntryCodecTest, AcceptsAnyOrderPackedFloatsAndUnknownFields) {
  const auto table = AdagradTable(2);
  LoadStats stats;
  // ts, unknown varint 9, unknown fixed32 10, packed num, packed norm, id last.
  ASSERT_TRUE(Load(table.get(),
                   FromHex("20 05  48 07  55 01020304  12 08 0000003f 000000c0"
                           "1a0e 0a0c 0a0a 0a08 cdcccc3d 0000803e  09 ffffffffffffffff"),
                   &stats)
                  .ok());
  EXPECT_EQ(stats.state_reset, 0);
  EXPECT_EQ(DumpRecords(*table)[0],
            FromHex("09 ffffffffffffffff 150000003f 15000000c0 1a0e0a0c0a0a 0dcdcccc3d 0d0000803e "
                    "20 05"));
}

TEST(EntryCodecTest, OfAScalarThatComesTwiceTheLastOneCounts) {
  LoadStats stats;
  // Group Adagrad keeps one float per segment, whatever its dimension.
  for (const int64_t dim : {1, 2}) {
    const auto table = MakeTable(MakeConfig({MakeSegment(dim, OptimizerKind::kGroupAdagrad)}));
    const std::string values = dim == 1 ? "15 0000803f" : "15 0000803f 15 0000803f";
    ASSERT_TRUE(
        Load(table.get(),
             FromHex("09 0100000000000000" + values + "1a0e 0a0c 7a0a 0d 0000803e 0d 00000040"),
             &stats)
            .ok());
    EXPECT_EQ(stats.state_reset, 0) << dim;
    EXPECT_NE(DumpRecords(*table)[0].find(FromHex("7a05 0d 00000040")), std::string::npos) << dim;
  }
}

TEST(EntryCodecTest, MissingTimestampIsZero) {
  const auto table = SgdTable(1);
  LoadStats stats;
  ASSERT_TRUE(Load(table.get(), FromHex("09 0100000000000000 15 0000803f"), &stats).ok());
  EXPECT_EQ(DumpRecords(*table)[0], FromHex(kSgdRecord));
}

TEST(EntryCodecTest, WrongDimensionNamesIdAndDims) {
  for (const int64_t dim : {1, 3}) {
    const auto table = AdagradTable(dim);
    LoadStats stats;
    const Status status = Load(table.get(), FromHex(kAdagradRecord), &stats);
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    EXPECT_NE(status.message.find("id -1 has 2 values"), std::string::npos) << status.message;
    EXPECT_NE(status.message.find("dim " + std::to_string(dim)), std::string::npos);
  }
}

TEST(EntryCodecTest, ForeignOrShortStateIsReset) {
  LoadStats stats;
  const auto adam = MakeTable(MakeConfig({MakeSegment(2, OptimizerKind::kAdam)}));
  ASSERT_TRUE(Load(adam.get(), FromHex(kAdagradRecord), &stats).ok());
  EXPECT_EQ(stats.state_reset, 1);
  EXPECT_EQ(Lookup(*adam, {-1}), (Floats{0.5f, -2.0f}));

  const auto adagrad = AdagradTable(2);
  // norm has one element of two, then no opt at all
  ASSERT_TRUE(Load(adagrad.get(),
                   FromHex("09 0100000000000000 150000003f 15000000c0 1a090a070a05 0dcdcccc3d"),
                   &stats)
                  .ok());
  ASSERT_TRUE(
      Load(adagrad.get(), FromHex("09 0200000000000000 150000003f 15000000c0"), &stats).ok());
  EXPECT_EQ(stats.state_reset, 3);
  for (const std::string& record : DumpRecords(*adagrad)) {
    EXPECT_NE(record.find(FromHex("0dcdcccc3d0dcdcccc3d")), std::string::npos) << "initial 0.1";
  }
}

TEST(EntryCodecTest, EveryTruncationIsAnErrorOrAWholeRecord) {
  const std::string record = FromHex(kAdagradRecord);
  for (size_t size = 0; size < record.size(); ++size) {
    const auto table = AdagradTable(2);
    LoadStats stats;
    const Status status = Load(table.get(), record.substr(0, size), &stats);
    // A cut between two fields leaves a shorter message, which may be valid.
    EXPECT_TRUE(!status.ok() || size == 19 || size == 35) << size;
  }
}

// An unknown field at the end sends a record through the general parser.
TEST(EntryCodecTest, BothParsersAgreeOnEveryChangedByte) {
  std::string record = FromHex(kAdagradRecord);
  const std::string unknown_field = FromHex("7800");
  for (size_t i = 0; i < record.size(); ++i) {
    for (const char flip : {'\x01', '\x08', '\x80'}) {
      record[i] ^= flip;
      const auto fast = AdagradTable(2), general = AdagradTable(2);
      LoadStats fast_stats, general_stats;
      const Status fast_status = Load(fast.get(), record, &fast_stats);
      const Status general_status = Load(general.get(), record + unknown_field, &general_stats);
      // A timestamp without its last byte swallows what follows.
      const bool swallows = i + 1 == record.size() && flip == '\x80';
      if (!swallows) {
        EXPECT_EQ(fast_status.message, general_status.message) << i;
        EXPECT_EQ(DumpRecords(*fast), DumpRecords(*general)) << i;
        EXPECT_EQ(fast_stats.state_reset, general_stats.state_reset) << i;
      }
      record[i] ^= flip;
    }
  }
}

TEST(EntryCodecTest, RandomBytesNeverCrash) {
  const auto table = MakeTable(MakeConfig(
      {MakeSegment(2, OptimizerKind::kAdam), MakeSegment(1, OptimizerKind::kBatchSoftmax)}));
  uint64_t state = 1;
  const std::string good = FromHex(kAdagradRecord);
  for (int round = 0; round < 20000; ++round) {
    std::string record = good;
    for (int flips = 0; flips < 4; ++flips) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      record[(state >> 33) % record.size()] = static_cast<char>(state >> 56);
    }
    LoadStats stats;
    const Status status = Load(table.get(), record, &stats);
    EXPECT_EQ(status.ok(), status.message.empty());
  }
}

TEST(Crc32cTest, KnownValuesAndPortableAgree) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32cPortable("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c("", 0), 0u);
  std::string text;
  for (int i = 0; i < 300; ++i) {
    text.push_back(static_cast<char>(i * 37));
    EXPECT_EQ(Crc32c(text.data(), text.size()), Crc32cPortable(text.data(), text.size())) << i;
  }
}

// Long data are read as several streams.
TEST(Crc32cTest, LongDataAndPiecesOfItAgree) {
  std::string text;
  for (int64_t i = 0; i < 20000; ++i) text.push_back(static_cast<char>(i * i * 37 >> 5));
  for (const int64_t size : {3071, 3072, 3073, 6143, 6151, 9216, 19990}) {
    const char* const data = text.data() + size % 10;
    const uint32_t want = Crc32cPortable(data, size);
    EXPECT_EQ(Crc32c(data, size), want) << size;
    EXPECT_EQ(Crc32c(data + 5, size - 5, Crc32c(data, 5)), want) << size;
  }
}

TEST(Crc32cTest, ReadsWhatItWrote) {
  std::string buffer;
  AppendRecord("hello", 5, &buffer);
  AppendRecord("", 0, &buffer);
  const char* data = nullptr;
  int64_t size = 0, consumed = 0;
  ASSERT_EQ(ReadRecord(buffer.data(), buffer.size(), &data, &size, &consumed),
            RecordResult::kRecord);
  EXPECT_EQ(std::string(data, size), "hello");
  EXPECT_EQ(ReadRecord(buffer.data() + consumed, buffer.size() - consumed, &data, &size, &consumed),
            RecordResult::kRecord);
  EXPECT_EQ(size, 0);
  for (int64_t cut = 0; cut < 21; ++cut) {
    EXPECT_EQ(ReadRecord(buffer.data(), cut, &data, &size, &consumed), RecordResult::kIncomplete);
  }
  for (size_t i = 0; i < 21; ++i) {
    std::string bad = buffer.substr(0, 21);
    bad[i] = static_cast<char>(bad[i] ^ 1);
    EXPECT_EQ(ReadRecord(bad.data(), 21, &data, &size, &consumed), RecordResult::kCorrupt) << i;
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
