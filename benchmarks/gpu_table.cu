// Checks the GPU table against the engine's table, and measures it.
//
//   tools/gpu_table_check.sh FOLDER      builds this without TensorFlow and Python, and runs it
//
//   gpu_table check [first] [last]       random calls on both tables (configurations by number)
//   gpu_table bench DIM ROWS [adagrad|sgd]
//   gpu_table insert DIM ROWS            from empty, growth included; every id is found again
//   gpu_table memory                     runs into a small budget and goes on
//
// Without nvcc only `check` and `memory` are there, on the loops that stand for the kernels.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizer_rules.h"
#include "tests/native_training/runtime/gpu/table_differential.h"

namespace monolith {
namespace gpu {
namespace {

#define MUST(call)                                                  \
  do {                                                              \
    if ((call) != MONO_GPU_OK) {                                    \
      std::printf("%s failed: %s\n", #call, mono_gpu_last_error()); \
      std::exit(1);                                                 \
    }                                                               \
  } while (false)

int Check(int first, int last) {
  int failed = 0;
  for (int number = first; number < last; ++number) {
    for (const uint32_t seed : {1u, 2u}) {
      DifferentialOptions options;
      options.seed = seed + static_cast<uint32_t>(number) * 10;
      if (number % 4 == 3) options.threshold = 3;
      if (seed == 2) {
        options.max_batch = 20000;
        options.distinct_ids = 30000;
        options.steps = 12;
      }
      Differential differential(DifferentialConfig(number), options);
      const std::string error = differential.Run();
      if (error.empty()) continue;
      std::printf("configuration %d, seed %u: %s\n", number, seed, error.c_str());
      ++failed;
    }
  }
  std::printf("check: %d configurations, %d failed\n", last - first, failed);
  return failed == 0 ? 0 : 1;
}

engine::TableConfig OneSegment(int64_t dim, engine::OptimizerKind kind) {
  engine::TableConfig config;
  engine::SegmentConfig segment;
  segment.dim_size = dim;
  segment.optimizer.kind = kind;
  segment.initializer.kind = engine::InitializerKind::kRandomUniform;
  config.entry.segments.push_back(segment);
  config.seed = 99;
  return config;
}

// What does not fit is refused, and the table stays as it was.
int Memory() {
  MUST(mono_gpu_table_set_budget(int64_t{64} << 20));
  TablePointer table;
  MUST(CreateTable(OneSegment(16, engine::OptimizerKind::kAdagrad), &table));
  const int64_t n = 50000;
  MonoGpuWriteOptions options = {};
  const float rate = 0.1f;
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  std::vector<float> gradients(n * 16, 0.5f);
  Array<float> device_gradients(gradients);
  int64_t rows = 0;
  int code = MONO_GPU_OK;
  for (int batch = 0; batch < 100 && code == MONO_GPU_OK; ++batch) {
    std::vector<int64_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = batch * n + i;
    Array<int64_t> device_ids(ids);
    code = mono_gpu_table_optimize(table.get(), nullptr, device_ids.data(), n,
                                   device_gradients.data(), &options);
    MUST(mono_gpu_synchronize(nullptr));
    if (code == MONO_GPU_OK) rows += n;
  }
  std::printf("memory: code %d after %lld rows: %s\n", code, static_cast<long long>(rows),
              mono_gpu_last_error());
  MonoGpuTableStats stats;
  MUST(mono_gpu_table_stats(table.get(), &stats));
  bool good = code == MONO_GPU_OUT_OF_MEMORY && stats.size == rows && rows > 0;
  std::vector<int64_t> ids(rows);
  for (int64_t i = 0; i < rows; ++i) ids[i] = i;
  Array<int64_t> device_ids(ids);
  Array<float> out(rows * 16);
  Array<uint8_t> found(rows);
  MUST(mono_gpu_table_lookup(table.get(), nullptr, device_ids.data(), rows, out.data(),
                             found.data()));
  for (const uint8_t there : found.Read()) good &= there == 1;
  MUST(mono_gpu_table_set_budget(0));
  std::printf("memory: %s\n", good ? "passed" : "FAILED");
  return good ? 0 : 1;
}

#if defined(__CUDACC__)

// Ids that look random: the hash of a number.
MONO_DEVICE int64_t IdOf(uint64_t number) {
  uint64_t x = number + 0x9e3779b97f4a7c15ull;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  return static_cast<int64_t>(x);
}

struct MakeIds {
  int64_t begin;
  int64_t* ids;
  MONO_DEVICE void operator()(int64_t i) const { ids[i] = IdOf(begin + i); }
};

// Distinct numbers below `rows` that look random: i * prime + offset, modulo rows.
struct PickNumbers {
  int64_t rows;
  int64_t offset;
  int64_t* ids;
  uint32_t* numbers;
  MONO_DEVICE void operator()(int64_t i) const {
    const int64_t number = static_cast<int64_t>(
        (static_cast<unsigned __int128>(i + offset) * 2654435761ull) % static_cast<uint64_t>(rows));
    ids[i] = IdOf(number);
    numbers[i] = static_cast<uint32_t>(number) + 1;
  }
};

struct FillFloats {
  float* values;
  MONO_DEVICE void operator()(int64_t i) const {
    values[i] = 0.001f * static_cast<float>(i % 1000 + 1);
  }
};

// The bound: the same rows by number.
template <int kTile>
struct GatherByNumber {
  const float* rows;
  int64_t stride;  // floats
  const uint32_t* numbers;
  int64_t n;
  float* out;
  int dim;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t i = tile * (kLanes / kTile) + lane / kTile;
    if (i >= n) return;
    const int c = lane % kTile * 4;
    if (c >= dim) return;
    const float4 v = __ldcs(reinterpret_cast<const float4*>(rows + numbers[i] * stride + c));
    __stcs(reinterpret_cast<float4*>(out + i * dim + c), v);
  }
};

template <int kTile>
struct AdagradByNumber {
  float* rows;
  int64_t stride;
  const uint32_t* numbers;
  int64_t n;
  const float* gradients;
  int dim;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t i = tile * (kLanes / kTile) + lane / kTile;
    if (i >= n) return;
    const int c = lane % kTile * 4;
    if (c >= dim) return;
    float* const row = rows + numbers[i] * stride + c;
    float4 w = *reinterpret_cast<float4*>(row);
    float4 s = *reinterpret_cast<float4*>(row + dim);
    const float4 g = __ldcs(reinterpret_cast<const float4*>(gradients + i * dim + c));
    engine::AdagradRule(0.01f, 0.0f, g.x, &w.x, &s.x);
    engine::AdagradRule(0.01f, 0.0f, g.y, &w.y, &s.y);
    engine::AdagradRule(0.01f, 0.0f, g.z, &w.z, &s.z);
    engine::AdagradRule(0.01f, 0.0f, g.w, &w.w, &s.w);
    *reinterpret_cast<float4*>(row) = w;
    *reinterpret_cast<float4*>(row + dim) = s;
  }
};

struct Timing {
  double median = 0;
  double worst = 0;
};

// Microseconds of run(i), each on an idle device, by events.
template <typename Run>
Timing Measure(int times, const Run& run) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<double> us;
  for (int i = 0; i < times + 3; ++i) {
    cudaEventRecord(begin);
    run(i);
    cudaEventRecord(end);
    if (cudaEventSynchronize(end) != cudaSuccess) {
      std::printf("a kernel failed: %s\n", cudaGetErrorString(cudaGetLastError()));
      std::exit(1);
    }
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) us.push_back(1000.0 * ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.back()};
}

constexpr int64_t kBatch = int64_t{1} << 20;
constexpr int kBatches = 8;

struct Batches {
  std::vector<std::unique_ptr<Array<int64_t>>> ids;
  std::vector<std::unique_ptr<Array<uint32_t>>> numbers;

  explicit Batches(int64_t rows) {
    for (int b = 0; b < kBatches; ++b) {
      ids.push_back(std::make_unique<Array<int64_t>>(kBatch));
      numbers.push_back(std::make_unique<Array<uint32_t>>(kBatch));
      MUST(ForEach(nullptr, kBatch,
                   PickNumbers{rows, b * 104729 * kBatch, ids[b]->data(), numbers[b]->data()}));
    }
  }
};

void Row(const char* what, int64_t n, const Timing& t, double bound) {
  std::printf("  %-34s %8.1f us  %6.2f G ids/s", what, t.median, n / t.median / 1000);
  if (bound > 0) std::printf("  %.2f of the same by row number", bound / t.median);
  std::printf("  (worst %.1f us)\n", t.worst);
}

// Inserts `rows` ids in batches; returns their times.
std::vector<double> Fill(MonoGpuTable* table, int64_t dim, int64_t rows) {
  Array<int64_t> ids(kBatch);
  Array<float> gradients(kBatch * dim);
  MUST(ForEach(nullptr, kBatch * dim, FillFloats{gradients.data()}));
  const float rate = 0.01f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  options.req_time = 1000;
  std::vector<double> us;
  for (int64_t begin = 0; begin < rows; begin += kBatch) {
    const int64_t n = std::min(kBatch, rows - begin);
    MUST(ForEach(nullptr, n, MakeIds{begin, ids.data()}));
    MUST(mono_gpu_synchronize(nullptr));
    const auto start = std::chrono::steady_clock::now();
    MUST(mono_gpu_table_optimize(table, nullptr, ids.data(), n, gradients.data(), &options));
    MUST(mono_gpu_synchronize(nullptr));
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                     .count());
  }
  return us;
}

void PrintStats(MonoGpuTable* table) {
  MonoGpuTableStats s;
  MUST(mono_gpu_table_stats(table, &s));
  std::printf(
      "  %lld rows, %.1f bytes a row (%.1f rows, %.1f index, %.1f other), load %.3f, %lld "
      "rebuilds, "
      "%lld waits, %lld spilled\n",
      static_cast<long long>(s.size),
      static_cast<double>(s.row_bytes + s.index_bytes + s.other_bytes) / s.size,
      static_cast<double>(s.row_bytes) / s.size, static_cast<double>(s.index_bytes) / s.size,
      static_cast<double>(s.other_bytes) / s.size, static_cast<double>(s.size) / s.slots,
      static_cast<long long>(s.rebuilds), static_cast<long long>(s.waits),
      static_cast<long long>(s.spilled));
}

template <int kTile>
Timing MeasureGather(const Batches& batches, const Array<float>& rows, int64_t stride, int dim,
                     const Array<float>& out) {
  return Measure(20, [&](int i) {
    MUST(ForTiles(nullptr, CeilDiv(kBatch, kLanes / kTile),
                  GatherByNumber<kTile>{rows.data(), stride, batches.numbers[i % kBatches]->data(),
                                        kBatch, out.data(), dim}));
  });
}

template <int kTile>
Timing MeasureAdagrad(const Batches& batches, const Array<float>& rows, int64_t stride, int dim,
                      const Array<float>& gradients) {
  return Measure(20, [&](int i) {
    MUST(ForTiles(nullptr, CeilDiv(kBatch, kLanes / kTile),
                  AdagradByNumber<kTile>{rows.data(), stride, batches.numbers[i % kBatches]->data(),
                                         kBatch, gradients.data(), dim}));
  });
}

int Bench(int64_t dim, int64_t rows, engine::OptimizerKind kind) {
  const bool adagrad = kind == engine::OptimizerKind::kAdagrad;
  std::printf("dim %lld, %lld rows, %s\n", static_cast<long long>(dim),
              static_cast<long long>(rows), adagrad ? "adagrad" : "sgd");
  const Batches batches(rows);
  Array<float> out(kBatch * dim), gradients(kBatch * dim);
  MUST(ForEach(nullptr, kBatch * dim, FillFloats{gradients.data()}));
  const int64_t stride = (adagrad ? 2 : 1) * dim;
  Timing gather, step;
  {
    Array<float> plain((rows + 1) * stride);
    MUST(FillBytes(nullptr, plain.data(), 0, (rows + 1) * stride * 4));
    gather = dim <= 16   ? MeasureGather<4>(batches, plain, stride, dim, out)
             : dim <= 32 ? MeasureGather<8>(batches, plain, stride, dim, out)
                         : MeasureGather<16>(batches, plain, stride, dim, out);
    Row("gather by row number", kBatch, gather, 0);
    if (adagrad) {
      step = dim <= 16   ? MeasureAdagrad<4>(batches, plain, stride, dim, gradients)
             : dim <= 32 ? MeasureAdagrad<8>(batches, plain, stride, dim, gradients)
                         : MeasureAdagrad<16>(batches, plain, stride, dim, gradients);
      Row("adagrad by row number", kBatch, step, 0);
    }
  }
  TablePointer table;
  MUST(CreateTable(OneSegment(dim, kind), &table));
  MUST(mono_gpu_table_reserve(table.get(), nullptr, rows));
  std::vector<double> fill = Fill(table.get(), dim, rows);
  std::sort(fill.begin(), fill.end());
  Row("insert into reserved room", kBatch, {fill[fill.size() / 2], fill.back()}, 0);
  PrintStats(table.get());
  const float rate = 0.01f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  options.req_time = 2000;
  Row("lookup", kBatch,
      Measure(20,
              [&](int i) {
                MUST(mono_gpu_table_lookup(table.get(), nullptr, batches.ids[i % kBatches]->data(),
                                           kBatch, out.data(), nullptr));
              }),
      gather.median);
  Row("update", kBatch,
      Measure(20,
              [&](int i) {
                ++options.req_time;
                MUST(mono_gpu_table_optimize(table.get(), nullptr,
                                             batches.ids[i % kBatches]->data(), kBatch,
                                             gradients.data(), &options));
              }),
      step.median);
  Row("update, time unchanged", kBatch,
      Measure(20,
              [&](int i) {
                MUST(mono_gpu_table_optimize(table.get(), nullptr,
                                             batches.ids[i % kBatches]->data(), kBatch,
                                             gradients.data(), &options));
              }),
      step.median);
  options.duplicates = MONO_GPU_SUM_GRADIENTS;
  Row("update, duplicates summed", kBatch,
      Measure(20,
              [&](int i) {
                MUST(mono_gpu_table_optimize(table.get(), nullptr,
                                             batches.ids[i % kBatches]->data(), kBatch,
                                             gradients.data(), &options));
              }),
      0);
  options.duplicates = MONO_GPU_IDS_ARE_DISTINCT;
  for (const int64_t n : {int64_t{1024}, int64_t{65536}}) {
    std::printf("  batches of %lld:\n", static_cast<long long>(n));
    Row("lookup", n,
        Measure(20,
                [&](int i) {
                  MUST(mono_gpu_table_lookup(
                      table.get(), nullptr,
                      batches.ids[i % kBatches]->data() + i * n % (kBatch - n), n, out.data(),
                      nullptr));
                }),
        0);
    Row("update", n,
        Measure(20,
                [&](int i) {
                  MUST(mono_gpu_table_optimize(
                      table.get(), nullptr,
                      batches.ids[i % kBatches]->data() + i * n % (kBatch - n), n, gradients.data(),
                      &options));
                }),
        0);
    // Back to back, as in training: what the host adds is hidden or not.
    const Timing many = Measure(5, [&](int i) {
      for (int k = 0; k < 20; ++k) {
        const int64_t* const ids = batches.ids[(i + k) % kBatches]->data();
        MUST(mono_gpu_table_lookup(table.get(), nullptr, ids, n, out.data(), nullptr));
        MUST(mono_gpu_table_optimize(table.get(), nullptr, ids, n, gradients.data(), &options));
      }
    });
    Row("20 x (lookup, update)", 20 * n, many, 0);
  }
  return 0;
}

int Insert(int64_t dim, int64_t rows) {
  std::printf("insert from empty, dim %lld, %lld rows, adagrad\n", static_cast<long long>(dim),
              static_cast<long long>(rows));
  TablePointer table;
  MUST(CreateTable(OneSegment(dim, engine::OptimizerKind::kAdagrad), &table));
  const std::vector<double> us = Fill(table.get(), dim, rows);
  double all = 0;
  for (const double one : us) all += one;
  std::vector<double> sorted(us);
  std::sort(sorted.begin(), sorted.end());
  std::printf("  %.3f G ids/s in all; batch: median %.0f us, 90 %% %.0f us, worst %.0f us\n",
              rows / all / 1000, sorted[sorted.size() / 2], sorted[sorted.size() * 9 / 10],
              sorted.back());
  std::printf("  batches:");
  for (size_t i = 0; i < us.size(); i += 1 + us.size() / 40) std::printf(" %.0f", us[i]);
  std::printf("\n");
  PrintStats(table.get());
  Array<int64_t> ids(kBatch);
  Array<float> out(kBatch * dim);
  Array<uint8_t> found(kBatch);
  int64_t missing = 0, zero = 0;
  for (int64_t begin = 0; begin < rows; begin += kBatch) {
    const int64_t n = std::min(kBatch, rows - begin);
    MUST(ForEach(nullptr, n, MakeIds{begin, ids.data()}));
    MUST(mono_gpu_table_lookup(table.get(), nullptr, ids.data(), n, out.data(), found.data()));
    const std::vector<uint8_t> there = found.Read();
    for (int64_t i = 0; i < n; ++i) missing += there[i] == 0;
  }
  MUST(ForEach(nullptr, kBatch, MakeIds{rows, ids.data()}));
  MUST(mono_gpu_table_lookup(table.get(), nullptr, ids.data(), kBatch, out.data(), found.data()));
  for (const uint8_t there : found.Read()) zero += there;
  std::printf("  %lld of %lld ids are missing; %lld of %lld others are there\n",
              static_cast<long long>(missing), static_cast<long long>(rows),
              static_cast<long long>(zero), static_cast<long long>(kBatch));
  int64_t erased = -1;
  const auto start = std::chrono::steady_clock::now();
  MUST(mono_gpu_table_evict(table.get(), nullptr, &erased));
  std::printf(
      "  an eviction pass that finds %lld rows: %.2f ms\n", static_cast<long long>(erased),
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  return missing == 0 && zero == 0 ? 0 : 1;
}

#endif

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  if (mode == "check") {
    return Check(static_cast<int>(number(2, 0)), static_cast<int>(number(3, kDifferentialConfigs)));
  }
  if (mode == "memory") return Memory();
#if defined(__CUDACC__)
  if (mode == "bench") {
    const bool sgd = argc > 4 && std::strcmp(argv[4], "sgd") == 0;
    return Bench(number(2, 16), number(3, 10000000),
                 sgd ? engine::OptimizerKind::kSgd : engine::OptimizerKind::kAdagrad);
  }
  if (mode == "insert") return Insert(number(2, 16), number(3, 100000000));
#endif
  std::printf("usage: gpu_table check | bench DIM ROWS [sgd] | insert DIM ROWS | memory\n");
  return 2;
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

int main(int argc, char** argv) { return monolith::gpu::Main(argc, argv); }
