// Random operations against a plain map, and many threads at once.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

// The table's expected content: values, Adagrad accumulators and timestamp of every id.
struct ModelRow {
  Floats values;
  Floats norm;
  int64_t ts = 0;
};

class TableModel {
 public:
  TableModel(uint64_t seed, ParallelRunner* runner) : random_(seed), runner_(runner) {
    table_ = MakeTable(MakeConfig({MakeSegment(kDim, OptimizerKind::kAdagrad)}));
  }

  void RunOperation() {
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
        return CheckLookup();
      case 3:
      case 4:
        return RandomAssign();
      case 5:
      case 6:
        return RandomAssignAdd();
      case 7:
      case 8:
      case 9:
      case 10:
        return RandomOptimize(false);
      case 11:
        return RandomOptimize(true);
      case 12:
        return RandomErase();
      case 13:
        return random_() % 8 == 0 ? SaveAndRestore() : CheckLookup();
      case 14:
        return random_() % 8 == 0 ? EvictOld() : CheckLookup();
      default:
        ++now_;
    }
  }

  void CheckEverything() {
    EXPECT_EQ(table_->Size(), static_cast<int64_t>(model_.size()));
    Ids ids;
    for (const auto& [id, row] : model_) ids.push_back(id);
    CheckIds(ids);
  }

 private:
  static constexpr int64_t kDim = 3;
  static constexpr float kRate = 0.5f;

  int64_t RandomId() {
    const uint64_t word = random_();
    switch (word % 4) {
      case 0:
        return static_cast<int64_t>(word >> 8) % 50;
      case 1:
        return static_cast<int64_t>((word >> 8) % 2000) << 20;
      case 2:
        return std::numeric_limits<int64_t>::min() + static_cast<int64_t>((word >> 8) % 1000);
      default:
        return static_cast<int64_t>(((word >> 8) % 3000) * 0x9e3779b97f4a7c15ull);
    }
  }
  Ids RandomIds() {
    // Mostly small; now and then enough for the parallel and the unsorted path.
    Ids ids(random_() % 16 == 0 ? random_() % 3000 : random_() % 40);
    for (int64_t& id : ids) id = RandomId();
    return ids;
  }
  Floats RandomValues(size_t n) {
    Floats values(n * kDim);
    for (float& value : values)
      value = static_cast<float>(static_cast<int>(random_() % 33) - 16) / 8;
    return values;
  }
  WriteOptions Options() {
    WriteOptions options;
    options.req_time = now_;
    options.runner = runner_;
    newest_ = std::max(newest_, now_);
    return options;
  }
  ModelRow* Row(int64_t id) {
    const auto [it, inserted] = model_.try_emplace(id);
    if (inserted) {
      it->second.values.assign(kDim, 0.0f);
      it->second.norm.assign(kDim, 0.1f);
    }
    it->second.ts = now_;
    return &it->second;
  }

  void CheckIds(const Ids& ids) {
    const Floats got = Lookup(*table_, ids, runner_);
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto it = model_.find(ids[i]);
      for (int64_t k = 0; k < kDim; ++k) {
        const float want = it == model_.end() ? 0.0f : it->second.values[k];
        ASSERT_NEAR(got[i * kDim + k], want, 1e-4f * (1.0f + std::fabs(want))) << "id " << ids[i];
      }
    }
  }
  void CheckLookup() { CheckIds(RandomIds()); }

  void RandomAssign() {
    const Ids ids = RandomIds();
    const Floats values = RandomValues(ids.size());
    Assign(table_.get(), ids, values, Options());
    for (size_t i = 0; i < ids.size(); ++i) {
      Row(ids[i])->values.assign(values.begin() + i * kDim, values.begin() + (i + 1) * kDim);
    }
  }
  void RandomAssignAdd() {
    const Ids ids = RandomIds();
    const Floats values = RandomValues(ids.size());
    AssignAdd(table_.get(), ids, values, Options());
    for (size_t i = 0; i < ids.size(); ++i) {
      ModelRow* row = Row(ids[i]);
      for (int64_t k = 0; k < kDim; ++k) row->values[k] += values[i * kDim + k];
    }
  }
  void Step1(ModelRow* row, const float* gradient) {
    for (int64_t k = 0; k < kDim; ++k) {
      row->norm[k] += gradient[k] * gradient[k];
      row->values[k] -= kRate / std::sqrt(row->norm[k]) * gradient[k];
    }
  }
  void RandomOptimize(bool dedup) {
    const Ids ids = RandomIds();
    const Floats grads = RandomValues(ids.size());
    Step step;
    step.rates = {kRate};
    step.dedup = dedup;
    step.write = Options();
    Optimize(table_.get(), ids, grads, step);
    if (!dedup) {
      for (size_t i = 0; i < ids.size(); ++i) Step1(Row(ids[i]), &grads[i * kDim]);
      return;
    }
    std::unordered_map<int64_t, Floats> sums;
    for (size_t i = 0; i < ids.size(); ++i) {
      Floats& sum = sums.try_emplace(ids[i], Floats(kDim, 0.0f)).first->second;
      for (int64_t k = 0; k < kDim; ++k) sum[k] += grads[i * kDim + k];
    }
    for (const auto& [id, sum] : sums) Step1(Row(id), sum.data());
  }
  void RandomErase() {
    const Ids ids = RandomIds();
    table_->Erase(ids.data(), static_cast<int64_t>(ids.size()));
    for (const int64_t id : ids) model_.erase(id);
  }
  void SaveAndRestore() {
    const LoadStats stats = Restore(table_.get(), DumpRecords(*table_, nullptr, 20000));
    EXPECT_EQ(stats.state_reset, 0);
    EXPECT_EQ(stats.loaded, static_cast<int64_t>(model_.size()));
  }
  void EvictOld() {
    now_ += 86400 / 2;
    ExpiryPolicy policy;
    ASSERT_TRUE(ExpiryPolicy::Create({1, {}}, &policy).ok());
    int64_t erased = 0;
    for (auto it = model_.begin(); it != model_.end();) {
      const bool old = newest_ - it->second.ts >= 86400;
      erased += old;
      it = old ? model_.erase(it) : std::next(it);
    }
    EXPECT_EQ(table_->Evict(policy), erased);
  }

  std::mt19937_64 random_;
  ParallelRunner* runner_;
  std::unique_ptr<EmbeddingTable> table_;
  std::unordered_map<int64_t, ModelRow> model_;
  int64_t now_ = 1000;
  int64_t newest_ = 0;
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOperations = 2000;
#else
constexpr int kOperations = 20000;
#endif

TEST(TableModelTest, RandomOperationsEqualAMap) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    TableModel model(seed, nullptr);
    for (int i = 0; i < kOperations && !::testing::Test::HasFailure(); ++i) model.RunOperation();
    model.CheckEverything();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(TableModelTest, RandomOperationsOnAPoolEqualAMap) {
  ThreadPool pool(4);
  for (uint64_t seed = 11; seed <= 13; ++seed) {
    TableModel model(seed, &pool);
    for (int i = 0; i < kOperations / 2 && !::testing::Test::HasFailure(); ++i) {
      model.RunOperation();
    }
    model.CheckEverything();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

// Every id comes several times, in tiles that different threads may take.
TEST(TableModelTest, ResultsDoNotDependOnTheNumberOfThreads) {
  for (const int threads : {2, 3, 16}) {
    ThreadPool pool(threads);
    for (const int64_t dim : {4, 16}) {  // 16: see AdagradFinisher
      for (const bool dedup : {false, true}) {
        const TableConfig config = MakeConfig({MakeSegment(dim, OptimizerKind::kAdagrad)});
        const auto alone = MakeTable(config), many = MakeTable(config);
        std::mt19937_64 random(3);
        Ids all;
        for (int round = 0; round < 3; ++round) {
          Ids ids(20000 + 1000 * round);
          for (int64_t& id : ids) id = static_cast<int64_t>(random() % 5000);
          Floats grads(ids.size() * dim);
          for (float& g : grads) g = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
          Step step;
          step.dedup = dedup;
          Optimize(alone.get(), ids, grads, step);
          step.write.runner = &pool;
          Optimize(many.get(), ids, grads, step);
          all.insert(all.end(), ids.begin(), ids.end());
        }
        EXPECT_EQ(Lookup(*alone, all), Lookup(*many, all, &pool)) << threads << " " << dim;
      }
    }
  }
}

// Threads take many small tables whole, in the order of the ids; a large one is divided.
TEST(TableModelTest, ManyTablesDoNotDependOnTheNumberOfThreads) {
  const std::vector<int64_t> sizes = {300, 0, 1, 9000, 700, 20000, 500, 500, 500, 500};
  const TableConfig config = MakeConfig({MakeSegment(16, OptimizerKind::kAdagrad)});
  std::mt19937_64 random(5);
  std::vector<Ids> ids;
  std::vector<Floats> grads;
  for (const int64_t size : sizes) {
    ids.emplace_back(size);
    for (int64_t& id : ids.back()) id = static_cast<int64_t>(random() % 200);
    grads.emplace_back(size * 16);
    for (float& g : grads.back()) g = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
  }
  const float rate = 0.1f;
  const auto optimized = [&](ParallelRunner* runner) {
    std::vector<std::unique_ptr<EmbeddingTable>> tables;
    std::vector<WriteSpan> spans(sizes.size());
    std::vector<OptimizeRequest> requests(sizes.size());
    for (size_t t = 0; t < sizes.size(); ++t) {
      tables.push_back(MakeTable(config));
      spans[t] = {ids[t].data(), sizes[t], grads[t].data()};
      requests[t].table = tables[t].get();
      requests[t].spans = &spans[t];
      requests[t].num_spans = 1;
      requests[t].options.learning_rates = &rate;
      requests[t].options.num_learning_rates = 1;
    }
    const Status status = EmbeddingTable::OptimizeMany(
        requests.data(), static_cast<int64_t>(requests.size()), runner);
    EXPECT_TRUE(status.ok()) << status.message;
    std::vector<Floats> values;
    for (size_t t = 0; t < sizes.size(); ++t) values.push_back(Lookup(*tables[t], ids[t]));
    return values;
  };
  const std::vector<Floats> alone = optimized(nullptr);
  for (const int threads : {1, 2, 3, 16}) {
    ThreadPool pool(threads);
    EXPECT_EQ(optimized(&pool), alone) << threads;
  }
}

TEST(TableConcurrencyTest, HundredThreadsOnOneTable) {
  const auto table = SgdTable(1);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < 100; ++i) {
    threads.emplace_back([&table, i] {
      AssignAdd(table.get(), {i}, {static_cast<float>(i)});
      Step step;
      step.rates = {0.01f};
      Optimize(table.get(), {i}, {-200.0f * static_cast<float>(i)}, step);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_NEAR(Lookup(*table, {i})[0], 3.0f * static_cast<float>(i), 1e-3f);
  }
}

// Writers store rows of one number only; a reader must never see two.
TEST(TableConcurrencyTest, ReadersNeverSeeTornRowsWhileEverythingElseHappens) {
  constexpr int64_t kDim = 20, kIds = 2000;
  const auto table = MakeTable(MakeConfig({MakeSegment(kDim, OptimizerKind::kSgd)}));
  std::atomic<bool> stop{false};
  std::atomic<int64_t> torn{0}, lookups{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      // And on, until a reader has had a core: they may get none for longer than 60 rounds take.
      for (int round = 0; round < 60 || lookups == 0; ++round) {
        Ids ids(1500);
        Floats values;
        for (int64_t& id : ids) {
          id = static_cast<int64_t>(random() % kIds) + (round / 20 % 3) * 500;
          values.insert(values.end(), kDim, static_cast<float>(random() % 100));
        }
        Assign(table.get(), ids, values);
      }
      stop = true;
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(100 + t);
      while (!stop) {
        Ids ids(t == 0 ? 50 : 1000);
        for (int64_t& id : ids) id = static_cast<int64_t>(random() % (2 * kIds));
        const Floats got = Lookup(*table, ids);
        for (size_t i = 0; i < ids.size(); ++i) {
          for (int64_t k = 1; k < kDim; ++k) torn += got[i * kDim + k] != got[i * kDim];
        }
        ++lookups;
      }
    });
  }
  threads.emplace_back([&] {
    std::mt19937_64 random(7);
    ExpiryPolicy policy;
    ASSERT_TRUE(ExpiryPolicy::Create({1, {}}, &policy).ok());
    while (!stop) {
      const int64_t id = static_cast<int64_t>(random() % kIds);
      table->Erase(&id, 1);
      table->Evict(policy);
      DumpRecords(*table);
      EXPECT_GE(table->Size(), 0);
      EXPECT_FALSE(table->DebugString().empty());
      if (random() % 4 == 0) table->Clear();
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn, 0);
  EXPECT_GT(lookups, 0);
}

TEST(TableConcurrencyTest, ConcurrentUpdatesOfOneIdAreAllCounted) {
  const auto table = SgdTable(2);
  ThreadPool pool(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Step step;
      step.rates = {1.0f};
      if (t == 0) step.write.runner = &pool;
      for (int round = 0; round < 50; ++round) {
        Optimize(table.get(), Ids(40, 5), Floats(80, -1.0f), step);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Lookup(*table, {5}), (Floats{8000, 8000}));
}

// Batches that take the shards of others away while these are at them.
TEST(TableConcurrencyTest, LargeBatchesOfSeveralWritersAreAllCounted) {
  constexpr int64_t kIds = 6000, kWriters = 4, kRounds = 12;
  const auto table = SgdTable(4);
  std::vector<std::thread> threads;
  for (int64_t w = 0; w < kWriters; ++w) {
    threads.emplace_back([&table, w] {
      Ids ids;
      for (int64_t i = 0; i < kIds; ++i) ids.push_back((i * 7919 + w * 1000) % kIds);
      for (int64_t round = 0; round < kRounds; ++round) {
        AssignAdd(table.get(), ids, Floats(kIds * 4, 1.0f));
        for (const float value : Lookup(*table, {0, 1, kIds - 1})) {
          EXPECT_GE(value, static_cast<float>(round + 1));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Ids ids(kIds);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_EQ(Lookup(*table, ids), Floats(kIds * 4, static_cast<float>(kWriters * kRounds)));
}

TEST(TableConcurrencyTest, SharedFilterUnderConcurrentWrites) {
  std::unique_ptr<SlidingHashFilter> filter;
  ASSERT_TRUE(SlidingHashFilter::Create(100000, 7, {3, {}}, &filter).ok());
  const auto table = SgdTable(1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Step step;
      step.write.filter = filter.get();
      Ids ids;
      for (int64_t i = 0; i < 1000; ++i) ids.push_back(i * 131);
      for (int round = 0; round < 2; ++round) Optimize(table.get(), ids, Floats(1000, 1.0f), step);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Eight occurrences each: more than three, so nearly all are in (signatures may collide).
  EXPECT_GE(table->Size(), 990);
}

TEST(TableConcurrencyTest, LoadFromSeveralThreads) {
  const auto source = SgdTable(2);
  Ids ids;
  for (int64_t i = 0; i < 20000; ++i) ids.push_back(i);
  Assign(source.get(), ids, Floats(40000, 1.5f));
  const std::vector<std::string> records = DumpRecords(*source);
  const auto twin = source->NewEmptyTwin();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::string> part;
      for (size_t i = t; i < records.size(); i += 4) part.push_back(records[i]);
      LoadStats stats;
      EXPECT_TRUE(LoadAll(twin.get(), part, &stats).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(twin->Size(), 20000);
  EXPECT_EQ(Lookup(*twin, ids), Floats(40000, 1.5f));
}

}  // namespace
}  // namespace engine
}  // namespace monolith
