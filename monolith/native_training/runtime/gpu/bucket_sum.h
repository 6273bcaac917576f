// The sums of scatter_sum.h where all rows have one width, or are cut into pieces of one, the
// greatest common divisor of their widths: their places are the multiples of it.
// Then the sort may leave out the lowest bits of the keys, which saves passes over all pairs. What
// it leaves together is a bucket: 1 << shift neighbouring places. A warp adds up a bucket's rows in
// shared memory, in their order, and writes all of its places at once, those without rows too.
//
//   keys      9 2 9 1 3 8        shift 2: buckets 0 (places 0 to 3) and 2 (places 8 to 11)
//   sorted    2 1 3 | 9 9 8      the order of the rows, inside a bucket
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/place_keys.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/stretches.h"
#include "monolith/native_training/runtime/gpu/tuning.h"

namespace monolith {
namespace gpu {

constexpr int kWarp = 32;
constexpr int kBucketWarps = 4;  // of a block

// How the columns of a row are spread over the lanes of a warp.
struct RowLanes {
  int log_lanes;
  int64_t chunks;  // of columns, where a row has more than a warp reads at once

  RowLanes(int64_t width, int pack) : log_lanes(0) {
    while (log_lanes < 5 && (int64_t{pack} << log_lanes) < width) ++log_lanes;
    chunks = CeilDiv(width, int64_t{pack} << log_lanes);
  }
};

// Whether rows of several widths are added up sooner in pieces of one: not where these are many,
// which all have to be sorted.
inline bool PiecesArePaid(int64_t rows, int64_t pieces) {
  return pieces <= kMaxPieces * rows && pieces <= INT32_MAX;
}

inline int64_t NumBuckets(const Keys& of) {
  return (static_cast<int64_t>(of.nowhere) + (int64_t{1} << of.shift) - 1) >> of.shift;
}

// Sets what keys are sorted by. The shift is as large as saves a pass of 8 bits, within the shared
// memory of a warp, and larger where buckets would have few of the n rows.
inline void ChooseBuckets(int64_t n, int64_t width, int pack, Keys* keys) {
  const RowLanes lanes(width, pack);
  int most = 0;
  while (most < kMaxBucketBits && (static_cast<int64_t>(sizeof(float)) * pack
                                   << (lanes.log_lanes + most + 1)) <= kBucketBytes) {
    ++most;
  }
  // Keys that go nowhere may be in the last bucket, so they need no bit of their own.
  keys->bits = BitsOf(std::max<uint32_t>(keys->nowhere, 1) - 1);
  const int passes = std::max<int>(1, static_cast<int>(CeilDiv(keys->bits - most, 8)));
  keys->shift = std::max(0, keys->bits - 8 * passes);
  while (keys->shift < most && (n << (keys->shift + 1)) <= kBucketRows * int64_t{keys->nowhere}) {
    ++keys->shift;
  }
}

// Notes where the buckets begin and end among the sorted keys.
struct MarkBuckets {
  const uint32_t* keys;
  int64_t n;
  Keys of;
  int64_t num_buckets;
  Span* spans;

  static constexpr int kKeysOfLane = 4;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t first = tile * (kLanes * kKeysOfLane) + lane;
    uint32_t own[kKeysOfLane], next[kKeysOfLane];
    MONO_UNROLL
    for (int k = 0; k < kKeysOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      own[k] = i < n ? of.Group(keys[i]) : 0;
      next[k] = i + 1 < n ? of.Group(keys[i + 1]) : own[k];
    }
    MONO_UNROLL
    for (int k = 0; k < kKeysOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      if (i >= n) continue;
      if (i + 1 < n && next[k] == own[k]) continue;
      if (own[k] < num_buckets) spans[own[k]].end = static_cast<int32_t>(i + 1);
      if (i + 1 < n && next[k] < num_buckets) spans[next[k]].begin = static_cast<int32_t>(i + 1);
    }
  }
};

// Floats of all partial sums of long buckets (stretches.h).
inline int64_t BucketPartials(int64_t n, int64_t width, const Keys& of) {
  return NumParts(n, kBucketStretch) * (width << of.shift);
}

struct Buckets {
  Runs runs;
  const Span* spans;
  int64_t width;
  float* out;
  Stretches stretches;
  const int32_t* bad;
  const int32_t* unaligned;  // then AddOverlapping does it all

  // Rows that one warp adds up, and where to.
  struct Work {
    int64_t bucket;
    int64_t begin;
    int64_t end;
    float* to;
  };

  MONO_DEVICE bool IsOff() const { return *bad != 0 || *unaligned != 0; }
  MONO_DEVICE int64_t Floats() const { return width << runs.of.shift; }  // of a bucket
  MONO_DEVICE int64_t NumPlaces(int64_t bucket) const {
    const int64_t left = runs.of.nowhere - (bucket << runs.of.shift),
                  all = int64_t{1} << runs.of.shift;
    return left < all ? left : all;
  }
  MONO_DEVICE float* To(const Stretches::Part& part) const { return out + part.group * Floats(); }
  MONO_DEVICE int64_t NumFloats(const Stretches::Part& part) const {
    return NumPlaces(part.group) * width;
  }

  // The parts of long buckets first, which take longest, then the buckets. False: there is nothing
  // to do.
  MONO_DEVICE bool Find(int64_t number, Work* work) const {
    const int64_t bucket = number - NumParts(runs.n, stretches.rows);
    if (bucket >= 0) {
      const Span span = spans[bucket];
      *work = {bucket, span.begin, span.end, out + bucket * Floats()};
      if (span.end - span.begin <= stretches.rows) return true;
      MarkBad(stretches.any_long);
      return false;
    }
    Stretches::Part part;
    if (!stretches.Find(number, &part)) return false;
    *work = {part.group, part.begin, part.end, stretches.Partial(number)};
    return true;
  }
};

template <int kSize, typename Source>
struct BucketSums {
  Buckets buckets;
  Source source;
  RowLanes lanes;
  int64_t floats;  // of shared memory, for a warp
  int64_t items;   // buckets and parts of long ones, times chunks of columns

#if defined(__CUDACC__)
  static constexpr uint32_t kAll = 0xffffffffu;

  // A warp looks at 32 of a bucket's rows at a time, each lane at one.
  struct Pair {
    uint32_t key;
    uint32_t location;
    const float* row;
  };

  __device__ __forceinline__ Pair Fetch(const Source& ready, int64_t i, int64_t end) const {
    Pair pair{i < end ? buckets.runs.keys[i] : kNothing, 0, nullptr};
    if (pair.key >= buckets.runs.of.nowhere) return pair;
    pair.location = ready.Locate(buckets.runs.occurrences[i]);
    pair.row = ready.Row(pair.location);
    return pair;
  }

  __device__ __forceinline__ void Run(int64_t item, int lane, float* sums) const {
    int64_t number, chunk;
    DivMod(item, lanes.chunks, &number, &chunk);
    Buckets::Work work;
    if (!buckets.Find(number, &work)) return;
    const Source ready = source.Ready();
    const int log_lanes = lanes.log_lanes, groups = kWarp >> log_lanes;
    const int group = lane >> log_lanes, own = lane & ((1 << log_lanes) - 1);
    const int64_t column = (chunk << log_lanes) * kSize + own * kSize;
    const bool inside = column < buckets.width;
    const int places = static_cast<int>(buckets.NumPlaces(work.bucket));
    Pair next = Fetch(ready, work.begin + lane, work.end);
    for (int place = group; place < places; place += groups) {
      StoreAligned<kSize>(Zeros<kSize>(), At(sums, place, own));
    }
    __syncwarp();
    for (int64_t first = work.begin; first < work.end; first += kWarp) {
      const Pair pair = next;
      next = Fetch(ready, first + kWarp + lane, work.end);
      const int64_t left = work.end - first;
      AddPairs(ready, pair, lane, left < kWarp ? static_cast<int>(left) : kWarp,
               inside ? column : -1, sums);
    }
    for (int place = group; inside && place < places; place += groups) {
      Store<kSize>(LoadAligned<kSize>(At(sums, place, own)),
                   work.to + place * buckets.width + column);
    }
    __syncwarp();
  }

  __device__ __forceinline__ float* At(float* sums, int place, int own) const {
    return sums + ((place << lanes.log_lanes) + own) * kSize;
  }

  __device__ __forceinline__ static const float* Shuffle(const float* row, int from_lane) {
    return reinterpret_cast<const float*>(
        __shfl_sync(kAll, reinterpret_cast<unsigned long long>(row), from_lane));
  }

  // Adds the rows of up to 32 pairs, of which each lane has one. As many as fit a warp are added
  // together; of those that go to the same place each waits for the ones before it.
  __device__ __forceinline__ void AddPairs(const Source& ready, const Pair& pair, int lane,
                                           int count, int64_t column, float* sums) const {
    const int log_lanes = lanes.log_lanes, groups = kWarp >> log_lanes;
    const int group = lane >> log_lanes, own = lane & ((1 << log_lanes) - 1);
    const bool valid = pair.key < buckets.runs.of.nowhere;
    const uint32_t place = pair.key & ((1u << buckets.runs.of.shift) - 1);
    const uint32_t peers = __match_any_sync(kAll, valid ? place : 0x80000000u | lane);
    const uint32_t together = groups == kWarp ? kAll : ((1u << groups) - 1) << (lane & -groups);
    const uint32_t turn = __popc(peers & together & ((1u << lane) - 1));
    const uint32_t what = (valid ? 0x80000000u : 0) | turn << 16 | place;
    MONO_ROLLED
    for (int begin = 0; begin * groups < count; begin += kBucketRounds) {
      uint32_t whats[kBucketRounds], locations[kBucketRounds];
      const float* from[kBucketRounds];
      Pack<kSize> values[kBucketRounds];
      MONO_UNROLL
      for (int k = 0; k < kBucketRounds; ++k) {
        const int from_lane = ((begin + k) * groups + group) & (kWarp - 1);
        whats[k] = __shfl_sync(kAll, what, from_lane);
        const float* const row = Shuffle(pair.row, from_lane);
        locations[k] = Source::kWithLocations ? __shfl_sync(kAll, pair.location, from_lane) : 0;
        if (begin + k >= 1 << log_lanes) whats[k] = 0;
        from[k] = nullptr;
        if (whats[k] >> 31 == 0 || column < 0) continue;
        from[k] = row != nullptr ? row + column : ready.Address(locations[k], column);
      }
      MONO_UNROLL
      for (int k = 0; k < kBucketRounds; ++k) {
        values[k] = from[k] != nullptr ? Load<kSize>(from[k]) : Zeros<kSize>();
      }
      MONO_UNROLL
      for (int k = 0; k < kBucketRounds; ++k) {
        if (from[k] != nullptr) ready.template Finish<kSize>(locations[k], &values[k]);
        const uint32_t turn_of = whats[k] >> 16 & 0x7fff;
        float* const to = At(sums, static_cast<int>(whats[k] & 0xffff), own);
        for (uint32_t now = 0;; ++now) {
          if (from[k] != nullptr && turn_of == now) {
            Pack<kSize> sum = LoadAligned<kSize>(to);
            AddTo(&sum, values[k]);
            StoreAligned<kSize>(sum, to);
          }
          __syncwarp();
          if (__any_sync(kAll, turn_of > now) == 0) break;
        }
      }
    }
  }
#else
  void Run(int64_t number, float* sums) const {
    Buckets::Work work;
    if (!buckets.Find(number, &work)) return;
    const Source ready = source.Ready();
    const int64_t first_place = work.bucket << buckets.runs.of.shift;
    std::fill(sums, sums + (buckets.width << buckets.runs.of.shift), 0.0f);
    for (int64_t i = work.begin; i < work.end; ++i) {
      if (buckets.runs.keys[i] >= buckets.runs.of.nowhere) continue;
      const uint32_t location = ready.Locate(buckets.runs.occurrences[i]);
      float* const to = sums + (buckets.runs.keys[i] - first_place) * buckets.width;
      for (int64_t c = 0; c < buckets.width; c += kSize) {
        const float* const from = ready.Address(location, c);
        if (from == nullptr) continue;
        Pack<kSize> term = Load<kSize>(from);
        ready.template Finish<kSize>(location, &term);
        for (int k = 0; k < kSize; ++k) to[c + k] += term.values[k];
      }
    }
    std::copy(sums, sums + buckets.NumPlaces(work.bucket) * buckets.width, work.to);
  }
#endif
};

#if defined(__CUDACC__)
template <typename Job>
__global__ void __launch_bounds__(kWarp* kBucketWarps, kBucketBlocks) BucketKernel(Job job) {
  extern __shared__ float4 bucket_sums[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float* const sums = reinterpret_cast<float*>(bucket_sums) + warp * job.floats;
  if (job.buckets.IsOff()) return;
  for (int64_t item = int64_t{blockIdx.x} * kBucketWarps + warp; item < job.items;
       item += int64_t{gridDim.x} * kBucketWarps) {
    job.Run(item, static_cast<int>(threadIdx.x) % kWarp, sums);
  }
}
#endif

// Marks the buckets and adds up their rows.
template <int kSize, typename Source>
int AddBuckets(Stream stream, const Buckets& buckets, const Source& source, Span* spans) {
  const Runs& runs = buckets.runs;
  const int64_t num_buckets = buckets.stretches.num_groups;
  const RowLanes lanes(buckets.width, kSize);
  const int64_t numbers = num_buckets + NumParts(runs.n, buckets.stretches.rows);
  const int64_t floats = int64_t{kSize} << (lanes.log_lanes + runs.of.shift);
  const BucketSums<kSize, Source> job{buckets, source, lanes, floats, numbers * lanes.chunks};
  MONO_GPU_TRY(FillBytes(stream, spans, 0, num_buckets * static_cast<int64_t>(sizeof(Span))));
  MONO_GPU_TRY(ForTiles(stream, CeilDiv(runs.n, kLanes * MarkBuckets::kKeysOfLane),
                        MarkBuckets{runs.keys, runs.n, runs.of, num_buckets, spans}));
  if (num_buckets == 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  const int64_t blocks = CeilDiv(job.items, kBucketWarps);
  const size_t bytes = kBucketWarps * sizeof(float) * static_cast<size_t>(floats);
  BucketKernel<<<static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{1} << 30)),
                 kWarp * kBucketWarps, bytes, static_cast<cudaStream_t>(stream)>>>(job);
  MONO_GPU_TRY(CheckCuda(cudaGetLastError(), "launch of a sum by bucket"));
#else
  if (buckets.IsOff()) return MONO_GPU_OK;
  std::vector<float> sums(buckets.width << runs.of.shift);
  for (int64_t number = 0; number < numbers; ++number) job.Run(number, sums.data());
#endif
  return MONO_GPU_OK;
}

// As ScatterSum. *unaligned: whether some place is no multiple of the width; spans has NumBuckets
// elements, partials BucketPartials; *any_long is 0 on entry.
template <int kSize, typename Source>
int SumBuckets(Stream stream, const Runs& runs, const Source& source, int64_t width,
               const int32_t* bad, const int32_t* unaligned, Span* spans, float* partials,
               int32_t* any_long, float* out, int64_t out_size) {
  const int64_t whole = int64_t{runs.of.nowhere} * width;  // what rows can cover
  MONO_GPU_TRY(
      FillBytes(stream, out + whole, 0, (out_size - whole) * static_cast<int64_t>(sizeof(float))));
  const Stretches stretches{runs.keys,           runs.n,   kBucketStretch,         runs.of,
                            NumBuckets(runs.of), partials, width << runs.of.shift, any_long};
  const Buckets buckets{runs, spans, width, out, stretches, bad, unaligned};
  MONO_GPU_TRY((AddBuckets<kSize, Source>(stream, buckets, source, spans)));
  return Finish(stream, AddPartials<Buckets>{stretches, buckets},
                AddOverlapping<Source>{runs, source, {}, width, bad, unaligned, out, out_size});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_
