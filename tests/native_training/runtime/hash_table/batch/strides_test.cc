// Lookups into, and updates from, rows that lie in the columns of a larger matrix.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

constexpr float kUntouched = -777.0f;
constexpr int64_t kColumn = 3;  // where rows begin in the matrix

std::unique_ptr<EmbeddingTable> FilledTable(int64_t dim, EntryType type) {
  auto table = MakeTable(MakeConfig({MakeSegment(dim, OptimizerKind::kAdagrad)}, type));
  Ids ids;
  Floats values;
  for (int64_t i = 0; i < 3000; ++i) {
    ids.push_back(i * 7);
    for (int64_t c = 0; c < dim; ++c) values.push_back(static_cast<float>(i % 50 + c));
  }
  Assign(table.get(), ids, values);
  return table;
}

Ids RandomIds(int64_t n, int64_t end) {
  std::mt19937_64 random(5);
  Ids ids(n);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % end);
  return ids;
}

// Every width that has code of its own, some others, and rows of another codec; with absent ids.
TEST(StridesTest, LookupsTouchTheirColumnsAlone) {
  ThreadPool pool(3);
  for (const EntryType type : {EntryType::kTraining, EntryType::kServing}) {
    for (const int64_t dim : {1, 4, 5, 8, 16, 32, 64}) {
      const auto table = FilledTable(dim, type);
      const int64_t width = dim + 7;
      for (const int64_t n : {1, 9, 9000}) {
        const Ids ids = RandomIds(n, 25000);
        const Floats wanted = Lookup(*table, ids);
        for (ParallelRunner* runner :
             {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
          Floats out(n * width, kUntouched);
          LookupRequest request{table.get(), ids.data(), n, out.data() + kColumn};
          request.stride = width;
          EmbeddingTable::LookupMany(&request, 1, runner);
          for (int64_t i = 0; i < n; ++i) {
            for (int64_t c = 0; c < width; ++c) {
              const bool is_row = c >= kColumn && c < kColumn + dim;
              ASSERT_EQ(out[i * width + c], is_row ? wanted[i * dim + c - kColumn] : kUntouched)
                  << "dim " << dim << ", row " << i << ", column " << c;
            }
          }
        }
      }
    }
  }
}

// Updates of one or two tables, in this thread and in several.
TEST(StridesTest, UpdatesReadTheirColumnsAlone) {
  ThreadPool pool(3);
  for (const int64_t dim : {1, 5, 16}) {
    for (const int64_t n : {1, 300, 20000}) {
      const Ids ids = RandomIds(n, n / 2 + 1);
      const int64_t width = 2 * dim + kColumn;
      std::mt19937_64 random(7);
      Floats matrix(n * width);
      for (float& value : matrix) value = static_cast<float>(random() % 64) / 8;
      for (ParallelRunner* runner :
           {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
        for (const int64_t num_tables : {1, 2}) {
          std::vector<std::unique_ptr<EmbeddingTable>> tables, peers;
          std::vector<WriteSpan> spans(num_tables);
          std::vector<OptimizeRequest> requests(num_tables);
          const float rates[] = {0.5f};
          for (int64_t t = 0; t < num_tables; ++t) {
            const int64_t column = kColumn + t * dim;
            tables.push_back(SgdTable(dim));
            peers.push_back(SgdTable(dim));
            Floats own;
            for (int64_t i = 0; i < n; ++i) {
              const float* const row = matrix.data() + i * width + column;
              own.insert(own.end(), row, row + dim);
            }
            Step step;
            step.rates = {0.5f};
            step.dedup = true;
            Optimize(peers.back().get(), ids, own, step);
            spans[t] = {ids.data(), n, matrix.data() + column, width};
            requests[t].table = tables.back().get();
            requests[t].spans = &spans[t];
            requests[t].num_spans = 1;
            requests[t].options.learning_rates = rates;
            requests[t].options.num_learning_rates = 1;
            requests[t].options.dedup = true;
          }
          ASSERT_TRUE(EmbeddingTable::OptimizeMany(requests.data(), num_tables, runner).ok());
          for (int64_t t = 0; t < num_tables; ++t) {
            EXPECT_EQ(Lookup(*tables[t], ids), Lookup(*peers[t], ids)) << "dim " << dim;
          }
        }
      }
    }
  }
}

TEST(StridesTest, OtherWritesRefuseThem) {
  const auto table = SgdTable(1);
  const Ids ids = {1, 2};
  const Floats values = {1, 2, 3, 4};
  const WriteSpan span{ids.data(), 2, values.data(), 2};
  const float rates[] = {0.5f};
  OptimizeOptions options;
  options.learning_rates = rates;
  options.num_learning_rates = 1;
  for (const Status& status :
       {table->Assign(span, {}), table->AssignAdd(span, {}), table->Optimize(span, options)}) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message.find("the stride is 2, want 0"), std::string::npos) << status.message;
  }
  EXPECT_EQ(table->Size(), 0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
