// Memory of tables: what they take, what they give back, and what happens when there is none.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"
#include "tests/native_training/runtime/process_memory.h"

namespace {

// The allocations that are left until one fails; negative: none does.
std::atomic<int64_t> allocations_left{-1};
std::atomic<int64_t> allocations_failed{0};

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left.load(std::memory_order_relaxed) >= 0 &&
      allocations_left.fetch_sub(1, std::memory_order_relaxed) <= 0) {
    allocations_left.store(0, std::memory_order_relaxed);  // and all that follow
    allocations_failed.fetch_add(1, std::memory_order_relaxed);
    throw std::bad_alloc();
  }
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new[](std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
// Each form that is not replaced is the sanitizer's, whose memory our delete must not free.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return Allocate(bytes, 1);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t bytes, const std::nothrow_t& nothrow) noexcept {
  return operator new(bytes, nothrow);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TableConfig AdagradConfig(int64_t dim) {
  return MakeConfig({MakeSegment(dim, OptimizerKind::kAdagrad)});
}

void AssignRange(EmbeddingTable* table, int64_t begin, int64_t end, int64_t req_time = 0) {
  constexpr int64_t kBatch = 20000;
  WriteOptions options;
  options.req_time = req_time;
  for (; begin < end; begin += kBatch) {
    Ids ids(std::min(kBatch, end - begin));
    std::iota(ids.begin(), ids.end(), begin);
    Assign(table, ids, Floats(ids.size() * table->dim(), 1.0f), options);
  }
}

TEST(TableMemoryTest, EvictionGivesMemoryBackAndStatsSayWhatIsHeld) {
  TableConfig config = AdagradConfig(16);
  config.expiry.default_days = 1;
  const auto table = MakeTable(config);
  const int64_t before = ResidentMemory();
  constexpr int64_t kRows = 500000;

  AssignRange(table.get(), 0, kRows, 1000);

  const int64_t full = ResidentMemory() - before;
  EXPECT_GT(full, kRows * 128);
  EXPECT_GT(table->Stats().memory, kRows * 128);
  if (!kSanitized) {
    EXPECT_NEAR(static_cast<double>(table->Stats().memory), static_cast<double>(full), 0.2 * full);
  }

  AssignRange(table.get(), kRows, kRows + 1, 1000 + 3 * 86400);
  EXPECT_EQ(table->Evict(table->expiry()), kRows);

  EXPECT_EQ(table->Size(), 1);
  EXPECT_EQ(table->Stats().expired, kRows);
  EXPECT_LT(table->Stats().row_memory, 10 * kMiB);
  EXPECT_LT(table->Stats().memory, full / 2);
  if (!kSanitized) {
    EXPECT_LT(ResidentMemory() - before, full / 2);
  }
  // The rows that are left are right, and the table grows again.
  EXPECT_EQ(Lookup(*table, {kRows, 7}), [] {
    Floats want(32, 0.0f);
    std::fill(want.begin(), want.begin() + 16, 1.0f);
    return want;
  }());
  AssignRange(table.get(), 0, kRows, 1000 + 3 * 86400);
  EXPECT_EQ(table->Size(), kRows + 1);
  EXPECT_LT(table->Stats().memory, full * 3 / 2);
}

TEST(TableMemoryTest, AFewRowsTakeKilobytes) {
  const auto table = MakeTable(AdagradConfig(16));
  EXPECT_LT(table->Stats().memory, 16384);
  AssignRange(table.get(), 0, 3);
  EXPECT_LT(table->Stats().memory, 128 << 10);
  EXPECT_GT(table->Stats().memory, 3 * 128);
}

TEST(TableMemoryTest, DebugStringSaysWhatStatsSay) {
  const auto table = MakeTable(AdagradConfig(4));
  AssignRange(table.get(), 0, 1000);
  const TableStats stats = table->Stats();
  EXPECT_EQ(stats.size, 1000);
  EXPECT_EQ(stats.memory_if_not_compressed, stats.index_memory + 1000 * 16);
  const std::string text = table->DebugString();
  EXPECT_NE(text.find("\"memory\": " + std::to_string(stats.memory) + ","), std::string::npos)
      << text;
  EXPECT_NE(text.find("\"size\": 1000,"), std::string::npos) << text;
}

TEST(TableMemoryTest, ThousandsOfSmallTablesFitIntoTheAddressSpace) {
  const int64_t before = AddressSpace();
  std::vector<std::unique_ptr<EmbeddingTable>> tables;
  for (int i = 0; i < 2000; ++i) {
    tables.push_back(MakeTable(AdagradConfig(16)));
    Assign(tables.back().get(), {5}, Floats(16, static_cast<float>(i)));
  }
  if (!kSanitized) {
    EXPECT_LT(AddressSpace() - before, int64_t{8} << 30);
  }
  for (int i = 0; i < 2000; ++i) {
    ASSERT_EQ(Lookup(*tables[i], {5}), Floats(16, static_cast<float>(i)));
  }
}

TEST(TableMemoryTest, HundredsOfTablesUnderALimitOfAddressSpace) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space themselves";
  EXPECT_EQ(RunInChild([] {
              LimitMemory(RLIMIT_AS, int64_t{2} << 30);
              std::vector<std::unique_ptr<EmbeddingTable>> tables;
              const int64_t id = 5;
              const Floats value(16, 1.0f);
              for (int i = 0; i < 500; ++i) {
                tables.emplace_back();
                if (!EmbeddingTable::Create(AdagradConfig(16), &tables.back()).ok()) return 1;
                if (!tables.back()->Assign({&id, 1, value.data()}, {}).ok()) return 2;
              }
              void* rest = std::malloc(256 << 20);  // others have some too
              std::free(rest);
              return rest == nullptr ? 3 : 0;
            }),
            0);
}

TEST(TableMemoryTest, TableWithoutMemoryForRowsSaysSoAndGoesOn) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space themselves";
  for (const auto limit : {RLIMIT_AS, RLIMIT_DATA}) {
    EXPECT_EQ(RunInChild([limit] {
                const auto table = MakeTable(AdagradConfig(64));
                Ids ids(20000);
                const Floats values(20000 * 64, 2.0f);
                Floats out(64);
                const rlimit old = LimitMemory(limit, 64 * kMiB);
                Status status;
                int64_t next = 0;
                while (status.ok() && next < 10000000) {
                  std::iota(ids.begin(), ids.end(), next);
                  next += 20000;
                  status = table->Assign({ids.data(), 20000, values.data()}, {});
                }
                if (status.code != StatusCode::kResourceExhausted) return 1;
                const int64_t first = 3;
                table->Lookup(&first, 1, out.data());
                if (out[63] != 2.0f) return 2;
                table->Evict(table->expiry());
                if (setrlimit(limit, &old) != 0) return 3;
                if (!table->Assign({ids.data(), 20000, values.data()}, {}).ok()) return 4;
                table->Lookup(&ids[19999], 1, out.data());
                return out[0] == 2.0f ? 0 : 5;
              }),
              0)
        << (limit == RLIMIT_AS ? "address space" : "data");
  }
}

TEST(TableMemoryTest, NoAddressSpaceForAnotherTableIsResourceExhausted) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space themselves";
  EXPECT_EQ(RunInChild([] {
              const TableConfig config = AdagradConfig(16);
              LimitMemory(RLIMIT_AS, kMiB);
              std::unique_ptr<EmbeddingTable> table;
              const Status status = EmbeddingTable::Create(config, &table);
              return status.code == StatusCode::kResourceExhausted && table == nullptr ? 0 : 1;
            }),
            0);
}

TEST(TableMemoryTest, CapacityThatCannotBeIsRefused) {
  const auto table = MakeTable(AdagradConfig(16));
  Assign(table.get(), {5}, Floats(16, 6.0f));
  for (const int64_t rows : {int64_t{-1}, int64_t{1} << 32, int64_t{1} << 62}) {
    const Status status = table->Reserve(rows);
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument) << rows;
    EXPECT_NE(status.message.find(std::to_string(rows)), std::string::npos) << status.message;
    TableConfig config = AdagradConfig(16);
    config.initial_capacity = rows;
    std::unique_ptr<EmbeddingTable> none;
    const Status created = EmbeddingTable::Create(config, &none);
    EXPECT_EQ(created.code, StatusCode::kInvalidArgument) << rows;
    EXPECT_NE(created.message.find("initial_capacity is " + std::to_string(rows)),
              std::string::npos)
        << created.message;
    EXPECT_EQ(none, nullptr);
  }
  // As many rows as there are numbers, of a kilobyte each: terabytes.
  TableConfig wide = AdagradConfig(128);
  wide.initial_capacity = (int64_t{1} << 32) - 2;
  std::unique_ptr<EmbeddingTable> none;
  const Status created = EmbeddingTable::Create(wide, &none);
  EXPECT_EQ(created.code, StatusCode::kInvalidArgument);
  EXPECT_NE(created.message.find("memory"), std::string::npos) << created.message;
  EXPECT_EQ(Lookup(*table, {5}), Floats(16, 6.0f));
}

TEST(TableMemoryTest, LargeCapacityTakesAddressSpaceOnly) {
  const int64_t before = ResidentMemory();
  TableConfig config = AdagradConfig(1);
  config.initial_capacity = 20000000;
  const auto table = MakeTable(config);
  if (!kSanitized) {
    EXPECT_LT(ResidentMemory() - before, 64 * kMiB);
  }
  EXPECT_LT(table->Stats().memory, 64 * kMiB);
  AssignRange(table.get(), 0, 50000);
  EXPECT_EQ(table->Size(), 50000);
  EXPECT_EQ(Lookup(*table, {0, 49999, 50000}), (Floats{1, 1, 0}));
}

// An id that comes several times in a batch, with a zero vector among them: the row that was given
// up is not written to, although earlier occurrences were to be finished later.
TEST(TableMemoryTest, RowErasedInsideABatchIsLeftAlone) {
  SegmentConfig segment = MakeSegment(1, OptimizerKind::kAbsent);
  segment.initializer.kind = InitializerKind::kAbsent;
  TableConfig config = MakeConfig({segment}, EntryType::kServing);
  config.skip_zero_embedding = true;
  const auto table = MakeTable(config);
  AssignRange(table.get(), 1, 5000);
  for (int round = 1; round < 20; ++round) {
    Ids ids;
    Floats values;
    for (int64_t i = 1; i < 5000; ++i) {
      ids.insert(ids.end(), {i, i, i + 100000 * round});
      values.insert(values.end(), {3.0f, i % 2 == 0 ? 0.0f : 4.0f, static_cast<float>(i)});
    }
    Assign(table.get(), ids, values);
    for (int64_t i = 1; i < 5000; ++i) {
      ASSERT_EQ(Lookup(*table, {i, i + 100000 * round}),
                (Floats{i % 2 == 0 ? 0.0f : 4.0f, static_cast<float>(i)}));
    }
  }
  EXPECT_EQ(table->Size(), 2500 + 19 * 4999);
}

// Calls `use` with the first, second, third ... allocation failing until none fails. A call that
// returns a Status may say ResourceExhausted; any may throw std::bad_alloc.
template <typename Prepare, typename Use, typename Check>
void FailEveryAllocation(const Prepare& prepare, const Use& use, const Check& check) {
  for (int64_t n = 0; n < 10000; ++n) {
    prepare();
    StatusCode code = StatusCode::kOk;
    allocations_failed.store(0);
    allocations_left.store(n);
    try {
      code = use().code;
    } catch (const std::bad_alloc&) {
    }
    allocations_left.store(-1);
    EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kResourceExhausted);
    check();
    if (::testing::Test::HasFatalFailure()) return;
    if (allocations_failed.load() == 0) return;
  }
  FAIL() << "allocates without end";
}

// Whatever allocation fails, no call ends the process or leaves a lock behind, and no row is torn:
// rows hold one value or another in all of their elements.
TEST(TableMemoryTest, AnyAllocationMayFail) {
  constexpr int64_t kDim = 8;
  constexpr int64_t kIds = 3000;
  ThreadPool pool(2);
  for (const bool parallel : {false, true}) {
    for (const bool dedup : {false, true}) {
      const auto table = MakeTable(AdagradConfig(kDim));
      std::atomic<int64_t> touched{0};
      table->SetTouchedCallback([&](const int64_t*, int64_t n) { touched += n; });
      Ids ids(kIds);
      Floats values(kIds * kDim), grads(kIds * kDim, 0.0f), out(kIds * kDim);
      OptimizeOptions optimize;
      const float rate = 0.1f;
      optimize.learning_rates = &rate;
      optimize.num_learning_rates = 1;
      optimize.dedup = dedup;
      if (parallel) optimize.write.runner = &pool;
      int64_t round = 0;
      const auto next = [&] {
        ++round;
        std::iota(ids.begin(), ids.end(), round * kIds / 2);
        std::fill(values.begin(), values.end(), static_cast<float>(round));
      };
      const auto check = [&] {
        for (int64_t i = 0; i < kIds; ++i) ids[i] = i * round;
        table->Lookup(ids.data(), kIds, out.data());
        for (int64_t i = 0; i < kIds; ++i) {
          for (int64_t k = 1; k < kDim; ++k) ASSERT_EQ(out[i * kDim + k], out[i * kDim]) << i;
        }
        const TableStats stats = table->Stats();
        ASSERT_EQ(stats.size, table->Size());
      };
      FailEveryAllocation(
          next,
          [&] {
            return table->Assign({ids.data(), kIds, values.data()}, optimize.write);
          },
          check);
      FailEveryAllocation(
          next,
          [&] {
            return table->Optimize({ids.data(), kIds, grads.data()}, optimize);
          },
          check);
      FailEveryAllocation(
          next,
          [&] {
            table->Lookup(ids.data(), kIds, out.data(), optimize.write.runner);
            return Status::Ok();
          },
          check);
      FailEveryAllocation(
          next,
          [&] {
            table->Clear();
            return Status::Ok();
          },
          check);
      EXPECT_EQ(table->Size(), 0);
      EXPECT_GT(touched.load(), 0);
    }
  }
}

TEST(TableMemoryTest, EvictionAndErasureNeedNoMemory) {
  TableConfig config = AdagradConfig(8);
  config.expiry.default_days = 1;
  const auto table = MakeTable(config);
  AssignRange(table.get(), 0, 200000, 1000);
  Ids ids(10000);
  std::iota(ids.begin(), ids.end(), 0);
  AssignRange(table.get(), 500000, 500001, 1000 + 3 * 86400);

  allocations_left.store(0);  // an index may stay as large as it is
  table->Erase(ids.data(), 10000);
  const int64_t evicted = table->Evict(table->expiry());
  allocations_left.store(-1);

  EXPECT_EQ(evicted, 190000);
  EXPECT_LT(table->Stats().row_memory, 10 * kMiB);
  EXPECT_EQ(table->Size(), 1);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
