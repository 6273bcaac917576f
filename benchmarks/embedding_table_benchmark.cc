// Measures the embedding-table engine alone: batches of 100k ids, M ids/s in the counter `Mids`.
//
//   embedding_table_benchmark --benchmark_filter='Lookup/10000000/16'
//
// Arguments of most cases: rows, dim, threads. Tables are built once per (rows, dim) and kept until
// another is needed.
#include <benchmark/benchmark.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"

namespace {

using namespace monolith::engine;

constexpr int64_t kBatch = 100000;

TableConfig Config(int64_t dim, OptimizerKind kind) {
  SegmentConfig segment;
  segment.dim_size = dim;
  segment.optimizer.kind = kind;
  segment.initializer.kind = InitializerKind::kZeros;
  segment.compressor.kind = CompressorKind::kFp32;
  TableConfig config;
  config.entry.segments.push_back(segment);
  config.seed = 1;
  return config;
}

// How the i-th id of a table is made.
enum class Ids { kRandom, kSequential, kHighBits20, kHighBits32, kBitReversed };

int64_t IdOf(Ids kind, int64_t i) {
  const uint64_t u = static_cast<uint64_t>(i);
  switch (kind) {
    case Ids::kSequential:
      return i;
    case Ids::kHighBits20:
      return static_cast<int64_t>(u << 20);
    case Ids::kHighBits32:
      return static_cast<int64_t>(u << 32);
    case Ids::kBitReversed: {
      uint64_t reversed = 0;
      for (int bit = 0; bit < 64; ++bit) reversed |= ((u >> bit) & 1) << (63 - bit);
      return static_cast<int64_t>(reversed);
    }
    default:
      return static_cast<int64_t>((u + 1) * 0x9e3779b97f4a7c15ull);
  }
}

int64_t ResidentBytes() {
  long pages = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

void Check(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    std::abort();
  }
}

void InsertRange(EmbeddingTable* table, Ids kind, int64_t begin, int64_t end,
                 const std::vector<float>& grads, std::vector<int64_t>* ids) {
  const float rate = 0.01f;
  OptimizeOptions options;
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  ids->resize(end - begin);
  for (int64_t i = begin; i < end; ++i) (*ids)[i - begin] = IdOf(kind, i);
  Check(table->Optimize({ids->data(), end - begin, grads.data()}, options));
}

struct Built {
  int64_t rows = 0, dim = 0;
  Ids kind = Ids::kRandom;
  OptimizerKind optimizer = OptimizerKind::kAdagrad;
  double bytes_per_row = 0;
  std::unique_ptr<EmbeddingTable> table;
};

// Returns the table of the current case. Frees the previous one before building another.
const Built& GetTable(int64_t rows, int64_t dim, Ids kind = Ids::kRandom,
                      OptimizerKind optimizer = OptimizerKind::kAdagrad) {
  static Built built;
  if (built.rows == rows && built.dim == dim && built.kind == kind &&
      built.optimizer == optimizer) {
    return built;
  }
  built.table.reset();
  const std::vector<float> grads(kBatch * dim, 1.0f);
  std::vector<int64_t> ids(kBatch);
  const int64_t before = ResidentBytes();
  Check(EmbeddingTable::Create(Config(dim, optimizer), &built.table));
  for (int64_t i = 0; i < rows; i += kBatch) {
    InsertRange(built.table.get(), kind, i, std::min(rows, i + kBatch), grads, &ids);
  }
  built.rows = rows;
  built.dim = dim;
  built.kind = kind;
  built.optimizer = optimizer;
  built.bytes_per_row = static_cast<double>(ResidentBytes() - before) / static_cast<double>(rows);
  return built;
}

// Draws ranks with probability ~ 1 / rank^1.05, by inverting the continuous distribution.
int64_t ZipfRank(std::mt19937_64* random, int64_t n) {
  constexpr double kExponent = 1.05;
  const double u = std::uniform_real_distribution<double>(0.0, 1.0)(*random);
  const double power = 1.0 - kExponent;
  const double top = std::pow(static_cast<double>(n) + 1.0, power);
  const double rank = std::pow(1.0 + u * (top - 1.0), 1.0 / power);
  return std::min<int64_t>(n - 1, static_cast<int64_t>(rank) - 1);
}

// Makes several batches, so that none is still in the cache from the last round.
std::vector<std::vector<int64_t>> Batches(int64_t rows, Ids kind, bool zipf, int64_t offset = 0) {
  std::mt19937_64 random(7);
  std::vector<std::vector<int64_t>> batches(16, std::vector<int64_t>(kBatch));
  for (auto& batch : batches) {
    for (int64_t& id : batch) {
      const int64_t rank = zipf ? ZipfRank(&random, rows) : static_cast<int64_t>(random() % rows);
      id = IdOf(kind, offset + rank);
    }
  }
  return batches;
}

void SetRate(benchmark::State& state) {
  state.counters["Mids"] = benchmark::Counter(
      static_cast<double>(state.iterations() * kBatch) / 1e6, benchmark::Counter::kIsRate);
}

std::unique_ptr<ThreadPool> Pool(int64_t threads) {
  return threads > 1 ? std::make_unique<ThreadPool>(static_cast<int>(threads)) : nullptr;
}

void RunLookup(benchmark::State& state, Ids kind, bool zipf, bool hit) {
  const int64_t rows = state.range(0), dim = state.range(1);
  const Built& built = GetTable(rows, dim, kind);
  const auto pool = Pool(state.range(2));
  const auto batches = Batches(rows, kind, zipf, hit ? 0 : rows);
  std::vector<float> out(kBatch * dim);
  size_t next = 0;
  for (auto _ : state) {
    built.table->Lookup(batches[next++ % batches.size()].data(), kBatch, out.data(), pool.get());
    benchmark::DoNotOptimize(out.data());
  }
  SetRate(state);
  state.counters["B/row"] = built.bytes_per_row;
}

void Lookup(benchmark::State& state) { RunLookup(state, Ids::kRandom, false, true); }
void LookupZipf(benchmark::State& state) { RunLookup(state, Ids::kRandom, true, true); }
void LookupMiss(benchmark::State& state) { RunLookup(state, Ids::kRandom, false, false); }
void LookupSequential(benchmark::State& state) { RunLookup(state, Ids::kSequential, false, true); }
void LookupTimes2To20(benchmark::State& state) { RunLookup(state, Ids::kHighBits20, false, true); }
void LookupTimes2To32(benchmark::State& state) { RunLookup(state, Ids::kHighBits32, false, true); }
void LookupReversed(benchmark::State& state) { RunLookup(state, Ids::kBitReversed, false, true); }

constexpr int kTables = 26;

std::vector<std::unique_ptr<EmbeddingTable>> ManyTables(int64_t rows, int64_t dim) {
  GetTable(1, 1);  // frees a large table of an earlier case
  std::vector<std::unique_ptr<EmbeddingTable>> tables(kTables);
  const std::vector<float> grads(rows * dim, 1.0f);
  std::vector<int64_t> ids;
  for (auto& table : tables) {
    Check(EmbeddingTable::Create(Config(dim, OptimizerKind::kAdagrad), &table));
    InsertRange(table.get(), Ids::kRandom, 0, rows, grads, &ids);
  }
  return tables;
}

// Hands out n ids at a time, and repeats itself only after a long while.
class IdSource {
 public:
  IdSource(int64_t rows, int64_t n) : batches_(Batches(rows, Ids::kRandom, false)), n_(n) {}

  const int64_t* Next() {
    const int64_t per_batch = kBatch / n_;
    const int64_t at = next_++ % (per_batch * static_cast<int64_t>(batches_.size()));
    return batches_[at / per_batch].data() + at % per_batch * n_;
  }

 private:
  const std::vector<std::vector<int64_t>> batches_;
  const int64_t n_;
  int64_t next_ = 0;
};

void SetManyRate(benchmark::State& state, int64_t n) {
  state.counters["Mids"] = benchmark::Counter(
      static_cast<double>(state.iterations() * kTables * n) / 1e6, benchmark::Counter::kIsRate);
}

// Looks up 26 tables in one call or one by one. Arguments: rows, dim, ids per table.
void RunTables(benchmark::State& state, bool fused) {
  const int64_t rows = state.range(0), dim = state.range(1), n = state.range(2);
  const auto tables = ManyTables(rows, dim);
  IdSource ids(rows, n);
  std::vector<float> out(kTables * n * dim);
  for (auto _ : state) {
    std::vector<LookupRequest> requests;
    for (int t = 0; t < kTables; ++t) {
      requests.push_back({tables[t].get(), ids.Next(), n, out.data() + t * n * dim});
    }
    if (fused) {
      EmbeddingTable::LookupMany(requests.data(), kTables, nullptr);
    } else {
      for (const LookupRequest& r : requests) r.table->Lookup(r.ids, r.n, r.out);
    }
    benchmark::DoNotOptimize(out.data());
  }
  SetManyRate(state, n);
}

void LookupManyTables(benchmark::State& state) { RunTables(state, true); }
void LookupTableByTable(benchmark::State& state) { RunTables(state, false); }

// Arguments: rows, dim, ids per table, threads.
void UpdateManyTables(benchmark::State& state) {
  const int64_t rows = state.range(0), dim = state.range(1), n = state.range(2);
  const auto tables = ManyTables(rows, dim);
  const auto pool = Pool(state.range(3));
  IdSource ids(rows, n);
  const std::vector<float> grads(kTables * n * dim, 0.01f);
  const float rate = 0.01f;
  for (auto _ : state) {
    std::vector<WriteSpan> spans(kTables);
    std::vector<OptimizeRequest> requests(kTables);
    for (int t = 0; t < kTables; ++t) {
      spans[t] = {ids.Next(), n, grads.data() + t * n * dim};
      requests[t].table = tables[t].get();
      requests[t].spans = &spans[t];
      requests[t].num_spans = 1;
      requests[t].options.learning_rates = &rate;
      requests[t].options.num_learning_rates = 1;
    }
    Check(EmbeddingTable::OptimizeMany(requests.data(), kTables, pool.get()));
  }
  SetManyRate(state, n);
}

void RunUpdate(benchmark::State& state, OptimizerKind optimizer, bool zipf) {
  const int64_t rows = state.range(0), dim = state.range(1);
  const Built& built = GetTable(rows, dim, Ids::kRandom, optimizer);
  const auto pool = Pool(state.range(2));
  const auto batches = Batches(rows, Ids::kRandom, zipf);
  const std::vector<float> grads(kBatch * dim, 0.01f);
  const float rate = 0.01f;
  OptimizeOptions options;
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  options.write.runner = pool.get();
  size_t next = 0;
  for (auto _ : state) {
    Check(built.table->Optimize({batches[next++ % batches.size()].data(), kBatch, grads.data()},
                                options));
  }
  SetRate(state);
}

void UpdateAdagrad(benchmark::State& state) { RunUpdate(state, OptimizerKind::kAdagrad, false); }
void UpdateAdagradZipf(benchmark::State& state) { RunUpdate(state, OptimizerKind::kAdagrad, true); }
void UpdateSgd(benchmark::State& state) { RunUpdate(state, OptimizerKind::kSgd, false); }
void UpdateAdam(benchmark::State& state) { RunUpdate(state, OptimizerKind::kAdam, false); }
void UpdateFtrl(benchmark::State& state) { RunUpdate(state, OptimizerKind::kFtrl, false); }

// Grows a table from empty: mean speed, and the slowest batch as a multiple of the median.
void Insert(benchmark::State& state) {
  const int64_t rows = state.range(0), dim = state.range(1);
  GetTable(1, 1);  // frees a large table of an earlier case
  const std::vector<float> grads(kBatch * dim, 1.0f);
  std::vector<int64_t> ids(kBatch);
  std::vector<double> seconds;
  for (auto _ : state) {
    std::unique_ptr<EmbeddingTable> table;
    Check(EmbeddingTable::Create(Config(dim, OptimizerKind::kAdagrad), &table));
    for (int64_t i = 0; i < rows; i += kBatch) {
      const auto begin = std::chrono::steady_clock::now();
      InsertRange(table.get(), Ids::kRandom, i, std::min(rows, i + kBatch), grads, &ids);
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    state.PauseTiming();
    table.reset();
    state.ResumeTiming();
  }
  std::sort(seconds.begin(), seconds.end());
  state.counters["Mids"] = benchmark::Counter(static_cast<double>(state.iterations() * rows) / 1e6,
                                              benchmark::Counter::kIsRate);
  state.counters["median_ms"] = seconds[seconds.size() / 2] * 1e3;
  state.counters["worst_ms"] = seconds.back() * 1e3;
  state.counters["worst/median"] = seconds.back() / seconds[seconds.size() / 2];
}

double ThreadCpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The pauses that growth makes: CPU time of batches of 1,024 new ids, over the last quarter of the
// rows, which has to be as short in a large table as in a small one. Arguments: rows, dim.
void GrowthPauses(benchmark::State& state) {
  constexpr int64_t kSmallBatch = 1024;
  const int64_t rows = state.range(0), dim = state.range(1);
  GetTable(1, 1);  // frees a large table of an earlier case
  const std::vector<float> grads(kSmallBatch * dim, 1.0f);
  std::vector<int64_t> ids(kSmallBatch);
  std::vector<double> ms;
  for (auto _ : state) {
    std::unique_ptr<EmbeddingTable> table;
    Check(EmbeddingTable::Create(Config(dim, OptimizerKind::kSgd), &table));
    for (int64_t i = 0; i < rows; i += kSmallBatch) {
      const double begin = ThreadCpuSeconds();
      InsertRange(table.get(), Ids::kRandom, i, std::min(rows, i + kSmallBatch), grads, &ids);
      if (i >= rows / 4 * 3) ms.push_back((ThreadCpuSeconds() - begin) * 1e3);
    }
  }
  std::sort(ms.begin(), ms.end());
  state.counters["p50_ms"] = ms[ms.size() / 2];
  state.counters["p99_ms"] = ms[ms.size() * 99 / 100];
  state.counters["p999_ms"] = ms[ms.size() * 999 / 1000];
  state.counters["worst_ms"] = ms.back();
}

// Encodes all rows as framed records, without writing them anywhere.
void Save(benchmark::State& state) {
  const Built& built = GetTable(state.range(0), state.range(1));
  std::string buffer;
  int64_t bytes = 0, records = 0;
  for (auto _ : state) {
    for (int shard = 0; shard < EmbeddingTable::NumShards(); ++shard) {
      ShardCursor cursor;
      while (!cursor.done) {
        buffer.clear();
        Check(built.table->SaveShard(shard, nullptr, int64_t{4} << 20, true, &cursor, &buffer,
                                     nullptr, &records));
        bytes += static_cast<int64_t>(buffer.size());
      }
    }
  }
  state.SetBytesProcessed(bytes);
  state.counters["Mids"] =
      benchmark::Counter(static_cast<double>(records) / 1e6, benchmark::Counter::kIsRate);
}

constexpr int64_t kMillion = 1000000;

#define SIZES(threads)                \
  Args({10000, 16, threads})          \
      ->Args({kMillion, 8, threads})  \
      ->Args({kMillion, 16, threads}) \
      ->Args({kMillion, 64, threads}) \
      ->Args({10 * kMillion, 16, threads})

// Shows how speed scales with threads, on machines that have the cores.
#define MANY_THREADS \
  Args({10 * kMillion, 16, 4})->Args({10 * kMillion, 16, 8})->Args({10 * kMillion, 16, 16})

BENCHMARK(Lookup)->SIZES(1)->SIZES(2)->MANY_THREADS->UseRealTime();
BENCHMARK(LookupZipf)->SIZES(1)->UseRealTime();
BENCHMARK(LookupMiss)->Args({kMillion, 16, 1})->Args({10 * kMillion, 16, 1})->UseRealTime();
BENCHMARK(LookupSequential)->Args({kMillion, 16, 1})->UseRealTime();
BENCHMARK(LookupTimes2To20)->Args({kMillion, 16, 1})->UseRealTime();
BENCHMARK(LookupTimes2To32)->Args({kMillion, 16, 1})->UseRealTime();
BENCHMARK(LookupReversed)->Args({kMillion, 16, 1})->UseRealTime();
BENCHMARK(LookupManyTables)->Args({100000, 16, 128})->Args({100000, 16, 512})->UseRealTime();
BENCHMARK(LookupTableByTable)->Args({100000, 16, 128})->Args({100000, 16, 512})->UseRealTime();
BENCHMARK(UpdateAdagrad)->SIZES(1)->SIZES(2)->MANY_THREADS->UseRealTime();
BENCHMARK(UpdateManyTables)
    ->Args({100000, 16, 512, 1})
    ->Args({100000, 16, 512, 2})
    ->Args({100000, 16, 3846, 1})
    ->Args({100000, 16, 3846, 2})
    ->UseRealTime();
BENCHMARK(UpdateAdagradZipf)->SIZES(1)->UseRealTime();
BENCHMARK(UpdateSgd)->Args({kMillion, 32, 1})->UseRealTime();
BENCHMARK(UpdateAdam)->Args({kMillion, 32, 1})->UseRealTime();
BENCHMARK(UpdateFtrl)->Args({kMillion, 32, 1})->UseRealTime();
BENCHMARK(Insert)->Args({10 * kMillion, 16, 1})->Iterations(1)->UseRealTime();
BENCHMARK(GrowthPauses)
    ->Args({4 * kMillion, 1})
    ->Args({16 * kMillion, 1})
    ->Args({67 * kMillion, 1})
    ->Iterations(1);
BENCHMARK(Save)->Args({kMillion, 16, 1})->UseRealTime();
// Shows the cost per id as the table grows.
BENCHMARK(Lookup)->Args({40 * kMillion, 8, 1})->UseRealTime();
BENCHMARK(UpdateAdagrad)->Args({40 * kMillion, 8, 1})->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
