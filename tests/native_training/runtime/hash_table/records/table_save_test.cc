// Rows that leave a table: expiry, eviction, save pages, restore.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

ExpiryPolicy Policy(uint32_t default_days, std::vector<SlotExpireTime> slots) {
  ExpiryPolicy policy;
  EXPECT_TRUE(ExpiryPolicy::Create({default_days, std::move(slots)}, &policy).ok());
  return policy;
}

void AssignAt(EmbeddingTable* table, int64_t id, float value, int64_t time) {
  WriteOptions options;
  options.req_time = time;
  Assign(table, {id}, {value}, options);
}

TEST(TableSaveTest, SaveLeavesOutExpiredRows) {
  constexpr int64_t kNow = 10000000;
  const auto table = SgdTable(1);
  AssignAt(table.get(), 1, 1, kNow - 86401);
  AssignAt(table.get(), 2, 2, kNow - 86399);
  AssignAt(table.get(), 3, 3, kNow);
  const ExpiryPolicy policy = Policy(1, {});

  Restore(table.get(), DumpRecords(*table, &policy));

  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{0, 2, 3}));
}

TEST(TableSaveTest, ExpireTimeZeroExpiresEverything) {
  const auto table = SgdTable(1);
  AssignAt(table.get(), 1, 1, 100);
  const ExpiryPolicy never = Policy(3600, {}), always = Policy(0, {});
  EXPECT_EQ(DumpRecords(*table, &never).size(), 1u);
  EXPECT_EQ(DumpRecords(*table, &always).size(), 0u);
}

TEST(TableSaveTest, ExpireTimePerSlot) {
  const int64_t a = int64_t{1} << 48, b = int64_t{2} << 48;
  const auto table = SgdTable(1);
  AssignAt(table.get(), a, 1, 100);
  AssignAt(table.get(), b, 2, 100);
  const ExpiryPolicy policy = Policy(3600, {{1, 0}, {2, 1}});
  for (int round = 0; round < 2; ++round) {
    Restore(table.get(), DumpRecords(*table, &policy));
    EXPECT_EQ(Lookup(*table, {a, b}), (Floats{0, 2}));
  }
}

TEST(TableSaveTest, EqualTimesNeverExpire) {
  for (const int64_t time : {0, 100}) {
    const auto table = SgdTable(1);
    AssignAt(table.get(), 1, 1, time);
    AssignAt(table.get(), 2, 1, time);
    const ExpiryPolicy policy = Policy(1, {});
    EXPECT_EQ(DumpRecords(*table, &policy).size(), 2u);
  }
}

TEST(TableSaveTest, EvictErasesExpiredSlotsAndReusesTheirRows) {
  const auto table = SgdTable(1);
  for (int64_t slot = 1; slot <= 3; ++slot) AssignAt(table.get(), slot << 48, 1, 1234);
  WriteOptions later;
  later.req_time = 1234 + 5 * 86400 + 60;
  Assign(table.get(), {7}, {1}, later);  // raises the newest time; slot 0 has expire time 0
  const ExpiryPolicy policy = Policy(14, {{0, 0}, {1, 5}, {2, 6}});

  EXPECT_EQ(table->Evict(policy), 2);

  EXPECT_EQ(Lookup(*table, {int64_t{1} << 48, int64_t{2} << 48, int64_t{3} << 48, 7}),
            (Floats{0, 1, 1, 0}));
  EXPECT_EQ(table->Size(), 2);
  AssignAt(table.get(), int64_t{1} << 48, 9, 5);
  EXPECT_NE(table->DebugString().find("\"rows_reused\": 1"), std::string::npos)
      << table->DebugString();
}

TEST(TableSaveTest, EvictionOfManyRowsKeepsTheOthers) {
  const auto table = SgdTable(1);
  Ids old_ids, new_ids;
  for (int64_t i = 0; i < 50000; ++i) (i % 3 == 0 ? new_ids : old_ids).push_back(i);
  Assign(table.get(), old_ids, Floats(old_ids.size(), 1.0f));
  WriteOptions later;
  later.req_time = 86400;
  Assign(table.get(), new_ids, Floats(new_ids.size(), 2.0f), later);
  const ExpiryPolicy policy = Policy(1, {});

  EXPECT_EQ(table->Evict(policy), static_cast<int64_t>(old_ids.size()));

  EXPECT_EQ(Lookup(*table, new_ids), Floats(new_ids.size(), 2.0f));
  EXPECT_EQ(Lookup(*table, old_ids), Floats(old_ids.size(), 0.0f));
  Assign(table.get(), old_ids, Floats(old_ids.size(), 3.0f), later);
  EXPECT_EQ(Lookup(*table, new_ids), Floats(new_ids.size(), 2.0f));
  EXPECT_EQ(Lookup(*table, old_ids), Floats(old_ids.size(), 3.0f));
}

TEST(TableSaveTest, SlotOutOfRangeIsAnError) {
  TableConfig config = MakeConfig({MakeSegment(1, OptimizerKind::kSgd)});
  config.expiry.slots = {{32768, 1}};
  std::unique_ptr<EmbeddingTable> table;
  const Status status = EmbeddingTable::Create(config, &table);
  EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
  EXPECT_NE(status.message.find("32768"), std::string::npos);
}

TEST(TableSaveTest, TimesOutsideOf32BitsAreClamped) {
  const auto table = SgdTable(1);
  AssignAt(table.get(), 1, 1, -5);
  EXPECT_EQ(table->MaxUpdateTs(), 0);
  AssignAt(table.get(), 2, 1, int64_t{1} << 40);
  EXPECT_EQ(table->MaxUpdateTs(), int64_t{0xffffffff});
  EXPECT_EQ(DumpRecords(*table).size(), 2u);
}

TEST(TableSaveTest, PagesOfAllPartitionsHoldEveryEntryOnce) {
  const auto table = SgdTable(1);
  for (int64_t i = 0; i < 100; ++i) Assign(table.get(), {i * 1000003}, {1});
  for (const auto& [parts, limit] : std::vector<std::pair<int64_t, int64_t>>{
           {10, 2}, {1, 1}, {1, 7}, {1, 1000}, {64, 3}, {100, 5}}) {
    std::set<std::string> seen;
    int64_t total = 0;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t offset = 0;
      while (true) {
        std::vector<std::string> entries;
        ASSERT_TRUE(table->SavePage(part, parts, limit, offset, &offset, &entries).ok());
        ASSERT_GT(offset, 0);
        ASSERT_LE(static_cast<int64_t>(entries.size()), limit);
        total += static_cast<int64_t>(entries.size());
        seen.insert(entries.begin(), entries.end());
        if (static_cast<int64_t>(entries.size()) < limit) break;
      }
    }
    EXPECT_EQ(total, 100) << parts << " parts, limit " << limit;
    EXPECT_EQ(seen.size(), 100u);
  }
}

TEST(TableSaveTest, PageArgumentsAreChecked) {
  const auto table = SgdTable(1);
  int64_t offset;
  std::vector<std::string> entries;
  EXPECT_FALSE(table->SavePage(2, 2, 1, 0, &offset, &entries).ok());
  EXPECT_FALSE(table->SavePage(0, 0, 1, 0, &offset, &entries).ok());
  EXPECT_FALSE(table->SavePage(0, 1, -1, 0, &offset, &entries).ok());
  ASSERT_TRUE(table->SavePage(0, 1, 0, 0, &offset, &entries).ok());
  EXPECT_TRUE(entries.empty());
}

TEST(TableSaveTest, SmallSavePagesWriteEveryRowOnceWhileTheTableGrows) {
  const auto table = SgdTable(1);
  Ids ids;
  for (int64_t i = 0; i < 20000; ++i) ids.push_back(i);
  Assign(table.get(), ids, Floats(ids.size(), 1.0f));
  int64_t next_new = 1000000;
  std::multiset<std::string> records;
  for (int shard = 0; shard < EmbeddingTable::NumShards(); ++shard) {
    ShardCursor cursor;
    while (!cursor.done) {
      std::string buffer;
      std::vector<int64_t> sizes;
      int64_t count = 0;
      ASSERT_TRUE(
          table->SaveShard(shard, nullptr, 300, false, &cursor, &buffer, &sizes, &count).ok());
      int64_t at = 0;
      for (const int64_t size : sizes) {
        records.insert(buffer.substr(at, size));
        at += size;
      }
      if (next_new == 1040000) continue;  // enough for every shard to grow
      Ids more;
      for (int i = 0; i < 100; ++i) more.push_back(next_new++);
      Assign(table.get(), more, Floats(more.size(), 2.0f));
    }
  }
  const auto twin = table->NewEmptyTwin();
  LoadStats stats;
  ASSERT_TRUE(
      LoadAll(twin.get(), std::vector<std::string>(records.begin(), records.end()), &stats).ok());
  EXPECT_EQ(Lookup(*twin, ids), Floats(ids.size(), 1.0f));
  EXPECT_EQ(twin->Size(), stats.loaded) << "a row was written twice";
}

TEST(TableSaveTest, LoadingOneShardDoesNotWaitForAnother) {
  const auto table = SgdTable(1);
  Ids ids;  // of shard 1, more than some shards' worth of random ones
  for (int64_t id = 0; ids.size() < 1000; ++id) {
    if (ShardOf(HashId(id)) == 1) ids.push_back(id);
  }
  Assign(table.get(), ids, Floats(ids.size(), 1.0f));
  const std::vector<std::string> records = DumpRecords(*table);
  const auto twin = table->NewEmptyTwin();
  LoadStats stats;
  std::future<bool> loaded;
  {
    // In the same group of shards, whatever their number.
    const std::unique_lock<FairSharedMutex> other(TableInternals::Shards(*twin)[0]->mutex);
    loaded =
        std::async(std::launch::async, [&] { return LoadAll(twin.get(), records, &stats).ok(); });
    EXPECT_EQ(loaded.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  }
  ASSERT_TRUE(loaded.get());
  EXPECT_EQ(stats.loaded, 1000);
  EXPECT_EQ(Lookup(*twin, ids), Floats(ids.size(), 1.0f));
}

TEST(TableSaveTest, RestoreReplacesTheContent) {
  const auto table = MakeTable(MakeConfig({MakeSegment(2, OptimizerKind::kAdam)}));
  Optimize(table.get(), {1, 2}, {1, 2, 3, 4}, {});
  const Floats saved = Lookup(*table, {1, 2});
  const std::vector<std::string> records = DumpRecords(*table);
  Optimize(table.get(), {1, 3}, {1, 2, 3, 4}, {});

  Restore(table.get(), records);

  EXPECT_EQ(Lookup(*table, {1, 2}), saved);
  EXPECT_EQ(Lookup(*table, {3}), (Floats{0, 0}));
  EXPECT_EQ(table->Size(), 2);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
