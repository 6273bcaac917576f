// Who waits for whom at a table: nobody for a filter, and lookups go on beside writers.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

// Does not answer until it is told to.
class SlowFilter : public OccurrenceFilter {
 public:
  void Filter(const int64_t* ids, const uint32_t*, int64_t n, bool, uint8_t* filtered) override {
    std::unique_lock<std::mutex> lock(mutex_);
    asked_.assign(ids, ids + n);
    ++calls_;
    changed_.notify_all();
    answered_in_time_ &= changed_.wait_for(lock, std::chrono::minutes(1), [&] { return answer_; });
    std::fill(filtered, filtered + n, uint8_t{0});
  }

  Ids AwaitQuestion() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return calls_ > 0; });
    return asked_;
  }
  void Answer() {
    const std::lock_guard<std::mutex> lock(mutex_);
    answer_ = true;
    changed_.notify_all();
  }
  int calls() const { return calls_; }
  bool answered_in_time() const { return answered_in_time_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Ids asked_;
  int calls_ = 0;
  bool answer_ = false;
  bool answered_in_time_ = true;
};

TEST(TableWaitingTest, NobodyWaitsForAFilter) {
  for (const int64_t n : {64, 1024}) {
    const auto table = SgdTable(1);
    Ids known(100000);
    for (int64_t i = 0; i < 100000; ++i) known[i] = i;
    Assign(table.get(), known, Floats(100000, 1.0f));
    Ids ids(known.begin(), known.begin() + n);
    ids[0] = -1;
    ids[5] = -2;
    SlowFilter filter;
    WriteOptions options;
    options.filter = &filter;
    std::thread writer([&] { Assign(table.get(), ids, Floats(n, 2.0f), options); });
    EXPECT_EQ(filter.AwaitQuestion(), (Ids{-1, -2}));  // those that are absent, together

    // Lookups and writes of all shards come through before the filter has answered.
    EXPECT_EQ(Lookup(*table, known), Floats(100000, 1.0f));
    Assign(table.get(), Ids(known.begin() + n, known.end()), Floats(100000 - n, 3.0f));
    table->Erase(&known[50000], 1);
    Assign(table.get(), {-2}, {4.0f});

    filter.Answer();
    writer.join();
    EXPECT_TRUE(filter.answered_in_time());
    EXPECT_EQ(filter.calls(), 1);
    EXPECT_EQ(Lookup(*table, {-1, -2, 1, n}), (Floats{2, 2, 2, 3}));
  }
}

TEST(TableWaitingTest, LookupsReadBesideAWriter) {
  const auto table = SgdTable(3);
  Ids ids(5000);
  Floats values;
  for (int64_t i = 0; i < 5000; ++i) {
    ids[i] = 2 * i;
    values.insert(values.end(), 3, static_cast<float>(i + 1));
  }
  Assign(table.get(), ids, values);
  ids.push_back(7);  // absent
  values.insert(values.end(), 3, 0.0f);
  const WriteRoom room(TableInternals::Room(*table));

  EXPECT_EQ(Lookup(*table, ids), values);
  EXPECT_EQ(Lookup(*table, {4}), (Floats{3, 3, 3}));
  std::vector<uint8_t> found(3);
  const Ids some = {7, 8, 9};
  table->Contains(some.data(), 3, found.data());
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 1, 0}));
}

TEST(TableWaitingTest, LookupSaysWhatIsThere) {
  SegmentConfig half = MakeSegment(2, OptimizerKind::kAbsent);
  half.compressor.kind = CompressorKind::kFp16;
  const std::unique_ptr<EmbeddingTable> tables[] = {
      SgdTable(2), MakeTable(MakeConfig({half}, EntryType::kServing))};
  for (const auto& table : tables) {
    Ids ids(3000);
    Floats want;
    for (int64_t i = 0; i < 3000; ++i) {
      ids[i] = i;
      if (i % 3 == 0) Assign(table.get(), {i}, {0.0f, i % 2 == 0 ? 1.0f : 0.0f});
      want.push_back(0.0f);
      want.push_back(i % 6 == 0 ? 1.0f : 0.0f);
    }
    for (const bool beside_a_writer : {false, true}) {
      RoomLock other;
      const WriteRoom room(beside_a_writer ? TableInternals::Room(*table) : &other);
      Floats out(6000, -1.0f);
      std::vector<uint8_t> found(3000, 9);
      table->Lookup(ids.data(), 3000, out.data(), found.data());
      EXPECT_EQ(out, want);
      for (int64_t i = 0; i < 3000; ++i) EXPECT_EQ(found[i], i % 3 == 0 ? 1 : 0);
    }
  }
}

// Lookups never pause; each update comes through all the same.
TEST(TableWaitingTest, UpdatesComeThroughBesideManyLookups) {
  const auto table = SgdTable(4);
  Ids ids(20000);
  for (int64_t i = 0; i < 20000; ++i) ids[i] = i;
  Assign(table.get(), ids, Floats(80000, 0.0f));
  std::atomic<bool> stop{false};
  std::atomic<int64_t> torn{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 4; ++t) {
    readers.emplace_back([&] {
      while (!stop) {
        const Floats got = Lookup(*table, ids);
        for (size_t i = 0; i < got.size(); i += 4) torn += got[i] != got[i + 3];
      }
    });
  }
  const Ids some(ids.begin(), ids.begin() + 1024);
  for (int i = 0; i < 200; ++i) Optimize(table.get(), some, Floats(4096, -10.0f));
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(torn, 0);
  ExpectNear(Lookup(*table, {0, 1023, 1024}), {200, 200, 200, 200, 200, 200, 200, 200, 0, 0, 0, 0},
             0.01f);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
