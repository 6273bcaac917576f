// Both sides of the row log: BatchBuilder writes what BatchFollower applies, through row_batch.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/row_log/batch_builder.h"
#include "monolith/native_training/runtime/row_log/batch_follower.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

using Outcome = BatchFollower::Outcome;
using Messages = std::vector<std::string>;

TableConfig ServingConfig(TableConfig config) {
  config.entry.type = EntryType::kServing;
  return config;
}

// A training table and the log that it writes.
class Writer {
 public:
  explicit Writer(const TableConfig& config, int64_t capacity = BatchBuilder::kDefaultCapacity)
      : builder(capacity), table(MakeTable(config)) {
    table->SetTouchedCallback(
        [this](const int64_t* ids, int64_t n) { builder.Touch(table.get(), ids, n); });
    table->SetErasedCallback(
        [this](const int64_t* ids, int64_t n) { builder.Touch(table.get(), ids, n); });
    table->SetReplacedCallback([this] { builder.RequestScan(kScanReplaced); });
    builder.Attach("t", table.get());
    options.keep_hashes = options.digest = true;
  }

  void Train(const Ids& ids, float gradient = 1.0f, int64_t time = 100) {
    const Floats gradients(ids.size() * table->dim(), gradient);
    OptimizeOptions options;
    const float rate = 0.1f;
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    options.write.req_time = time;
    const Status status =
        table->Optimize({ids.data(), static_cast<int64_t>(ids.size()), gradients.data()}, options);
    ASSERT_TRUE(status.ok()) << status.message;
  }

  Messages Build() {
    BatchHeader header;
    header.model = "m";
    header.num_shards = 1;
    header.epoch = epoch;
    header.prev_seq = seq;
    header.seq = ++seq;
    header.sample_positions = {{0, 7}, {3, -1}};
    Messages all, some;
    Status status = builder.Begin(header, options, &counts);
    EXPECT_TRUE(status.ok()) << status.message;
    int64_t num_rows = 0, num_deleted = 0;
    do {
      status = builder.Take(1, &some, &num_rows, &num_deleted);
      EXPECT_TRUE(status.ok()) << status.message;
      all.insert(all.end(), some.begin(), some.end());
    } while (!some.empty());
    EXPECT_EQ(static_cast<int64_t>(all.size()), counts.num_chunks);
    for (const std::string& message : all) {
      EXPECT_LE(static_cast<int64_t>(message.size()), kMaxMessageBytes);
    }
    return all;
  }

  BatchBuilder builder;
  std::unique_ptr<EmbeddingTable> table;
  BatchBuilder::Options options;
  BatchBuilder::Counts counts;
  int64_t epoch = 1;
  int64_t seq = 0;
};

// A serving table that follows.
class Reader {
 public:
  explicit Reader(const TableConfig& config) : table(MakeTable(config)) {}

  Outcome Apply(const std::string& message) {
    Outcome outcome = Outcome::kOld;
    const Status status = follower.Apply({{"t", table.get()}}, message.data(),
                                         static_cast<int64_t>(message.size()), &outcome);
    EXPECT_TRUE(status.ok()) << status.message;
    return outcome;
  }
  void ApplyAll(const Messages& messages) {
    for (const std::string& message : messages) Apply(message);
  }
  Status TryApply(const std::string& message) {
    Outcome outcome;
    return follower.Apply({{"t", table.get()}}, message.data(),
                          static_cast<int64_t>(message.size()), &outcome);
  }

  std::unique_ptr<EmbeddingTable> table;
  BatchFollower follower;
};

TableConfig Sgd(int64_t dim) { return MakeConfig({MakeSegment(dim, OptimizerKind::kSgd)}); }

Ids Range(int64_t begin, int64_t end) {
  Ids ids;
  for (int64_t id = begin; id < end; ++id) ids.push_back(id);
  return ids;
}

void ExpectEqual(const Writer& writer, const Reader& reader) {
  EXPECT_EQ(DigestOf(*writer.table), DigestOf(*reader.table));
  EXPECT_EQ(DigestOf(*reader.table), reader.follower.Digests().at("t"));
  EXPECT_EQ(reader.follower.GetState().digest_ok, 1);
}

TEST(RowLogTest, RowsReachServingBitByBit) {
  Writer writer(Sgd(5));
  Reader reader(ServingConfig(Sgd(5)));
  writer.Train(Range(-50, 1000));

  reader.ApplyAll(writer.Build());
  ExpectEqual(writer, reader);
  EXPECT_TRUE(writer.counts.full_scan) << "a new log begins with all rows";
  writer.Train({3, 5000, std::numeric_limits<int64_t>::min()}, 0.5f, 200);
  reader.ApplyAll(writer.Build());

  ExpectEqual(writer, reader);
  EXPECT_FALSE(writer.counts.full_scan);
  EXPECT_EQ(writer.counts.num_ids, 3);
  const FollowerState state = reader.follower.GetState();
  EXPECT_EQ(state.seq, 2);
  EXPECT_EQ(state.newest_event_time, 200);
  EXPECT_EQ(state.rows, 1053);
  EXPECT_EQ(state.gaps, 0);
}

TEST(RowLogTest, ErasedAndEvictedRowsGo) {
  TableConfig config = Sgd(2);
  config.expiry.default_days = 1;
  Writer writer(config);
  Reader reader(ServingConfig(Sgd(2)));
  writer.Train(Range(0, 100), 1.0f, 1000);
  writer.Train(Range(100, 200), 1.0f, 1000 + 3 * 24 * 3600);
  reader.ApplyAll(writer.Build());
  ASSERT_EQ(reader.table->Size(), 200);

  const int64_t erased = 150;
  writer.table->Erase(&erased, 1);
  ASSERT_EQ(writer.table->Evict(writer.table->expiry()), 100);
  reader.ApplyAll(writer.Build());

  ExpectEqual(writer, reader);
  EXPECT_FALSE(writer.counts.full_scan);
  EXPECT_EQ(reader.table->Size(), 99);
  EXPECT_EQ(reader.follower.GetState().deleted, 101);
}

TEST(RowLogTest, AnOverflowMakesAScanThatAlsoRemoves) {
  Writer writer(Sgd(2), /*capacity=*/10);
  Reader reader(ServingConfig(Sgd(2)));
  writer.Train(Range(0, 8));
  reader.ApplyAll(writer.Build());
  Assign(reader.table.get(), {12345}, {1, 1});  // nobody knows how it came there
  reader.follower.Seek({{"t", reader.table.get()}}, 1, 1);

  const Ids gone = {1, 2};
  writer.table->Erase(gone.data(), 2);
  writer.Train(Range(100, 200));
  reader.ApplyAll(writer.Build());

  EXPECT_TRUE(writer.counts.full_scan);
  ExpectEqual(writer, reader);
  EXPECT_EQ(reader.table->Size(), 106);
  reader.ApplyAll(writer.Build());
  EXPECT_FALSE(writer.counts.full_scan) << "one scan is enough";
  ExpectEqual(writer, reader);
}

TEST(RowLogTest, ReplacedContentMakesAScan) {
  Writer writer(Sgd(2));
  Reader reader(ServingConfig(Sgd(2)));
  writer.Train(Range(0, 8));
  reader.ApplyAll(writer.Build());

  writer.table->Clear();
  reader.ApplyAll(writer.Build());

  EXPECT_EQ(reader.table->Size(), 0);
  ExpectEqual(writer, reader);
}

TEST(RowLogTest, AfterARestoreIdsOfTheLogGetTheirRestoredValues) {
  Writer writer(Sgd(2));
  Reader reader(ServingConfig(Sgd(2)));
  writer.Train(Range(0, 100));
  reader.ApplyAll(writer.Build());
  std::unique_ptr<EmbeddingTable> checkpoint = MakeTable(Sgd(2));
  Assign(checkpoint.get(), Range(0, 100), Lookup(*writer.table, Range(0, 100)));
  writer.Train(Range(90, 110));
  const Messages lost = writer.Build();
  reader.ApplyAll(lost);

  Writer restored(Sgd(2));
  restored.epoch = 2;
  restored.table->SwapContent(checkpoint.get());
  const int64_t generation = restored.builder.GetInfo().scan_generation;
  for (const std::string& message : lost) {
    BatchView view;
    ASSERT_TRUE(ParseMessage(message.data(), static_cast<int64_t>(message.size()), &view).ok());
    restored.builder.TouchMessage(view);
  }
  restored.builder.ForgetReplaced(generation);
  reader.ApplyAll(restored.Build());

  EXPECT_FALSE(restored.counts.full_scan);
  EXPECT_EQ(restored.counts.num_ids, 20);
  EXPECT_EQ(DigestOf(*restored.table), DigestOf(*reader.table));
  EXPECT_EQ(reader.follower.GetState().deleted, 10);
  // No digest yet: rows may have been under way while all were hashed. The next batch has one.
  EXPECT_EQ(reader.follower.GetState().digest_seq, 2);
  EXPECT_EQ(reader.follower.GetState().epoch, 2);
  reader.ApplyAll(restored.Build());
  ExpectEqual(restored, reader);
}

TEST(RowLogTest, AReplacementThatCameAfterwardsIsNotForgotten) {
  Writer writer(Sgd(2));
  const int64_t generation = writer.builder.GetInfo().scan_generation;
  writer.table->Clear();

  writer.builder.ForgetReplaced(generation);

  EXPECT_EQ(writer.builder.GetInfo().scan_reasons, static_cast<uint32_t>(kScanReplaced));
}

TEST(RowLogTest, AScanInTheLogAsksForAScan) {
  Writer writer(Sgd(2));
  writer.Train({1});
  const Messages scan = writer.Build();
  ASSERT_EQ(writer.builder.GetInfo().scan_reasons, static_cast<uint32_t>(kScanNone));
  BatchView view;
  ASSERT_TRUE(ParseMessage(scan[0].data(), static_cast<int64_t>(scan[0].size()), &view).ok());

  writer.builder.TouchMessage(view);

  EXPECT_EQ(writer.builder.GetInfo().scan_reasons, static_cast<uint32_t>(kScanOverflow));
}

// 100,000 rows of 16 floats are nine chunks.
class ChunksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    writer_.Train(Range(0, 100000));
    messages_ = writer_.Build();
    ASSERT_GE(messages_.size(), 8u);
  }

  Writer writer_{Sgd(16)};
  Reader reader_{ServingConfig(Sgd(16))};
  Messages messages_;
};

TEST_F(ChunksTest, ATornBatchChangesNothing) {
  writer_.Train(Range(0, 100000), 0.5f);
  const Messages changes = writer_.Build();
  ASSERT_FALSE(writer_.counts.full_scan);
  const std::vector<Messages> torn = {{changes.begin(), changes.end() - 1},
                                      {changes.begin() + 1, changes.end()}};
  for (const Messages& part : torn) {
    Reader reader(ServingConfig(Sgd(16)));
    reader.ApplyAll(messages_);
    const TableDigest digest = DigestOf(*reader.table);
    for (const std::string& message : part) EXPECT_EQ(reader.Apply(message), Outcome::kWaiting);
    EXPECT_EQ(DigestOf(*reader.table), digest);
    EXPECT_EQ(reader.follower.GetState().seq, 1);
    EXPECT_GT(reader.follower.GetState().waiting_chunks, 0);

    // Its writer is gone, another one begins.
    Writer next(Sgd(16));
    next.epoch = 2;
    next.Train({1});
    reader.ApplyAll(next.Build());

    EXPECT_EQ(reader.table->Size(), 1);
    EXPECT_EQ(reader.follower.GetState().torn, 1);
    ExpectEqual(next, reader);
  }
}

TEST_F(ChunksTest, AScanIsAppliedAsItComesAndRemovesAtItsEnd) {
  Assign(reader_.table.get(), {-1}, Floats(16, 1.0f));  // the scan does not name it
  int64_t rows = 0;
  for (size_t i = 0; i + 1 < messages_.size(); ++i) {
    EXPECT_EQ(reader_.Apply(messages_[i]), Outcome::kWaiting);
    EXPECT_GT(reader_.table->Size(), rows) << "chunks do not wait for one another";
    rows = reader_.table->Size();
    const FollowerState state = reader_.follower.GetState();
    EXPECT_EQ(state.waiting_chunks, static_cast<int64_t>(i + 1));
    EXPECT_EQ(state.seq, 0);
    EXPECT_EQ(state.digest_ok, -1) << "compared at the end only";
    const int64_t id = -1;
    uint8_t found = 0;
    reader_.table->Contains(&id, 1, &found);
    EXPECT_EQ(found, 1);
  }

  EXPECT_EQ(reader_.Apply(messages_.back()), Outcome::kApplied);

  EXPECT_EQ(reader_.table->Size(), 100000);
  ExpectEqual(writer_, reader_);
}

TEST_F(ChunksTest, AfterATornScanTheNextOneBringsAllRows) {
  for (size_t i = 0; i + 1 < messages_.size(); ++i) reader_.Apply(messages_[i]);
  EXPECT_EQ(reader_.follower.Digests().at("t"), DigestOf(*reader_.table));

  Writer next(Sgd(16));
  next.epoch = 2;
  next.Train(Range(50000, 50010), 0.25f);
  reader_.ApplyAll(next.Build());

  EXPECT_EQ(reader_.follower.GetState().torn, 1);
  EXPECT_EQ(reader_.table->Size(), 10);
  ExpectEqual(next, reader_);
  EXPECT_EQ(reader_.Apply(messages_.back()), Outcome::kOld);
}

TEST_F(ChunksTest, OrderAndRepetitionDoNotMatter) {
  Messages shuffled = messages_;
  shuffled.insert(shuffled.end(), messages_.begin(), messages_.end() - 1);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(7));

  reader_.ApplyAll(shuffled);

  ExpectEqual(writer_, reader_);
  EXPECT_EQ(reader_.follower.GetState().batches, 1);
  EXPECT_EQ(reader_.follower.GetState().rows, 100000);
}

TEST_F(ChunksTest, OldBatchesAreSkipped) {
  reader_.ApplyAll(messages_);
  writer_.Train(Range(0, 10));
  const Messages newer = writer_.Build();
  reader_.ApplyAll(newer);
  const TableDigest digest = DigestOf(*reader_.table);

  for (const std::string& message : messages_) EXPECT_EQ(reader_.Apply(message), Outcome::kOld);
  for (const std::string& message : newer) EXPECT_EQ(reader_.Apply(message), Outcome::kOld);

  EXPECT_EQ(DigestOf(*reader_.table), digest);
  // A writer that was replaced and does not know it.
  Writer next(Sgd(16));
  next.epoch = 2;
  reader_.ApplyAll(next.Build());
  writer_.Train({77});
  EXPECT_EQ(reader_.Apply(writer_.Build()[0]), Outcome::kOld);
  ExpectEqual(next, reader_);
}

TEST_F(ChunksTest, AMissingBatchIsCountedAndSeenInTheDigest) {
  reader_.ApplyAll(messages_);
  writer_.Train({1});
  writer_.Build();  // lost
  writer_.Train({2});

  reader_.ApplyAll(writer_.Build());

  EXPECT_EQ(reader_.follower.GetState().gaps, 1);
  EXPECT_EQ(reader_.follower.GetState().digest_ok, 0);
  writer_.options.full_scan = true;
  reader_.ApplyAll(writer_.Build());
  ExpectEqual(writer_, reader_);
}

TEST_F(ChunksTest, EveryFlippedByteIsNoticed) {
  const Messages small = [] {
    Writer writer(Sgd(2));
    writer.Train({1, 2, 3});
    return writer.Build();
  }();
  Reader reader(ServingConfig(Sgd(2)));
  for (size_t i = 0; i < small[0].size(); ++i) {
    std::string bad = small[0];
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    EXPECT_EQ(reader.TryApply(bad).code, StatusCode::kDataLoss);
    EXPECT_EQ(reader.TryApply(small[0].substr(0, i)).code, StatusCode::kDataLoss);
  }
  EXPECT_EQ(reader.table->Size(), 0);
}

TEST_F(ChunksTest, AnAbandonedBatchIsFollowedByAScan) {
  writer_.Train(Range(0, 50000));
  BatchBuilder::Counts counts;
  BatchHeader header;
  header.epoch = 1;
  header.seq = 2;
  ASSERT_TRUE(writer_.builder.Begin(header, writer_.options, &counts).ok());
  EXPECT_EQ(writer_.builder.Begin(header, writer_.options, &counts).code,
            StatusCode::kFailedPrecondition);
  writer_.builder.Abandon();

  reader_.ApplyAll(writer_.Build());

  EXPECT_TRUE(writer_.counts.full_scan);
  ExpectEqual(writer_, reader_);
}

TEST(RowLogTest, HostileMessagesAreErrors) {
  Writer writer(Sgd(3));
  writer.Train(Range(0, 20));
  const std::string good = writer.Build()[0];
  std::mt19937 random(1);
  Reader reader(ServingConfig(Sgd(3)));
  int64_t refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bad = good;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int c = 0; c < changes; ++c) {
      bad[4 + random() % (bad.size() - 4)] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bad.resize(4 + random() % (bad.size() - 4));
    SealMessage(&bad);  // the writer itself is hostile
    refused += !reader.TryApply(bad).ok();
  }
  EXPECT_GT(refused, 1000);
}

TEST(RowLogTest, WrongNumbersAndSizesAreNamed) {
  const auto message_of = [](const BatchHeader& header, int64_t dim, const std::string& rows) {
    std::string message(kMessageCrcBytes, '\0');
    AppendHeader(header, &message);
    AppendTable("t", dim, std::string(16, '\1'), rows, false, "", &message);
    SealMessage(&message);
    return message;
  };
  Reader reader(ServingConfig(Sgd(2)));
  BatchHeader header;
  header.epoch = header.seq = header.num_chunks = 1;
  EXPECT_NE(reader.TryApply(message_of(header, 2, "abc")).message.find("3 bytes of rows"),
            std::string::npos);
  EXPECT_NE(reader.TryApply(message_of(header, 3, std::string(24, 'a'))).message.find("dim 3"),
            std::string::npos);
  EXPECT_NE(reader.TryApply(message_of(header, -1, "")).message.find("dim -1"), std::string::npos);
  header.chunk = 1;
  EXPECT_NE(
      reader.TryApply(message_of(header, 2, std::string(16, 'a'))).message.find("chunk 1 of 1"),
      std::string::npos);
  header.chunk = 0;
  header.num_chunks = 2;
  EXPECT_TRUE(reader.TryApply(message_of(header, 2, std::string(16, 'a'))).ok());
  header.chunk = 1;
  header.num_chunks = 3;
  EXPECT_NE(reader.TryApply(message_of(header, 2, std::string(16, 'a'))).message.find("two chunks"),
            std::string::npos);
  EXPECT_EQ(reader.table->Size(), 0);
}

TEST(RowLogTest, LossyServingTablesAgreeToo) {
  for (const CompressorKind kind :
       {CompressorKind::kFp16, CompressorKind::kFixedR8, CompressorKind::kOneBit}) {
    TableConfig config = Sgd(6);
    config.entry.segments[0].compressor.kind = kind;
    Writer writer(config);
    Reader reader(ServingConfig(config));
    writer.Train(Range(0, 100), 0.123f);
    reader.ApplyAll(writer.Build());
    writer.Train(Range(50, 150), 0.456f);
    reader.ApplyAll(writer.Build());

    EXPECT_EQ(reader.follower.GetState().digest_ok, 1);
    EXPECT_EQ(DigestOf(*reader.table), reader.follower.Digests().at("t"));
  }
}

TEST(RowLogTest, HalfPrecisionIsHalfTheBytes) {
  Writer writer(Sgd(8));
  writer.options.half = true;
  Reader reader(ServingConfig(Sgd(8)));
  writer.Train(Range(0, 1000), 0.123f);

  const Messages messages = writer.Build();
  reader.ApplyAll(messages);

  EXPECT_LT(messages[0].size(), 1000u * (8 + 2 * 8) + 300);
  EXPECT_EQ(reader.follower.GetState().digest_ok, 1);
  EXPECT_NEAR(Lookup(*reader.table, {1})[0], Lookup(*writer.table, {1})[0], 1e-4);
}

TEST(RowLogTest, TablesThatLeaveZerosOutForgetRowsThatBecomeZero) {
  Writer writer(Sgd(1));
  TableConfig config = ServingConfig(Sgd(1));
  config.skip_zero_embedding = true;
  Reader reader(config);
  writer.Train({1, 2});
  reader.ApplyAll(writer.Build());
  ASSERT_EQ(reader.table->Size(), 2);

  writer.Train({1}, -1.0f);
  ASSERT_EQ(Lookup(*writer.table, {1})[0], 0.0f);
  reader.ApplyAll(writer.Build());

  EXPECT_EQ(reader.table->Size(), 1);
  ExpectEqual(writer, reader);
}

TEST(RowLogTest, UnknownTablesAreCounted) {
  Writer writer(Sgd(1));
  writer.Train({1});
  const std::string message = writer.Build()[0];
  BatchFollower follower;
  Outcome outcome;

  ASSERT_TRUE(
      follower.Apply({}, message.data(), static_cast<int64_t>(message.size()), &outcome).ok());

  EXPECT_EQ(outcome, Outcome::kApplied);
  EXPECT_EQ(follower.GetState().unknown_tables, 1);
}

TEST(RowLogTest, TheHeaderSurvives) {
  Writer writer(Sgd(1));
  writer.Train({1}, 1.0f, 12345);
  const std::string message = writer.Build()[0];
  BatchView view;

  ASSERT_TRUE(ParseMessage(message.data(), static_cast<int64_t>(message.size()), &view).ok());

  EXPECT_EQ(view.header.model, "m");
  EXPECT_EQ(view.header.num_shards, 1);
  EXPECT_EQ(view.header.newest_event_time, 12345);
  const std::vector<std::pair<int32_t, int64_t>> positions = {{0, 7}, {3, -1}};
  EXPECT_EQ(view.header.sample_positions, positions);
  EXPECT_TRUE(view.header.full_scan);
  ASSERT_TRUE(view.header.has_digest);
  EXPECT_EQ(view.header.digest.tables.at("t"), DigestOf(*writer.table));
}

// Among the ids of a chunk, wherever in it.
TEST(RowLogTest, DeletionsBetweenRowsGoIntoTheSameMessage) {
  for (const bool half : {false, true}) {
    Writer writer(Sgd(16));
    Reader reader(ServingConfig(Sgd(16)));
    writer.options.half = half;
    writer.Train(Range(0, 5000));
    reader.ApplyAll(writer.Build());
    writer.Train(Range(0, 5000), 0.5f);
    Ids gone;
    for (int64_t id = 0; id < 5000; id += 7) gone.push_back(id);
    writer.table->Erase(gone.data(), static_cast<int64_t>(gone.size()));

    reader.ApplyAll(writer.Build());

    EXPECT_EQ(writer.counts.num_chunks, 1);
    EXPECT_EQ(reader.table->Size(), 5000 - static_cast<int64_t>(gone.size()));
    EXPECT_EQ(reader.follower.GetState().deleted, static_cast<int64_t>(gone.size()));
    EXPECT_EQ(reader.follower.GetState().digest_ok, 1);
    if (!half) ExpectEqual(writer, reader);
  }
}

TEST(IdHashesTest, BehavesLikeAMap) {
  const int table = 0;
  IdHashes hashes(&table);
  std::map<int64_t, uint64_t> model;
  std::mt19937 random(3);
  for (int i = 0; i < 200000; ++i) {
    const int64_t id = static_cast<int64_t>(random() % 3000) - 5;
    const uint64_t number = random() % 3 == 0 ? 0 : 1 + random();
    const uint64_t before = model.count(id) > 0 ? model[id] : 0;
    ASSERT_EQ(hashes.Exchange(id, hashes.Hash(id), number), before);
    if (number == 0) {
      model.erase(id);
    } else {
      model[id] = number;
    }
    ASSERT_EQ(hashes.size(), static_cast<int64_t>(model.size()));
  }
}

// Writers and readers of other versions compute the same: a change of these is a change of the
// format.
TEST(RowHashTest, ValuesAreThoseOfTheFormat) {
  const std::vector<std::pair<int64_t, uint64_t>> hashes = {
      {1, 0x386f592e963edeb3u}, {2, 0x7dbc541b01e0724fu}, {3, 0xbc37d8a192b5d8eeu},
      {4, 0x15b900e3159289acu}, {7, 0x57ff28ce038515f5u}, {16, 0x07ec25c3418e6d06u},
      {33, 0x55ce76a481150218u}};
  for (const auto& [dim, hash] : hashes) {
    Floats row;
    for (int64_t k = 0; k < dim; ++k) {
      row.push_back(0.25f * static_cast<float>(k - 3) + 0.0078125f * static_cast<float>(dim));
    }
    EXPECT_EQ(RowHash(-5, row.data(), dim), hash) << dim;
  }
}

TEST(RowHashTest, EveryBitCounts) {
  for (const int64_t dim : {1, 3, 4, 7, 16}) {
    Floats row(static_cast<size_t>(dim), 0.5f);
    const uint64_t hash = RowHash(9, row.data(), dim);
    EXPECT_NE(hash, RowHash(10, row.data(), dim));
    for (int64_t i = 0; i < dim; ++i) {
      Floats other = row;
      other[i] = 0.50000006f;
      EXPECT_NE(hash, RowHash(9, other.data(), dim));
    }
    const Floats zeros(static_cast<size_t>(dim), 0.0f);
    EXPECT_EQ(RowHash(9, zeros.data(), dim), 0u);
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
