// EmbeddingTable::AssignDigested: it writes what Assign writes, and keeps the digest of the table.
// EmbeddingTable::LookupHashed: it reads what Lookup reads, and hashes it.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "monolith/native_training/runtime/row_log/table_digest.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

// Digests of a table, kept beside it.
class Digested {
 public:
  explicit Digested(EmbeddingTable* table) : table_(table) {}

  void Assign(const Ids& ids, const Floats& values, const WriteOptions& options = {}) {
    const Status status = table_->AssignDigested(
        {ids.data(), static_cast<int64_t>(ids.size()), values.data()}, options, &digest_);
    EXPECT_TRUE(status.ok()) << status.message;
    const TableDigest want = DigestOf(*table_);
    EXPECT_EQ(digest_.sum, want.sum);
    EXPECT_EQ(digest_.rows, want.rows);
  }
  int64_t rows() const { return digest_.rows; }

 private:
  EmbeddingTable* const table_;
  TableDigest digest_;
};

std::unique_ptr<SlidingHashFilter> MakeFilter(uint32_t threshold) {
  std::unique_ptr<SlidingHashFilter> filter;
  EXPECT_TRUE(SlidingHashFilter::Create(100000, 7, {threshold, {}}, &filter).ok());
  return filter;
}

TEST(AssignDigestedTest, ANewRowHeldNothingBeforeNotItsInitialValues) {
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kSgd);
  segment.initializer.kind = InitializerKind::kRandomUniform;
  const auto table = MakeTable(MakeConfig({segment}));
  Digested digested(table.get());

  digested.Assign({1, 2}, {1, 2, 3, 4});
  digested.Assign({2, 3}, {5, 6, 7, 8});
  EXPECT_EQ(digested.rows(), 3);
  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{1, 2, 5, 6, 7, 8}));
}

TEST(AssignDigestedTest, AnIdThatTheFilterDropsDoesNotCount) {
  const auto table = SgdTable(1);
  const auto filter = MakeFilter(2);
  WriteOptions options;
  options.filter = filter.get();
  Digested digested(table.get());

  digested.Assign({7, 8}, {1, 2}, options);
  EXPECT_EQ(digested.rows(), 0);
  digested.Assign({7, 7, 7}, {2, 3, 4}, options);
  EXPECT_EQ(digested.rows(), 1);
  EXPECT_EQ(Lookup(*table, {7}), (Floats{4}));
}

TEST(AssignDigestedTest, RowsThatZerosTakeAwayDoNotCountAnyMore) {
  TableConfig config = MakeConfig({MakeSegment(1, OptimizerKind::kSgd)}, EntryType::kServing);
  config.skip_zero_embedding = true;
  const auto table = MakeTable(config);
  Digested digested(table.get());

  // Set, erase, erase, set again, in one batch: all are in the pipeline together.
  digested.Assign({1, 1, 1, 1, 2, 1}, {5, 0, 0, 6, 7, 8});
  EXPECT_EQ(digested.rows(), 2);
  digested.Assign({2, 1, 3}, {0, 9, 0});
  EXPECT_EQ(digested.rows(), 1);
  EXPECT_EQ(table->Size(), 1);
}

TEST(AssignDigestedTest, AnEmptyBatchIsLegalAndANegativeOneIsNot) {
  const auto table = SgdTable(1);
  TableDigest digest;
  EXPECT_TRUE(table->AssignDigested({nullptr, 0, nullptr}, {}, &digest).ok());
  EXPECT_EQ(table->AssignDigested({nullptr, -1, nullptr}, {}, &digest).code,
            StatusCode::kInvalidArgument);
  EXPECT_EQ(digest.rows, 0);
}

struct Case {
  std::string name;
  TableConfig config;
  bool filtered = false;
};

std::vector<Case> Cases() {
  SegmentConfig fp32 = MakeSegment(16, OptimizerKind::kAdagrad);
  SegmentConfig fp32_of_five = MakeSegment(5, OptimizerKind::kSgd);
  SegmentConfig adam = MakeSegment(16, OptimizerKind::kAdam);
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
          {"training in rows that cross cache lines", MakeConfig({adam})},
          {"serving", MakeConfig({fp32}, EntryType::kServing)},
          {"serving of two segments", MakeConfig({fp32, fp32_of_five}, EntryType::kServing)},
          {"serving of codes", MakeConfig({fp16, byte}, EntryType::kServing)},
          {"without zeros", skips},
          {"codes without zeros", half_skips},
          {"filtered", MakeConfig({fp32}), true},
          {"filtered, without zeros", skips, true}};
}

// Batches of ids that come again at any distance, of all shards, many of them new.
TEST(AssignDigestedTest, IsAnAssignOfOneIdAfterAnother) {
  ThreadPool pool(2);
  for (const Case& test : Cases()) {
    for (ParallelRunner* runner :
         {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
      SCOPED_TRACE(test.name + (runner == nullptr ? "" : ", two threads"));
      const auto table = MakeTable(test.config);
      const auto one_by_one = MakeTable(test.config);
      const auto filter = MakeFilter(2), filter_of_one = MakeFilter(2);
      const int64_t dim = table->dim();
      Digested digested(table.get());
      std::mt19937_64 random(3);
      for (const int64_t n : {1, 7, 300, 3000}) {
        Ids ids;
        Floats values;
        for (int64_t i = 0; i < n; ++i) {
          const bool zero = random() % 3 == 0;
          ids.push_back(static_cast<int64_t>(random() % (n / 2 + 1)) << 40);
          for (int64_t k = 0; k < dim; ++k) {
            values.push_back(zero ? 0.0f : static_cast<float>(random() % 1000) * 0.004f + 0.1f);
          }
          const Floats row(values.end() - dim, values.end());
          WriteOptions options;
          options.filter = test.filtered ? filter_of_one.get() : nullptr;
          Assign(one_by_one.get(), {ids.back()}, row, options);
        }
        WriteOptions options;
        options.runner = runner;
        options.filter = test.filtered ? filter.get() : nullptr;
        digested.Assign(ids, values, options);
        ASSERT_FALSE(testing::Test::HasFailure());
        ASSERT_EQ(Lookup(*table, ids), Lookup(*one_by_one, ids));
        ASSERT_EQ(table->Size(), one_by_one->Size());
      }
    }
  }
}

TEST(LookupHashedTest, HashesWhatALookupReturns) {
  for (const Case& test : Cases()) {
    SCOPED_TRACE(test.name);
    const auto table = MakeTable(test.config);
    const int64_t dim = table->dim();
    Ids ids;
    Floats values;
    std::mt19937_64 random(5);
    for (int64_t i = 0; i < 20000; ++i) {
      ids.push_back(static_cast<int64_t>(random()));
      for (int64_t k = 0; k < dim; ++k) {
        values.push_back(i % 50 == 0 ? 0.0f : static_cast<float>(random() % 1000) * 0.004f + 0.1f);
      }
    }
    Assign(table.get(), ids, values);
    for (int64_t i = 0; i < 1000; ++i) ids.push_back(static_cast<int64_t>(random()));  // absent

    const Floats want = Lookup(*table, ids);
    Floats rows(want.size(), -777.0f);
    std::vector<uint64_t> hashes(ids.size(), 777);
    table->LookupHashed(ids.data(), static_cast<int64_t>(ids.size()), rows.data(), hashes.data());
    ASSERT_EQ(rows, want);
    int64_t zeros = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      ASSERT_EQ(hashes[i], RowHash(ids[i], want.data() + i * dim, dim)) << i;
      zeros += hashes[i] == 0;
    }
    EXPECT_GE(zeros, 1000);
    EXPECT_LT(zeros, 2000);
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
