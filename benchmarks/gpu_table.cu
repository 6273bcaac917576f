// Checks the GPU table against the engine's table, and measures it.
//
//   tools/gpu_table_check.sh FOLDER      builds this without TensorFlow and Python, and runs it
//
//   gpu_table check [first] [last]       random calls on both tables (configurations by number)
//   gpu_table check-skewed [first] [last]  the same with ids that come often
//   gpu_table check-bad [first] [last]   the same with rows that are not finite
//   gpu_table bench DIM ROWS [adagrad|sgd]
//   gpu_table insert DIM ROWS            from empty, growth included; every id is found again
//   gpu_table properties [ROWS [NAME]]   many tables, determinism, out of memory, growth to ROWS;
//                                        with a NAME those whose name has it
//   gpu_table streams                    lookups on one stream while another one writes
//   gpu_table adversarial ROWS           ids chosen to collide, against random ones
//   gpu_table variants DIM ROWS          one line of the index at a time, or more
//   gpu_table tables COUNT               one call for COUNT tables against COUNT calls
//   gpu_table skewed DIM [IDS [once]]    batches with equal ids, in one table and in 26
//
// Without nvcc only the checks and `properties` are there, on the loops that stand for the kernels.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "benchmarks/gpu_table_timing.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizer_rules.h"
#include "tests/native_training/runtime/gpu/table_gradients.h"

namespace monolith {
namespace gpu {
namespace {

// The kinds of launches that a batch may take.
std::vector<TableTuning> Tunings(int number) {
  // Only lookups of rows as they are, and updates of one segment with SGD or Adagrad have two.
  if (number >= 28 || number % 14 > 1) return {Tuning()};
  constexpr int64_t kAll = int64_t{1} << 40;
  return {{0, 0}, {kAll, kAll}};
}

int Check(int first, int last) {
  int failed = 0;
  const TableTuning measured = Tuning();
  for (int number = first; number < last; ++number) {
    for (const TableTuning& tuning : Tunings(number)) {
      Tuning() = tuning;
      for (const uint32_t seed : {1u, 2u}) {
        DifferentialOptions options;
        options.seed = seed + static_cast<uint32_t>(number) * 10;
        if (number % 4 == 3) options.threshold = 3;
        if (seed == 2) {
          options.max_batch = Sized(20000, 2000);
          options.distinct_ids = Sized(30000, 3000);
          options.steps = kKindsOfCalls;
        }
        Differential differential(DifferentialConfig(number), options);
        const std::string error = differential.Run();
        if (error.empty()) continue;
        std::printf("configuration %d, seed %u: %s\n", number, seed, error.c_str());
        ++failed;
      }
      Tuning() = measured;
    }
  }
  std::printf("check: %d configurations, %d failed\n", last - first, failed);
  return failed == 0 ? 0 : 1;
}

// The same for batches in which ids come often.
int CheckSkewed(int first, int last) {
  int failed = 0;
  for (int number = first; number < last; ++number) {
    Differential differential(SkewedConfig(number), SkewedOptions(number));
    const std::string error = differential.Run();
    if (error.empty()) continue;
    std::printf("skewed configuration %d: %s\n", number, error.c_str());
    ++failed;
  }
  std::printf("check-skewed: %d configurations, %d failed\n", last - first, failed);
  return failed == 0 ? 0 : 1;
}

// The same for batches with rows that are not finite.
int CheckBad(int first, int last) {
  int failed = 0;
  const TableTuning measured = Tuning();
  for (int number = first; number < last; ++number) {
    for (const TableTuning& tuning :
         Tunings(number < kDifferentialConfigs ? number : (number - kDifferentialConfigs) % 28)) {
      Tuning() = tuning;
      Differential differential(BadRowsConfig(number), BadRowsOptions(number));
      const std::string error = differential.Run();
      Tuning() = measured;
      if (error.empty()) continue;
      std::printf("configuration %d with bad rows: %s\n", number, error.c_str());
      ++failed;
    }
  }
  std::printf("check-bad: %d configurations, %d failed\n", last - first, failed);
  return failed == 0 ? 0 : 1;
}

int Properties(int64_t rows, const std::string& only) {
  int failed = 0, looked_at = 0;
  const TableTuning measured = Tuning();
  const auto report = [&](const std::string& what, const auto& run) {
    if (what.find(only) == std::string::npos) return;
    const auto start = std::chrono::steady_clock::now();
    const std::string error = run();
    Tuning() = measured;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("properties: %s: %s (%.1f s)\n", what.c_str(),
                error.empty() ? "passed" : error.c_str(), seconds.count());
    std::fflush(stdout);
    ++looked_at;
    failed += !error.empty();
  };
  for (const TableTuning& tuning : Tunings(0)) {
    Tuning() = tuning;
    report("many tables", [] { return ManyTablesEqualSingleOnes(); });
    for (const NamedOptimizer& optimizer : OptimizersWithGradients()) {
      Tuning() = tuning;
      report(std::string("gradients of ") + optimizer.name,
             [&] { return GradientsOfAnyTypeStepAlike(optimizer.kind); });
    }
  }
  Tuning() = measured;
  report("many out of memory", [] { return ManyTablesChangeTogetherOrNotAtAll(); });
  report("sums", [] { return SumsDependOnTheIdAlone(); });
  report("other gradients", [] { return RefusesOtherGradients(); });
  report("refusal", [] { return TellsWhatItRefuses(); });
  report("admission by chance", [] { return LetsInByChance(); });
  report("determinism", [] { return SameCallsGiveTheSameTable(Sized(3000, 300), Sized(20, 7)); });
  if (rows > 1000000) {
    report("determinism, large batches", [] { return SameCallsGiveTheSameTable(600000, 12); });
  }
  report("out of memory",
         [] { return RunsOutOfMemoryWithoutLoss(Sized(int64_t{64}, int64_t{16}) << 20); });
  report("growth", [rows] { return GrowsWhileRowsLeave(rows); });
  return failed == 0 && looked_at > 0 ? 0 : 1;
}

#if defined(__CUDACC__)

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
    const auto ids_of = [&](int i) {
      return batches.ids[i % kBatches]->data() + i * n % (kBatch - n);
    };
    const auto lookup = [&](int i) {
      MUST(mono_gpu_table_lookup(table.get(), nullptr, ids_of(i), n, out.data(), nullptr));
    };
    const auto update = [&](int i) {
      MUST(mono_gpu_table_optimize(table.get(), nullptr, ids_of(i), n, gradients.data(), &options));
    };
    Row("lookup", n, Measure(20, lookup), 0);
    Row("lookup, device time", n, MeasureQueued(20, lookup), 0);
    Row("update", n, Measure(20, update), 0);
    Row("update, device time", n, MeasureQueued(20, update), 0);
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
  // Kernels are loaded when they are first launched; that is not growth.
  TablePointer other, table;
  MUST(CreateTable(OneSegment(dim, engine::OptimizerKind::kAdagrad), &other));
  Fill(other.get(), dim, 1000);
  other.reset();
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

__global__ void NoKernel() {}

// The same calls with one line of the index at a time, and with more.
int Variants(int64_t dim, int64_t rows) {
  std::printf("variants, dim %lld, %lld rows, adagrad\n", static_cast<long long>(dim),
              static_cast<long long>(rows));
  const Batches batches(rows);
  Array<float> out(kBatch * dim), gradients(kBatch * dim);
  MUST(ForEach(nullptr, kBatch * dim, FillFloats{gradients.data()}));
  TablePointer table;
  MUST(CreateTable(OneSegment(dim, engine::OptimizerKind::kAdagrad), &table));
  MUST(mono_gpu_table_reserve(table.get(), nullptr, rows));
  Fill(table.get(), dim, rows);
  const float rate = 0.01f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  options.req_time = 2000;
  const TableTuning measured = Tuning();
  constexpr int64_t kAll = int64_t{1} << 40;
  struct Way {
    const char* name;
    TableTuning tuning;
  };
  const Way ways[] = {{"lines", {0, 0}}, {"far", {kAll, kAll}}};
  const auto nothing = [](int) { NoKernel<<<1, 32>>>(); };
  Row("an empty kernel, idle device", 0, Measure(20, nothing), 0);
  Row("an empty kernel, device time", 0, MeasureQueued(20, nothing), 0);
  for (const int64_t n :
       {int64_t{1} << 10, int64_t{1} << 14, int64_t{1} << 16, int64_t{1} << 18, kBatch}) {
    std::printf("  batches of %lld, device time:\n", static_cast<long long>(n));
    const auto ids_of = [&](int i) {
      return batches.ids[i % kBatches]->data() + (n == kBatch ? 0 : i * n % (kBatch - n));
    };
    const auto lookup = [&](int i) {
      MUST(mono_gpu_table_lookup(table.get(), nullptr, ids_of(i), n, out.data(), nullptr));
    };
    for (const Way& way : ways) {
      Tuning() = way.tuning;
      Row((std::string("lookup, ") + way.name).c_str(), n, MeasureQueued(20, lookup), 0);
    }
    Tuning() = measured;
    Row("lookup, idle device", n, Measure(20, lookup), 0);
    for (const int32_t duplicates : {MONO_GPU_IDS_ARE_DISTINCT, MONO_GPU_SUM_GRADIENTS}) {
      options.duplicates = duplicates;
      const std::string kind =
          duplicates == MONO_GPU_IDS_ARE_DISTINCT ? "update, " : "update summed, ";
      const auto update = [&](int i) {
        ++options.req_time;
        MUST(mono_gpu_table_optimize(table.get(), nullptr, ids_of(i), n, gradients.data(),
                                     &options));
      };
      for (const Way& way : ways) {
        Tuning() = way.tuning;
        Row((kind + way.name).c_str(), n, MeasureQueued(20, update), 0);
      }
      Tuning() = measured;
      Row((kind + "idle device").c_str(), n, Measure(20, update), 0);
    }
  }
  return 0;
}

int Tables(int64_t count) {
  constexpr int64_t kRows = 100000, kIds = 2048, kDim = 16;
  std::printf("%lld tables of %lld rows, %lld ids of each, dim %lld\n",
              static_cast<long long>(count), static_cast<long long>(kRows),
              static_cast<long long>(kIds), static_cast<long long>(kDim));
  std::vector<TablePointer> tables(count);
  for (TablePointer& table : tables) {
    MUST(CreateTable(OneSegment(kDim, engine::OptimizerKind::kAdagrad), &table));
    Fill(table.get(), kDim, kRows);
  }
  Array<int64_t> ids(kRows);
  MUST(ForEach(nullptr, kRows, MakeIds{0, ids.data()}));
  Array<float> out(count * kIds * kDim), gradients(kIds * kDim);
  MUST(ForEach(nullptr, kIds * kDim, FillFloats{gradients.data()}));
  const float rate = 0.01f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  std::vector<MonoGpuLookupJob> lookups;
  std::vector<MonoGpuOptimizeJob> updates;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t* const some = ids.data() + t * 31 % (kRows - kIds);
    lookups.push_back({tables[t].get(), some, kIds, out.data() + t * kIds * kDim, nullptr, 0});
    updates.push_back({tables[t].get(), some, kIds, gradients.data(), &options});
  }
  Row("lookup, one call", count * kIds,
      Measure(20, [&](int) { MUST(mono_gpu_table_lookup_many(nullptr, lookups.data(), count)); }),
      0);
  Row("lookup, a call for each", count * kIds,
      Measure(20,
              [&](int) {
                for (const MonoGpuLookupJob& job : lookups) {
                  MUST(mono_gpu_table_lookup(job.table, nullptr, job.ids, job.n, job.out, nullptr));
                }
              }),
      0);
  Row("update, one call", count * kIds,
      Measure(20, [&](int) { MUST(mono_gpu_table_optimize_many(nullptr, updates.data(), count)); }),
      0);
  Row("update, a call for each", count * kIds,
      Measure(20,
              [&](int) {
                for (const MonoGpuOptimizeJob& job : updates) {
                  MUST(mono_gpu_table_optimize(job.table, nullptr, job.ids, job.n,
                                               static_cast<const float*>(job.gradients),
                                               job.options));
                }
              }),
      0);
  return 0;
}

// Adagrad on batches with equal ids, of 26 features: for one table, and for a table for each.
// `once`: each kind of call twice, for profilers.
int Skewed(int64_t dim, int64_t only, bool once) {
  constexpr int kTimes = 20;
  for (const int64_t n : {int64_t{106496}, int64_t{425984}, int64_t{1703936}}) {
    if (only > 0 && n != only) continue;
    std::printf("skewed batches of %lld ids, dim %lld, adagrad\n", static_cast<long long>(n),
                static_cast<long long>(dim));
    const SkewedBatches batches(n);
    Array<float> gradients(n * dim);
    MUST(ForEach(nullptr, n * dim, FillFloats{gradients.data()}));
    const float rate = 0.01f;
    MonoGpuWriteOptions options = {};
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    options.req_time = 2000;
    TablePointer table;
    MUST(CreateTable(OneSegment(dim, engine::OptimizerKind::kAdagrad), &table));
    MUST(mono_gpu_table_reserve(table.get(), nullptr, 8 * n + (int64_t{4} << 20)));
    std::vector<TablePointer> tables(kFeatures);
    for (TablePointer& each : tables) {
      MUST(CreateTable(OneSegment(dim, engine::OptimizerKind::kAdagrad), &each));
      MUST(mono_gpu_table_reserve(each.get(), nullptr, n));
    }
    const auto step = [&](const Array<int64_t>& ids, int64_t count, int32_t duplicates) {
      options.duplicates = duplicates;
      MUST(mono_gpu_table_optimize(table.get(), nullptr, ids.data(), count, gradients.data(),
                                   &options));
    };
    const auto step_many = [&](const Array<int64_t>& ids) {
      options.duplicates = MONO_GPU_SUM_GRADIENTS;
      std::vector<MonoGpuOptimizeJob> jobs;
      for (int f = 0; f < kFeatures; ++f) {
        const int64_t begin = f * (n / kFeatures);
        jobs.push_back({tables[f].get(), ids.data() + begin, n / kFeatures,
                        gradients.data() + begin * dim, &options});
      }
      MUST(mono_gpu_table_optimize_many(nullptr, jobs.data(), kFeatures));
    };
    const auto row = [&](const char* what, int64_t count, const auto& run) {
      if (once) {
        run(0);
        run(1);
        MUST(mono_gpu_synchronize(nullptr));
        return;
      }
      Row(what, count, Measure(kTimes, run), 0);
      Row("  device time", count, MeasureQueued(kTimes, run), 0);
    };
    const auto& zipf = batches.zipf;
    const int64_t distinct = batches.num_distinct;
    std::printf("  Zipf 1.05: %lld distinct ids\n", static_cast<long long>(distinct));
    for (int b = 0; b < SkewedBatches::kCount; ++b) {  // all rows are there
      step(*zipf[b], n, MONO_GPU_SUM_GRADIENTS);
      step(*batches.half[b], n, MONO_GPU_SUM_GRADIENTS);
      step(*batches.none[b], n, MONO_GPU_SUM_GRADIENTS);
      step_many(*zipf[b]);
    }
    const auto pick = [&](const auto& of, int i) -> const Array<int64_t>& {
      return *of[i % SkewedBatches::kCount];
    };
    row("Zipf, distinct ids alone, told so", distinct,
        [&](int) { step(*batches.distinct, distinct, MONO_GPU_IDS_ARE_DISTINCT); });
    row("Zipf, sum", n, [&](int i) { step(pick(zipf, i), n, MONO_GPU_SUM_GRADIENTS); });
    row("Zipf, sum, 26 tables in one call", n, [&](int i) { step_many(pick(zipf, i)); });
    if (once) continue;
    row("Zipf, steps", n, [&](int i) { step(pick(zipf, i), n, MONO_GPU_STEP_FOR_EACH); });
    row("half the batch one id, sum", n,
        [&](int i) { step(pick(batches.half, i), n, MONO_GPU_SUM_GRADIENTS); });
    row("one id in the whole batch, sum", n,
        [&](int) { step(*batches.one, n, MONO_GPU_SUM_GRADIENTS); });
    row("no id repeated, sum", n,
        [&](int i) { step(pick(batches.none, i), n, MONO_GPU_SUM_GRADIENTS); });
    row("no id repeated, told so", n,
        [&](int i) { step(pick(batches.none, i), n, MONO_GPU_IDS_ARE_DISTINCT); });
    PrintStats(table.get());
  }
  return 0;
}

struct MakeHardIds {
  int kind;
  int64_t begin;
  int64_t* ids;
  MONO_DEVICE void operator()(int64_t i) const {
    const uint64_t number = static_cast<uint64_t>(begin + i) + 1;
    ids[i] = static_cast<int64_t>(kind == 0   ? number << 20
                                  : kind == 1 ? __brevll(number)
                                  : kind == 2 ? number << 32 | 7
                                              : static_cast<uint64_t>(IdOf(number)));
  }
};

// Ids whose bits follow a pattern take no longer than random ones.
int Adversarial(int64_t rows) {
  const char* const names[] = {"multiples of 2^20", "bits reversed", "equal low halves", "random"};
  double us[4][2];
  for (const int kind : {3, 0, 1, 2}) {
    TablePointer table;
    MUST(CreateTable(OneSegment(16, engine::OptimizerKind::kAdagrad), &table));
    MUST(mono_gpu_table_reserve(table.get(), nullptr, rows));
    Array<int64_t> ids(kBatch);
    Array<float> values(kBatch * 16);
    MUST(ForEach(nullptr, kBatch * 16, FillFloats{values.data()}));
    const float rate = 0.01f;
    MonoGpuWriteOptions options = {};
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    for (int64_t begin = 0; begin < rows; begin += kBatch) {
      const int64_t n = std::min(kBatch, rows - begin);
      MUST(ForEach(nullptr, n, MakeHardIds{kind, begin, ids.data()}));
      MUST(mono_gpu_table_optimize(table.get(), nullptr, ids.data(), n, values.data(), &options));
    }
    us[kind][0] = Measure(20, [&](int i) {
                    (void)i;
                    MUST(mono_gpu_table_lookup(table.get(), nullptr, ids.data(), kBatch,
                                               values.data(), nullptr));
                  }).median;
    MUST(ForEach(nullptr, kBatch * 16, FillFloats{values.data()}));
    us[kind][1] = Measure(20, [&](int i) {
                    (void)i;
                    MUST(mono_gpu_table_optimize(table.get(), nullptr, ids.data(), kBatch,
                                                 values.data(), &options));
                  }).median;
    std::printf("  %-20s lookup %.1f us, update %.1f us\n", names[kind], us[kind][0], us[kind][1]);
  }
  bool good = true;
  for (int kind = 0; kind < 3; ++kind) {
    good &= us[kind][0] <= 2 * us[3][0] && us[kind][1] <= 2 * us[3][1];
  }
  std::printf("adversarial: %s\n", good ? "passed" : "FAILED: more than twice the time");
  return good ? 0 : 1;
}

// Counts rows of which not all floats are alike.
struct CountTorn {
  const float* rows;
  int dim;
  unsigned long long* torn;
  MONO_DEVICE void operator()(int64_t i) const {
    for (int c = 1; c < dim; ++c) {
      if (rows[i * dim + c] != rows[i * dim]) {
        atomicAdd(torn, 1ull);
        return;
      }
    }
  }
};

struct FillRows {
  float value;
  float* values;
  MONO_DEVICE void operator()(int64_t i) const { values[i] = value; }
};

// Rows that are assigned one value each time, by a stream of its own, are never seen half written.
int Streams() {
  constexpr int64_t kDim = 32;
  const int64_t num_ids = Sized(200000, 4000);
  const int steps = Sized(200, 20);
  cudaStream_t writer = nullptr, reader = nullptr;
  if (cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking) != cudaSuccess ||
      cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking) != cudaSuccess) {
    std::printf("no streams\n");
    return 1;
  }
  uint64_t torn = 0, mixed = 0;
  for (const bool keep : {false, true}) {
    if (keep) {
      MUST(mono_gpu_keep_stream(writer));
      MUST(mono_gpu_keep_stream(reader));
    }
    TablePointer table;
    MUST(CreateTable(OneSegment(kDim, engine::OptimizerKind::kSgd), &table));
    Array<int64_t> ids(num_ids);
    MUST(ForEach(nullptr, num_ids, MakeIds{0, ids.data()}));
    Array<float> values(num_ids * kDim), out(num_ids * kDim);
    Array<unsigned long long> count(std::vector<unsigned long long>{0});
    MUST(mono_gpu_synchronize(nullptr));
    MonoGpuWriteOptions options = {};
    for (int step = 1; step <= steps; ++step) {
      MUST(ForEach(writer, num_ids * kDim, FillRows{static_cast<float>(step), values.data()}));
      // More ids as it goes, so that the index grows under the lookups.
      const int64_t n = num_ids * step / steps;
      MUST(mono_gpu_table_assign(table.get(), writer, ids.data(), n, values.data(), &options));
      MUST(mono_gpu_table_lookup(table.get(), reader, ids.data(), num_ids, out.data(), nullptr));
      MUST(ForEach(reader, num_ids, CountTorn{out.data(), kDim, count.data()}));
    }
    MUST(mono_gpu_synchronize(writer));
    MUST(mono_gpu_synchronize(reader));
    torn += count.Read()[0];
    for (const float value : out.Read()) mixed += value != static_cast<float>(steps);
  }
  cudaStreamDestroy(writer);
  cudaStreamDestroy(reader);
  const bool good = torn == 0 && mixed == 0;
  std::printf("streams: %llu torn rows, %llu floats of another write: %s\n",
              static_cast<unsigned long long>(torn), static_cast<unsigned long long>(mixed),
              good ? "passed" : "FAILED");
  return good ? 0 : 1;
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
  if (mode == "check-skewed") {
    return CheckSkewed(static_cast<int>(number(2, 0)), static_cast<int>(number(3, kSkewedConfigs)));
  }
  if (mode == "check-bad") {
    return CheckBad(static_cast<int>(number(2, 0)), static_cast<int>(number(3, kBadRowsConfigs)));
  }
  if (mode == "properties") return Properties(number(2, 200000), argc > 3 ? argv[3] : "");
#if defined(__CUDACC__)
  if (mode == "bench") {
    const bool sgd = argc > 4 && std::strcmp(argv[4], "sgd") == 0;
    return Bench(number(2, 16), number(3, 10000000),
                 sgd ? engine::OptimizerKind::kSgd : engine::OptimizerKind::kAdagrad);
  }
  if (mode == "insert") return Insert(number(2, 16), number(3, 100000000));
  if (mode == "variants") return Variants(number(2, 16), number(3, 10000000));
  if (mode == "tables") return Tables(number(2, 100));
  if (mode == "skewed") return Skewed(number(2, 64), number(3, 0), argc > 4);
  if (mode == "adversarial") return Adversarial(number(2, 10000000));
  if (mode == "streams") return Streams();
#endif
  std::printf(
      "usage: gpu_table check | check-skewed | check-bad | properties | streams | adversarial | "
      "bench DIM ROWS "
      "[sgd] | "
      "insert DIM ROWS | variants DIM ROWS | tables COUNT | "
      "skewed DIM [IDS [once]]\n");
  return 2;
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

int main(int argc, char** argv) { return monolith::gpu::Main(argc, argv); }
