// EmbeddingTable::Exchange: it writes what Assign writes, and tells what a lookup would have
// returned just before each id's turn.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

Floats Exchange(EmbeddingTable* table, const Ids& ids, const Floats& values,
                const WriteOptions& options = {}) {
  Floats before(values.size(), -777.0f);
  const Status status = table->Exchange(
      {ids.data(), static_cast<int64_t>(ids.size()), values.data()}, options, before.data());
  EXPECT_TRUE(status.ok()) << status.message;
  return before;
}

std::unique_ptr<SlidingHashFilter> MakeFilter(uint32_t threshold) {
  std::unique_ptr<SlidingHashFilter> filter;
  EXPECT_TRUE(SlidingHashFilter::Create(100000, 7, {threshold, {}}, &filter).ok());
  return filter;
}

TEST(ExchangeTest, ANewRowHeldZerosNotItsInitialValues) {
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kSgd);
  segment.initializer.kind = InitializerKind::kRandomUniform;
  const auto table = MakeTable(MakeConfig({segment}));

  EXPECT_EQ(Exchange(table.get(), {1, 2}, {1, 2, 3, 4}), (Floats{0, 0, 0, 0}));
  EXPECT_EQ(Exchange(table.get(), {2, 3}, {5, 6, 7, 8}), (Floats{3, 4, 0, 0}));
  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{1, 2, 5, 6, 7, 8}));
}

TEST(ExchangeTest, AnIdThatTheFilterDropsHeldZeros) {
  const auto table = SgdTable(1);
  const auto filter = MakeFilter(2);
  WriteOptions options;
  options.filter = filter.get();

  EXPECT_EQ(Exchange(table.get(), {7, 7, 7, 7}, {1, 2, 3, 4}, options), (Floats{0, 0, 0, 3}));
  EXPECT_EQ(Lookup(*table, {7}), (Floats{4}));
}

TEST(ExchangeTest, RowsThatZerosTakeAwayAreTold) {
  TableConfig config = MakeConfig({MakeSegment(1, OptimizerKind::kSgd)}, EntryType::kServing);
  config.skip_zero_embedding = true;
  const auto table = MakeTable(config);

  // Set, erase, erase, set again, in one batch: all are in the pipeline together.
  EXPECT_EQ(Exchange(table.get(), {1, 1, 1, 1, 2, 1}, {5, 0, 0, 6, 7, 8}),
            (Floats{0, 5, 0, 0, 0, 6}));
  EXPECT_EQ(Exchange(table.get(), {2, 1, 3}, {0, 9, 0}), (Floats{7, 8, 0}));
  EXPECT_EQ(table->Size(), 1);
}

TEST(ExchangeTest, AnEmptyBatchIsLegalAndANegativeOneIsNot) {
  const auto table = SgdTable(1);
  EXPECT_TRUE(table->Exchange({nullptr, 0, nullptr}, {}, nullptr).ok());
  EXPECT_EQ(table->Exchange({nullptr, -1, nullptr}, {}, nullptr).code,
            StatusCode::kInvalidArgument);
}

struct Case {
  std::string name;
  TableConfig config;
  bool filtered = false;
};

std::vector<Case> Cases() {
  SegmentConfig fp32 = MakeSegment(16, OptimizerKind::kAdagrad);
  SegmentConfig fp16 = MakeSegment(3, OptimizerKind::kSgd);
  fp16.compressor.kind = CompressorKind::kFp16;
  SegmentConfig byte = fp16;
  byte.compressor.kind = CompressorKind::kFixedR8;
  byte.compressor.range = 5.0f;
  SegmentConfig hash_net = fp16;
  hash_net.compressor.kind = CompressorKind::kOneBit;
  TableConfig skips = MakeConfig({fp32}, EntryType::kServing);
  skips.skip_zero_embedding = true;
  TableConfig half_skips = MakeConfig({fp16, byte}, EntryType::kServing);
  half_skips.skip_zero_embedding = true;
  return {{"training", MakeConfig({fp32})},
          {"training of two segments", MakeConfig({fp32, fp16})},
          {"training with retrievers", MakeConfig({byte, hash_net})},
          {"serving", MakeConfig({fp32}, EntryType::kServing)},
          {"serving of codes", MakeConfig({fp16, byte}, EntryType::kServing)},
          {"without zeros", skips},
          {"codes without zeros", half_skips},
          {"filtered", MakeConfig({fp32}), true},
          {"filtered, without zeros", skips, true}};
}

// Batches of ids that come again at any distance, of all shards, many of them new.
TEST(ExchangeTest, IsALookupAndAnAssignOfOneIdAfterAnother) {
  ThreadPool pool(2);
  for (const Case& test : Cases()) {
    for (ParallelRunner* runner :
         {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
      SCOPED_TRACE(test.name + (runner == nullptr ? "" : ", two threads"));
      const auto table = MakeTable(test.config);
      const auto one_by_one = MakeTable(test.config);
      const auto filter = MakeFilter(2), filter_of_one = MakeFilter(2);
      const int64_t dim = table->dim();
      std::mt19937_64 random(3);
      for (const int64_t n : {1, 7, 300, 3000}) {
        Ids ids;
        Floats values, want;
        for (int64_t i = 0; i < n; ++i) {
          const bool zero = random() % 3 == 0;
          ids.push_back(static_cast<int64_t>(random() % (n / 2 + 1)) << 40);
          for (int64_t k = 0; k < dim; ++k) {
            values.push_back(zero ? 0.0f : static_cast<float>(random() % 1000) * 0.004f + 0.1f);
          }
          const Floats row(values.end() - dim, values.end());
          const Floats held = Lookup(*one_by_one, {ids.back()});
          want.insert(want.end(), held.begin(), held.end());
          WriteOptions options;
          options.filter = test.filtered ? filter_of_one.get() : nullptr;
          Assign(one_by_one.get(), {ids.back()}, row, options);
        }
        WriteOptions options;
        options.runner = runner;
        options.filter = test.filtered ? filter.get() : nullptr;
        ASSERT_EQ(Exchange(table.get(), ids, values, options), want);
        ASSERT_EQ(Lookup(*table, ids), Lookup(*one_by_one, ids));
        ASSERT_EQ(table->Size(), one_by_one->Size());
      }
    }
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
