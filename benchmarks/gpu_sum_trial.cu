// Ways to add rows to places without a sort, against the gather's gradient as it is.
//
//   gpu_sum_trial [ROWS PLACES]
//
// Prints the time of every stage for each granularity of fetches into the second-level cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_scan.cuh>
#include <vector>

#include "monolith/native_training/runtime/gpu/c_api.h"
#include "monolith/native_training/runtime/gpu/sort.h"

namespace {

constexpr int kDim = 16;
constexpr int kSlots = 8;
constexpr int kThreads = 256;

#define CHECK(call)                                                              \
  do {                                                                           \
    const cudaError_t error = (call);                                            \
    if (error != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)

template <typename T>
T* Allocate(int64_t n) {
  void* result = nullptr;
  CHECK(cudaMalloc(&result, n * sizeof(T)));
  return static_cast<T*>(result);
}

template <typename Run>
double Microseconds(const Run& run) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 11; ++i) {
    cudaEventRecord(begin);
    run();
    cudaEventRecord(end);
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 2) times.push_back(1000 * ms);
  }
  CHECK(cudaGetLastError());
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// kind 0: any place; 1: a tenth of the rows to one place; 2: all to one; 3: in order.
__global__ void MakeOffsets(int64_t n, int64_t places, int kind, int32_t* offsets) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const uint64_t x = Mix(i);
  int64_t place = static_cast<int64_t>(x % places);
  if (kind == 2 || (kind == 1 && (x >> 40) % 10 == 0)) place = 3;
  if (kind == 3) place = i * places / n;
  offsets[i] = static_cast<int32_t>(place * kDim);
}

__global__ void MakeFloats(int64_t n, float* values) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) values[i] = static_cast<float>(Mix(i) >> 40) * 0x1p-24f - 0.5f;
}

// -- Slots: each place has room for eight row numbers.

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    FillSlots(int64_t n, const int32_t* offsets, uint32_t* counts, uint32_t* slots) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kRows) + threadIdx.x;
  uint32_t places[kRows], ranks[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    places[k] = i < n ? static_cast<uint32_t>(offsets[i]) / kDim : 0;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    ranks[k] = i < n ? atomicAdd(counts + places[k], 1u) : kSlots;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    if (ranks[k] < kSlots) slots[int64_t{places[k]} * kSlots + ranks[k]] = static_cast<uint32_t>(i);
  }
}

// -- Lists: rows of a place one after the other; where they begin is counted first.

template <int kRows, bool kRank>
__global__ void __launch_bounds__(kThreads)
    CountRows(int64_t n, const int32_t* offsets, uint32_t* counts, uint32_t* ranks) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kRows) + threadIdx.x;
  uint32_t places[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    places[k] = i < n ? static_cast<uint32_t>(offsets[i]) / kDim : 0;
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= n) continue;
    if (kRank) {
      ranks[i] = atomicAdd(counts + places[k], 1u);
    } else {
      atomicAdd(counts + places[k], 1u);
    }
  }
}

// kRank: the rank is known; else `starts` become the ends.
template <int kRows, bool kRank>
__global__ void __launch_bounds__(kThreads)
    ListRows(int64_t n, const int32_t* offsets, uint32_t* starts, const uint32_t* ranks,
             uint32_t* rows) {
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kRows) + threadIdx.x;
  uint32_t at[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    if (i >= n) continue;
    const uint32_t place = static_cast<uint32_t>(offsets[i]) / kDim;
    at[k] = kRank ? starts[place] + ranks[i] : atomicAdd(starts + place, 1u);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t i = first + k * kThreads;
    if (i < n) rows[at[k]] = static_cast<uint32_t>(i);
  }
}

__device__ __forceinline__ void Order(uint32_t* a, uint32_t* b) {
  const uint32_t low = min(*a, *b), high = max(*a, *b);
  *a = low;
  *b = high;
}

// A network of 19 comparisons.
__device__ __forceinline__ void SortEight(uint32_t (&v)[8]) {
  Order(v + 0, v + 2), Order(v + 1, v + 3), Order(v + 4, v + 6), Order(v + 5, v + 7);
  Order(v + 0, v + 4), Order(v + 1, v + 5), Order(v + 2, v + 6), Order(v + 3, v + 7);
  Order(v + 0, v + 1), Order(v + 2, v + 3), Order(v + 4, v + 5), Order(v + 6, v + 7);
  Order(v + 2, v + 4), Order(v + 3, v + 5);
  Order(v + 1, v + 4), Order(v + 3, v + 6);
  Order(v + 1, v + 2), Order(v + 3, v + 4), Order(v + 5, v + 6);
}

// Four lanes for a place. kSlotted: its rows are in its slots; else in a list from starts[place] to
// starts[place + 1], or up to starts[place] from the one before (kEnds).
template <bool kSlotted, bool kEnds, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    SumPlaces(int64_t n, int64_t places, const uint32_t* starts, const uint32_t* rows,
              const float* grads, const float* scale, float* out) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t place = item / 4;
  const int own = static_cast<int>(item % 4);
  if (place >= places) return;
  int64_t begin;
  uint32_t count;
  if (kSlotted) {
    begin = place * kSlots;
    count = starts[place];
  } else if (kEnds) {
    begin = place == 0 ? 0 : starts[place - 1];
    count = starts[place] - static_cast<uint32_t>(begin);
  } else {
    begin = starts[place];
    count = (place + 1 < places ? starts[place + 1] : static_cast<uint32_t>(n)) -
            static_cast<uint32_t>(begin);
  }
  if (count > kSlots) return;  // another way
  uint32_t v[8];
  if (kSlotted) {
    const auto from = reinterpret_cast<const uint4*>(rows + begin);
    const uint4 a = __ldcs(from);
    const uint4 b = count > 4 ? __ldcs(from + 1) : uint4{};
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = k < count ? v[k] : 0xffffffffu;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = k < count ? rows[begin + k] : 0xffffffffu;
  }
  SortEight(v);
  float4 values[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k < count)
      values[k] = __ldcs(reinterpret_cast<const float4*>(grads + int64_t{v[k]} * kDim) + own);
  }
  const float by = __ldg(scale);
  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k >= count) break;
    sum.x += by * values[k].x, sum.y += by * values[k].y;
    sum.z += by * values[k].z, sum.w += by * values[k].w;
  }
  __stcs(reinterpret_cast<float4*>(out + place * kDim) + own, sum);
}

// -- Floors.

// Random rows of 64 bytes, nothing written.
__global__ void __launch_bounds__(kThreads)
    ReadRows(int64_t n, const int32_t* offsets, const float* from, float* out) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item / 4 >= n) return;
  const float4 v = __ldcs(reinterpret_cast<const float4*>(from + offsets[item / 4]) + item % 4);
  if (v.x == 12345.0f && v.y == 1.0f && v.z == 2.0f) out[0] = v.w;
}

__global__ void CopyFloats(int64_t n, const float4* from, float4* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = from[i];
}

__global__ void CountWrong(int64_t places, const uint32_t* counts, const float* a, const float* b,
                           unsigned long long* result) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= places * kDim) return;
  if (counts[i / kDim] > kSlots) {
    if (i % kDim == 0) atomicAdd(result + 1, 1ull);
    return;
  }
  if (__float_as_uint(a[i]) != __float_as_uint(b[i])) atomicAdd(result, 1ull);
}

void Trial(int64_t n, int64_t places, int kind) {
  std::printf("rows %lld, places %lld, kind %d\n", static_cast<long long>(n),
              static_cast<long long>(places), kind);
  int32_t* const offsets = Allocate<int32_t>(n);
  float* const grads = Allocate<float>(n * kDim);
  float* const out = Allocate<float>(places * kDim);
  float* const other = Allocate<float>(places * kDim);
  float* const scale = Allocate<float>(1);
  uint32_t* const counts = Allocate<uint32_t>(places + 1);
  uint32_t* const starts = Allocate<uint32_t>(places + 1);
  uint32_t* const slots = Allocate<uint32_t>(places * kSlots);
  uint32_t* const ranks = Allocate<uint32_t>(n);
  uint32_t* const rows = Allocate<uint32_t>(n);
  auto* const wrong = Allocate<unsigned long long>(2);
  const float one = 1.0f;
  CHECK(cudaMemcpy(scale, &one, 4, cudaMemcpyHostToDevice));
  MakeOffsets<<<Blocks(n), kThreads>>>(n, places, kind, offsets);
  MakeFloats<<<Blocks(n * kDim), kThreads>>>(n * kDim, grads);
  CHECK(cudaDeviceSynchronize());
  size_t scan_bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, counts, starts, static_cast<int>(places));
  char* const scan = Allocate<char>(static_cast<int64_t>(scan_bytes));
  const int64_t dim = kDim;
  const float* grads_in = grads;
  const int32_t* offsets_in = offsets;
  int64_t bytes = 0;
  const auto present = [&](void* space) {
    const int code = mono_gpu_op_gather_grad(nullptr, 1, &grads_in, &offsets_in, &n, &dim, scale,
                                             out, places * kDim, space, &bytes);
    if (code != 0) std::printf("failed: %s\n", mono_gpu_last_error()), std::exit(1);
  };
  present(nullptr);
  char* const space = Allocate<char>(bytes);
  // The sort alone.
  uint32_t* const keys = Allocate<uint32_t>(n);
  uint32_t* const sorted = Allocate<uint32_t>(n);
  CHECK(cudaMemcpy(keys, offsets, n * 4, cudaMemcpyDeviceToDevice));
  int64_t sort_bytes = 0;
  const int bits = monolith::gpu::BitsOf(static_cast<uint64_t>(places * kDim));
  (void)monolith::gpu::SortScratch<uint32_t>(n, bits, &sort_bytes, bits - 16);
  char* const sort_space = Allocate<char>(sort_bytes);

  const auto fill = [&] {
    cudaMemsetAsync(counts, 0, places * 4);
    FillSlots<4><<<Blocks((n + 3) / 4), kThreads>>>(n, offsets, counts, slots);
  };
  const auto sum_slots = [&] {
    SumPlaces<true, false, 1>
        <<<Blocks(places * 4), kThreads>>>(n, places, counts, slots, grads, scale, other);
  };
  const auto sum_slots_5 = [&] {
    SumPlaces<true, false, 5>
        <<<Blocks(places * 4), kThreads>>>(n, places, counts, slots, grads, scale, other);
  };
  const auto count_ranks = [&] {
    cudaMemsetAsync(counts, 0, places * 4);
    CountRows<4, true><<<Blocks((n + 3) / 4), kThreads>>>(n, offsets, counts, ranks);
  };
  const auto count_only = [&] {
    cudaMemsetAsync(counts, 0, places * 4);
    CountRows<4, false><<<Blocks((n + 3) / 4), kThreads>>>(n, offsets, counts, ranks);
  };
  const auto add_up = [&] {
    cub::DeviceScan::ExclusiveSum(scan, scan_bytes, counts, starts, static_cast<int>(places));
  };
  const auto list_ranks = [&] {
    ListRows<4, true><<<Blocks((n + 3) / 4), kThreads>>>(n, offsets, starts, ranks, rows);
  };
  const auto list_ends = [&] {
    ListRows<4, false><<<Blocks((n + 3) / 4), kThreads>>>(n, offsets, starts, ranks, rows);
  };
  const auto sum_lists = [&] {
    SumPlaces<false, false, 1>
        <<<Blocks(places * 4), kThreads>>>(n, places, starts, rows, grads, scale, other);
  };
  const auto sum_ends = [&] {
    SumPlaces<false, true, 1>
        <<<Blocks(places * 4), kThreads>>>(n, places, starts, rows, grads, scale, other);
  };
  const auto compare = [&](const char* what) {
    CHECK(cudaMemset(wrong, 0, 16));
    CountWrong<<<Blocks(places * kDim), kThreads>>>(places, counts, out, other, wrong);
    unsigned long long found[2];
    CHECK(cudaMemcpy(found, wrong, 16, cudaMemcpyDeviceToHost));
    std::printf("  %s: %llu floats differ, %llu places have more than %d rows\n", what, found[0],
                found[1], kSlots);
    CHECK(cudaMemset(other, 0xff, places * kDim * 4));
  };

  present(space);
  CHECK(cudaMemset(other, 0xff, places * kDim * 4));
  fill(), sum_slots(), compare("slots");
  count_ranks(), add_up(), list_ranks(), sum_lists(), compare("lists by rank");
  count_only(), add_up(), list_ends(), sum_ends(), compare("lists by ends");

  const double moved = n * (4.0 + 4 * kDim) + 4.0 * places * kDim;
  for (const size_t granularity : {0, 32, 64, 128}) {
    if (granularity != 0) {
      const cudaError_t error = cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, granularity);
      if (error != cudaSuccess)
        std::printf("no limit: %s\n", cudaGetErrorString(cudaGetLastError()));
    }
    size_t limit = 0;
    cudaDeviceGetLimit(&limit, cudaLimitMaxL2FetchGranularity);
    const double copy = Microseconds([&] {
      CopyFloats<<<Blocks(n * kDim / 8), kThreads>>>(
          n * kDim / 8, reinterpret_cast<const float4*>(grads),
          reinterpret_cast<float4*>(grads) + n * kDim / 8);
    });
    const double bound = copy * moved / (4.0 * n * kDim);
    std::printf(" fetches of %zu (limit %zu), copy %.2f TB/s, bound %.0f us\n", granularity, limit,
                4.0 * n * kDim / copy / 1e6, bound);
    const auto print = [&](const char* what, double us) {
      std::printf("  %-28s %8.1f us  share %.2f\n", what, us, bound / us);
    };
    print("present", Microseconds([&] { present(space); }));
    if (kind == 2) continue;
    print("read random rows (of out)",
          Microseconds([&] { ReadRows<<<Blocks(n * 4), kThreads>>>(n, offsets, out, other); }));
    print("sort of 16 bits", Microseconds([&] {
            (void)monolith::gpu::SortPairs<uint32_t>(nullptr, sort_space, sort_bytes, keys, sorted,
                                                     ranks, rows, n, bits, bits - 16);
          }));
    print("slots", Microseconds([&] { fill(), sum_slots(); }));
    print("  fill", Microseconds(fill));
    print("  sum", Microseconds(sum_slots));
    print("  sum, 5 blocks", Microseconds(sum_slots_5));
    print("lists by rank",
          Microseconds([&] { count_ranks(), add_up(), list_ranks(), sum_lists(); }));
    print("  count", Microseconds(count_ranks));
    print("  scan", Microseconds(add_up));
    print("  list", Microseconds(list_ranks));
    print("  sum", Microseconds(sum_lists));
    print("lists by ends", Microseconds([&] { count_only(), add_up(), list_ends(), sum_ends(); }));
    print("  count", Microseconds(count_only));
    count_only(), add_up();
    print("  scan and list", Microseconds([&] { add_up(), list_ends(); }));
    print("  sum", Microseconds(sum_ends));
  }
  for (void* const each :
       {static_cast<void*>(offsets), static_cast<void*>(grads), static_cast<void*>(out),
        static_cast<void*>(other), static_cast<void*>(scale), static_cast<void*>(counts),
        static_cast<void*>(starts), static_cast<void*>(slots), static_cast<void*>(ranks),
        static_cast<void*>(rows), static_cast<void*>(wrong), static_cast<void*>(scan),
        static_cast<void*>(space), static_cast<void*>(keys), static_cast<void*>(sorted),
        static_cast<void*>(sort_space)}) {
    cudaFree(each);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 23;
  const int64_t places = argc > 2 ? std::atoll(argv[2]) : int64_t{1} << 22;
  Trial(n, places, 0);
  Trial(n, places, 3);
  Trial(n / 2, places / 4, 0);
  Trial(n, places, 1);
  Trial(n, places, 2);
  return 0;
}
