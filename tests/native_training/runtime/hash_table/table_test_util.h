// Short ways to say what the table tests need.
#ifndef TESTS_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_TEST_UTIL_H_
#define TESTS_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"

namespace monolith {
namespace engine {

inline SegmentConfig MakeSegment(int64_t dim, OptimizerKind kind) {
  SegmentConfig segment;
  segment.dim_size = dim;
  segment.optimizer.kind = kind;
  segment.initializer.kind = InitializerKind::kZeros;
  segment.compressor.kind = CompressorKind::kFp32;
  return segment;
}

inline TableConfig MakeConfig(std::vector<SegmentConfig> segments,
                              EntryType type = EntryType::kTraining) {
  TableConfig config;
  config.entry.type = type;
  config.entry.segments = std::move(segments);
  config.seed = 42;
  return config;
}

inline std::unique_ptr<EmbeddingTable> MakeTable(const TableConfig& config) {
  std::unique_ptr<EmbeddingTable> table;
  const Status status = EmbeddingTable::Create(config, &table);
  EXPECT_TRUE(status.ok()) << status.message;
  return table;
}

inline std::unique_ptr<EmbeddingTable> SgdTable(int64_t dim) {
  return MakeTable(MakeConfig({MakeSegment(dim, OptimizerKind::kSgd)}));
}

using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

inline Floats Lookup(const EmbeddingTable& table, const Ids& ids,
                     ParallelRunner* runner = nullptr) {
  Floats out(ids.size() * table.dim(), -777.0f);
  table.Lookup(ids.data(), static_cast<int64_t>(ids.size()), out.data(), runner);
  return out;
}

inline void Assign(EmbeddingTable* table, const Ids& ids, const Floats& values,
                   const WriteOptions& options = {}) {
  ASSERT_EQ(ids.size() * table->dim(), values.size());
  const Status status =
      table->Assign({ids.data(), static_cast<int64_t>(ids.size()), values.data()}, options);
  ASSERT_TRUE(status.ok()) << status.message;
}

inline void AssignAdd(EmbeddingTable* table, const Ids& ids, const Floats& values,
                      const WriteOptions& options = {}) {
  ASSERT_EQ(ids.size() * table->dim(), values.size());
  const Status status =
      table->AssignAdd({ids.data(), static_cast<int64_t>(ids.size()), values.data()}, options);
  ASSERT_TRUE(status.ok()) << status.message;
}

struct Step {
  Floats rates = {0.1f};
  int64_t global_step = 0;
  bool dedup = false;
  bool count_once = false;
  WriteOptions write = {};
};

inline Status TryOptimize(EmbeddingTable* table, const Ids& ids, const Floats& grads,
                          const Step& step) {
  OptimizeOptions options;
  options.write = step.write;
  options.learning_rates = step.rates.data();
  options.num_learning_rates = static_cast<int64_t>(step.rates.size());
  options.global_step = step.global_step;
  options.dedup = step.dedup;
  options.count_once = step.count_once;
  return table->Optimize({ids.data(), static_cast<int64_t>(ids.size()), grads.data()}, options);
}

inline void Optimize(EmbeddingTable* table, const Ids& ids, const Floats& grads,
                     const Step& step = {}) {
  ASSERT_EQ(ids.size() * table->dim(), grads.size());
  const Status status = TryOptimize(table, ids, grads, step);
  ASSERT_TRUE(status.ok()) << status.message;
}

inline void ExpectNear(const Floats& got, const Floats& want, float tolerance = 1e-6f) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], tolerance) << "element " << i;
}

// All records of a table, one string each, unframed.
inline std::vector<std::string> DumpRecords(const EmbeddingTable& table,
                                            const ExpiryPolicy* policy = nullptr,
                                            int64_t target_bytes = 4096) {
  std::vector<std::string> records;
  for (int shard = 0; shard < EmbeddingTable::NumShards(); ++shard) {
    ShardCursor cursor;
    while (!cursor.done) {
      std::string buffer;
      std::vector<int64_t> sizes;
      int64_t count = 0;
      const Status status =
          table.SaveShard(shard, policy, target_bytes, false, &cursor, &buffer, &sizes, &count);
      EXPECT_TRUE(status.ok()) << status.message;
      EXPECT_EQ(count, static_cast<int64_t>(sizes.size()));
      int64_t at = 0;
      for (const int64_t size : sizes) {
        records.push_back(buffer.substr(at, size));
        at += size;
      }
      EXPECT_EQ(at, static_cast<int64_t>(buffer.size()));
    }
  }
  return records;
}

inline Status LoadAll(EmbeddingTable* table, const std::vector<std::string>& records,
                      LoadStats* stats) {
  std::vector<RecordView> views;
  for (const std::string& record : records) {
    views.push_back({record.data(), static_cast<int64_t>(record.size())});
  }
  return table->LoadRecords(views.data(), static_cast<int64_t>(views.size()), stats);
}

// Replaces the content of `table` by `records`.
inline LoadStats Restore(EmbeddingTable* table, const std::vector<std::string>& records) {
  const std::unique_ptr<EmbeddingTable> twin = table->NewEmptyTwin();
  LoadStats stats;
  const Status status = LoadAll(twin.get(), records, &stats);
  EXPECT_TRUE(status.ok()) << status.message;
  table->SwapContent(twin.get());
  return stats;
}

inline std::string FromHex(const std::string& hex) {
  std::string bytes;
  std::string digits;
  for (const char c : hex) {
    if (c != ' ' && c != '|') digits.push_back(c);
  }
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

}  // namespace engine
}  // namespace monolith

#endif  // TESTS_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_TEST_UTIL_H_
