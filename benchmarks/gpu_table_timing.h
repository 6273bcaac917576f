// Ids, batches and times for the benchmark of GPU tables.
#ifndef MONOLITH_BENCHMARKS_GPU_TABLE_TIMING_H_
#define MONOLITH_BENCHMARKS_GPU_TABLE_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <unordered_set>
#include <vector>

#include "monolith/native_training/runtime/base/random_bits.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "tests/native_training/runtime/gpu/table_properties.h"

#define MUST(call)                                                  \
  do {                                                              \
    if ((call) != MONO_GPU_OK) {                                    \
      std::printf("%s failed: %s\n", #call, mono_gpu_last_error()); \
      std::exit(1);                                                 \
    }                                                               \
  } while (false)

#if defined(__CUDACC__)

namespace monolith {
namespace gpu {

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

struct Timing {
  double median = 0;
  double worst = 0;
};

// Microseconds of run(i), each after before() on an idle device, by events.
template <typename Run, typename Before>
Timing Measure(int times, const Run& run, const Before& before) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<double> us;
  for (int i = 0; i < times + 3; ++i) {
    before();
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

template <typename Run>
Timing Measure(int times, const Run& run) {
  return Measure(times, run, [] {});
}

// Keeps the device busy for about this many cycles.
static __global__ void SpinKernel(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// Microseconds of run(i) on the device behind other work, as in training: what the host does in the
// meantime is hidden.
template <typename Run>
Timing MeasureQueued(int times, const Run& run) {
  return Measure(times, run, [] { SpinKernel<<<1, 1>>>(200000); });
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

constexpr int kFeatures = 26;

// Batches of ids of 26 features, one feature after the other.
struct SkewedBatches {
  static constexpr int kCount = 4;
  std::vector<std::unique_ptr<Array<int64_t>>> zipf;  // each feature's of a Zipf law
  std::vector<std::unique_ptr<Array<int64_t>>> half;  // every second one is one id
  std::vector<std::unique_ptr<Array<int64_t>>> none;  // all distinct
  std::unique_ptr<Array<int64_t>> one;                // all one id
  std::unique_ptr<Array<int64_t>> distinct;           // those of the first of zipf
  int64_t num_distinct = 0;

  explicit SkewedBatches(int64_t n) {
    constexpr int64_t kIds = 4000000;  // of a feature
    constexpr double kExponent = 1.05;
    std::vector<double> sums(kIds);
    double sum = 0;
    for (int64_t k = 0; k < kIds; ++k) {
      sum += std::pow(static_cast<double>(k + 1), -kExponent);
      sums[k] = sum;
    }
    std::mt19937_64 random(1);
    const auto id_of = [](int64_t feature, int64_t k) {
      return static_cast<int64_t>(
          engine::SplitMix64(static_cast<uint64_t>(feature * kIds + k) + 0x9e3779b97f4a7c15u));
    };
    std::uniform_real_distribution<double> uniform(0, sum);
    std::vector<int64_t> ids(n);
    for (int b = 0; b < kCount; ++b) {
      for (int64_t i = 0; i < n; ++i) {
        const auto at = std::lower_bound(sums.begin(), sums.end(), uniform(random));
        ids[i] = id_of(i / (n / kFeatures), std::min<int64_t>(at - sums.begin(), kIds - 1));
      }
      zipf.push_back(std::make_unique<Array<int64_t>>(ids));
      if (b == 0) {
        std::vector<int64_t> sorted;
        std::unordered_set<int64_t> seen;
        for (const int64_t id : ids) {
          if (seen.insert(id).second) sorted.push_back(id);
        }
        num_distinct = static_cast<int64_t>(sorted.size());
        distinct = std::make_unique<Array<int64_t>>(sorted);
      }
      for (int64_t i = 0; i < n; ++i) ids[i] = id_of(kFeatures, b * n + i);
      none.push_back(std::make_unique<Array<int64_t>>(ids));
      for (int64_t i = 0; i < n; i += 2) ids[i] = id_of(kFeatures, 0);
      half.push_back(std::make_unique<Array<int64_t>>(ids));
    }
    one = std::make_unique<Array<int64_t>>(std::vector<int64_t>(n, id_of(kFeatures, 0)));
  }
};

inline void Row(const char* what, int64_t n, const Timing& t, double bound) {
  std::printf("  %-34s %8.1f us  %6.2f G ids/s", what, t.median, n / t.median / 1000);
  if (bound > 0) std::printf("  %.2f of the same by row number", bound / t.median);
  std::printf("  (worst %.1f us)\n", t.worst);
}

// Inserts `rows` ids in batches; returns their times.
inline std::vector<double> Fill(MonoGpuTable* table, int64_t dim, int64_t rows) {
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

inline void PrintStats(MonoGpuTable* table) {
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

}  // namespace gpu
}  // namespace monolith

#endif

#endif  // MONOLITH_BENCHMARKS_GPU_TABLE_TIMING_H_
