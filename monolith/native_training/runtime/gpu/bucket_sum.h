// The sums of scatter_sum.h where all rows have one width: their places are the multiples of it.
// Then the sort may leave out the lowest bits of the keys, which saves passes over all pairs. What
// it leaves together is a bucket: 1 << shift neighbouring places. A warp lists a bucket's rows by
// place, and some of its lanes add those of a place up in registers, in their order. All places
// are written, those without rows too.
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
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
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

inline int64_t NumBuckets(const Keys& of) {
  return (static_cast<int64_t>(of.nowhere) + (int64_t{1} << of.shift) - 1) >> of.shift;
}

// Sets keys->shift: as large as saves a pass of 8 bits, within the shared memory of a warp, and
// larger where buckets would have few of the n rows.
inline void ChooseBuckets(int64_t n, int64_t width, int pack, Keys* keys) {
  const RowLanes lanes(width, pack);
  int most = 0;
  while (most < kMaxBucketBits && (static_cast<int64_t>(sizeof(float)) * pack
                                   << (lanes.log_lanes + most + 1)) <= kBucketBytes) {
    ++most;
  }
  const int bits = BitsOf(keys->nowhere);
  const int passes = std::max<int>(1, static_cast<int>(CeilDiv(bits - most, 8)));
  int shift = std::max(0, bits - 8 * passes);
  while (shift < most && (n << (shift + 1)) <= kBucketRows * int64_t{keys->nowhere}) ++shift;
  keys->shift = shift;
}

// Notes where the buckets begin and end among the sorted keys.
struct MarkBuckets {
  const uint32_t* keys;
  int64_t n;
  int shift;
  int64_t num_buckets;
  Span* spans;

  static constexpr int kKeysOfLane = 4;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t first = tile * (kLanes * kKeysOfLane) + lane;
    uint32_t own[kKeysOfLane], next[kKeysOfLane];
    MONO_UNROLL
    for (int k = 0; k < kKeysOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      own[k] = i < n ? keys[i] >> shift : 0;
      next[k] = i + 1 < n ? keys[i + 1] >> shift : own[k];
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

// The rows of a bucket by place, in shared memory.
struct BucketLists {
  static constexpr int kRows = 384;  // more take another round
  static constexpr int kPlaces = 1 << kMaxBucketBits;

  uint32_t begins[kPlaces + 1];
  uint32_t locations[kRows];
  uint8_t places[kRows];
};
static_assert(BucketLists::kPlaces <= 256 && BucketLists::kPlaces % kWarp == 0);

// Buckets of more rows are long: many warps share one, each those of its rows that are in one
// stretch of so many sorted rows. What a stretch has of long buckets adds up to partial sums: of
// the one that its first row is in, and of one that begins later, which its last row is in. They
// are added in their order, so that the result is the same every time.
constexpr int64_t kStretchRows = 4096;

inline int64_t NumStretches(int64_t n) { return n > kStretchRows ? CeilDiv(n, kStretchRows) : 0; }

// Floats of all partial sums.
inline int64_t PartialFloats(int64_t n, int64_t width, const Keys& of) {
  return 2 * NumStretches(n) * (width << of.shift);
}

struct Buckets {
  Runs runs;
  const Span* spans;
  int64_t width;
  int64_t num_buckets;
  float* out;
  float* partials;

  // Rows that one warp adds up, and where to.
  struct Work {
    int64_t bucket;
    int64_t begin;
    int64_t end;
    float* to;
  };

  MONO_DEVICE int64_t Floats() const { return width << runs.of.shift; }  // of a bucket
  MONO_DEVICE int64_t NumPlaces(int64_t bucket) const {
    const int64_t left = runs.of.nowhere - (bucket << runs.of.shift),
                  all = int64_t{1} << runs.of.shift;
    return left < all ? left : all;
  }
  MONO_DEVICE static bool IsLong(const Span& span) { return span.end - span.begin > kStretchRows; }

  // Buckets first, then the two parts of every stretch. False: there is nothing to do.
  MONO_DEVICE bool Find(int64_t number, Work* work) const {
    if (number < num_buckets) {
      const Span span = spans[number];
      *work = {number, span.begin, span.end, out + number * Floats()};
      return !IsLong(span);
    }
    const int64_t part = number - num_buckets, first = part / 2 * kStretchRows;
    const int64_t end = first + kStretchRows < runs.n ? first + kStretchRows : runs.n;
    const bool last = part % 2 != 0;
    const int64_t bucket = runs.keys[last ? end - 1 : first] >> runs.of.shift;
    if (bucket >= num_buckets) return false;
    const Span span = spans[bucket];
    if (!IsLong(span) || (last && span.begin <= first)) return false;
    *work = {bucket, last ? span.begin : first, span.end < end ? span.end : end,
             partials + part * Floats()};
    return true;
  }
};

// Adds the partial sums of long buckets up: `tiles` tiles for every stretch, of the bucket that
// begins in it.
struct AddPartials {
  Buckets buckets;
  int64_t tiles;
  const int32_t* bad;
  const int32_t* unaligned;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (*bad != 0 || *unaligned != 0) return;
    const Runs& runs = buckets.runs;
    int64_t stretch, part;
    DivMod(tile, tiles, &stretch, &part);
    const int64_t first = stretch * kStretchRows;
    const int64_t end = first + kStretchRows < runs.n ? first + kStretchRows : runs.n;
    const int64_t bucket = runs.keys[end - 1] >> runs.of.shift;
    if (bucket >= buckets.num_buckets) return;
    const Span span = buckets.spans[bucket];
    if (!Buckets::IsLong(span) || span.begin < first) return;
    const int64_t i = part * kLanes + lane;
    if (i >= buckets.NumPlaces(bucket) * buckets.width) return;
    const float* const from = buckets.partials + i;
    float sum = from[(2 * stretch + (span.begin > first)) * buckets.Floats()];
    constexpr int kAtOnce = 8;
    for (int64_t s = stretch + 1; s * kStretchRows < span.end; s += kAtOnce) {
      float values[kAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const bool inside = (s + k) * kStretchRows < span.end;
        values[k] = inside ? from[2 * (s + k) * buckets.Floats()] : 0.0f;
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) sum += values[k];
    }
    buckets.out[bucket * buckets.Floats() + i] = sum;
  }
};

template <int kSize, typename Source>
struct BucketSums {
  Buckets buckets;
  Runs runs;
  Source source;
  RowLanes lanes;
  int64_t width;
  int64_t items;  // buckets and parts of stretches, times chunks of columns
  const int32_t* bad;
  const int32_t* unaligned;  // then AddOverlapping does it all

#if defined(__CUDACC__)
  static constexpr uint32_t kAll = 0xffffffffu;
  static constexpr int kAtOnce = 4;         // rows of a lane that are on their way together
  static constexpr uint32_t kCrowded = 48;  // rows of a place for which all lanes read

  __device__ __forceinline__ void Run(int64_t item, int lane, BucketLists* lists) const {
    int64_t number, chunk;
    DivMod(item, lanes.chunks, &number, &chunk);
    Buckets::Work work;
    if (!buckets.Find(number, &work)) return;
    const Source ready = source.Ready();
    const int log_lanes = lanes.log_lanes;
    const int own = lane & ((1 << log_lanes) - 1);
    const int64_t column = (chunk << log_lanes) * kSize + own * kSize;
    const Columns columns{column < width ? column : -1, lane >> log_lanes, kWarp >> log_lanes,
                          work.to + column, static_cast<int>(buckets.NumPlaces(work.bucket))};
    bool fresh = true;  // nothing is in `out` yet
    int64_t first = work.begin;
    do {
      const uint32_t most = List(ready, first, work.end, lane, lists);
      if (most <= kCrowded) {
        AddPlaces(ready, *lists, columns, fresh);
      } else {
        if (fresh) StoreZeros(columns);
        __syncwarp();
        AddTogether(ready, *lists, columns, lane);
      }
      __syncwarp();
      fresh = false;
      first += BucketLists::kRows;
    } while (first < work.end);
  }

  // What a lane writes.
  struct Columns {
    int64_t column;  // its first; -1: none
    int group;       // of lanes that share a row
    int groups;
    float* out;  // of the bucket's first place
    int num_places;
  };

  // Lists the rows [first, end), as many as fit, by place and in order. Returns how many the
  // fullest place has.
  __device__ __forceinline__ uint32_t List(const Source& ready, int64_t first, int64_t end,
                                           int lane, BucketLists* lists) const {
    constexpr int kPairs = BucketLists::kRows / kWarp;
    constexpr int kPlacesOfLane = BucketLists::kPlaces / kWarp;
    constexpr uint32_t kNone = 0xffffffffu;
    uint32_t what[kPairs], locations[kPairs];
    MONO_UNROLL
    for (int k = 0; k < kPairs; ++k) {
      const int64_t i = first + k * kWarp + lane;
      const uint32_t key = i < end ? runs.keys[i] : runs.of.nowhere;
      what[k] = key < runs.of.nowhere ? key & ((1u << runs.of.shift) - 1) : kNone;
      locations[k] = i < end ? runs.occurrences[i] : 0;
    }
    MONO_UNROLL
    for (int k = 0; k < kPairs; ++k) {
      if (what[k] != kNone) locations[k] = ready.Locate(locations[k]);
    }
    MONO_UNROLL
    for (int k = 0; k < kPlacesOfLane; ++k) lists->begins[lane * kPlacesOfLane + k] = 0;
    __syncwarp();
    MONO_UNROLL
    for (int k = 0; k < kPairs; ++k) {
      if (first + k * kWarp >= end) break;
      const bool valid = what[k] != kNone;
      const uint32_t peers = __match_any_sync(kAll, valid ? what[k] : 0x80000000u | lane);
      const uint32_t before = __popc(peers & ((1u << lane) - 1));
      const uint32_t count = valid ? lists->begins[what[k]] : 0;
      __syncwarp();
      if (valid && before == 0) lists->begins[what[k]] = count + __popc(peers);
      __syncwarp();
      if (valid) what[k] |= (count + before) << 8;
    }
    uint32_t counts[kPlacesOfLane], sum = 0, most = 0;
    MONO_UNROLL
    for (int k = 0; k < kPlacesOfLane; ++k) {
      counts[k] = lists->begins[lane * kPlacesOfLane + k];
      sum += counts[k];
      most = max(most, counts[k]);
    }
    uint32_t begin = sum;
    for (int d = 1; d < kWarp; d *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, begin, d);
      if (lane >= d) begin += other;
    }
    begin -= sum;
    __syncwarp();
    MONO_UNROLL
    for (int k = 0; k < kPlacesOfLane; ++k) {
      lists->begins[lane * kPlacesOfLane + k] = begin;
      begin += counts[k];
    }
    if (lane == kWarp - 1) lists->begins[BucketLists::kPlaces] = begin;
    __syncwarp();
    MONO_UNROLL
    for (int k = 0; k < kPairs; ++k) {
      if (what[k] == kNone) continue;
      const uint32_t place = what[k] & 0xff, at = lists->begins[place] + (what[k] >> 8);
      lists->locations[at] = locations[k];
      lists->places[at] = static_cast<uint8_t>(place);
    }
    __syncwarp();
    return __reduce_max_sync(kAll, most);
  }

  __device__ __forceinline__ Pack<kSize> LoadTerm(const Source& ready, uint32_t location,
                                                  int64_t column, bool wanted) const {
    const float* const from = wanted && column >= 0 ? ready.Address(location, column) : nullptr;
    return from != nullptr ? Load<kSize>(from) : Zeros<kSize>();
  }

  // Every group of lanes adds up the rows of some neighbouring places.
  __device__ __forceinline__ void AddPlaces(const Source& ready, const BucketLists& lists,
                                            const Columns& c, bool fresh) const {
    const int share = (c.num_places + c.groups - 1) / c.groups;
    const int first = min(c.group * share, c.num_places);
    const int last = min(first + share, c.num_places);
    if (c.column < 0 || first >= last) return;
    const uint32_t end = lists.begins[last];
    int current = first;
    Pack<kSize> sum = Zeros<kSize>();
    bool any = fresh;  // something is to be stored
    for (uint32_t at = lists.begins[first]; at < end; at += kAtOnce) {
      uint32_t locations[kAtOnce];
      int places[kAtOnce];
      Pack<kSize> values[kAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t i = min(at + k, end - 1);
        locations[k] = lists.locations[i];
        places[k] = lists.places[i];
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        values[k] = LoadTerm(ready, locations[k], c.column, at + k < end);
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (at + k >= end) break;
        for (; current != places[k]; ++current) {
          if (any) Store<kSize>(sum, c.out + current * width);
          sum = Zeros<kSize>();
          any = fresh;
        }
        if (!any) sum = Load<kSize>(c.out + current * width);
        any = true;
        ready.template Finish<kSize>(locations[k], &values[k]);
        AddTo(&sum, values[k]);
      }
    }
    for (; current < last; ++current) {
      if (any) Store<kSize>(sum, c.out + current * width);
      sum = Zeros<kSize>();
      any = fresh;
    }
  }

  __device__ __forceinline__ void StoreZeros(const Columns& c) const {
    if (c.column < 0) return;
    for (int place = c.group; place < c.num_places; place += c.groups) {
      Store<kSize>(Zeros<kSize>(), c.out + place * width);
    }
  }

  // Where one place has many rows: all groups read them, and each adds all up.
  __device__ __forceinline__ void AddTogether(const Source& ready, const BucketLists& lists,
                                              const Columns& c, int lane) const {
    const uint32_t end = lists.begins[BucketLists::kPlaces];
    const int own = lane & ((1 << lanes.log_lanes) - 1);
    const bool writes = c.group == 0 && c.column >= 0;
    int current = -1;
    Pack<kSize> sum = Zeros<kSize>();
    for (uint32_t at = 0; at < end; at += kAtOnce * c.groups) {
      Pack<kSize> values[kAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t i = at + k * c.groups + c.group;
        const uint32_t location = lists.locations[min(i, end - 1)];
        values[k] = LoadTerm(ready, location, c.column, i < end);
        if (i < end && c.column >= 0) ready.template Finish<kSize>(location, &values[k]);
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        for (int g = 0; g < c.groups; ++g) {
          const uint32_t i = at + k * c.groups + g;
          if (i >= end) break;
          const int place = lists.places[i];
          if (place != current) {
            if (current >= 0 && writes) Store<kSize>(sum, c.out + current * width);
            current = place;
            sum = c.column >= 0 ? Load<kSize>(c.out + current * width) : Zeros<kSize>();
          }
          Pack<kSize> term;
          MONO_UNROLL
          for (int x = 0; x < kSize; ++x) {
            term.values[x] = __shfl_sync(kAll, values[k].values[x], (g << lanes.log_lanes) | own);
          }
          AddTo(&sum, term);
        }
      }
    }
    if (current >= 0 && writes) Store<kSize>(sum, c.out + current * width);
  }
#else
  void Run(int64_t number, float* sums) const {
    Buckets::Work work;
    if (!buckets.Find(number, &work)) return;
    const Source ready = source.Ready();
    const int64_t first_place = work.bucket << runs.of.shift;
    std::fill(sums, sums + (width << runs.of.shift), 0.0f);
    for (int64_t i = work.begin; i < work.end; ++i) {
      if (runs.keys[i] >= runs.of.nowhere) continue;
      const uint32_t location = ready.Locate(runs.occurrences[i]);
      float* const to = sums + (runs.keys[i] - first_place) * width;
      for (int64_t c = 0; c < width; c += kSize) {
        const float* const from = ready.Address(location, c);
        if (from == nullptr) continue;
        Pack<kSize> term = Load<kSize>(from);
        ready.template Finish<kSize>(location, &term);
        for (int k = 0; k < kSize; ++k) to[c + k] += term.values[k];
      }
    }
    std::copy(sums, sums + buckets.NumPlaces(work.bucket) * width, work.to);
  }
#endif
};

#if defined(__CUDACC__)
template <typename Job>
__global__ void __launch_bounds__(kWarp* kBucketWarps, kBucketBlocks) BucketKernel(Job job) {
  __shared__ BucketLists lists[kBucketWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (*job.bad != 0 || *job.unaligned != 0) return;
  for (int64_t item = int64_t{blockIdx.x} * kBucketWarps + warp; item < job.items;
       item += int64_t{gridDim.x} * kBucketWarps) {
    job.Run(item, static_cast<int>(threadIdx.x) % kWarp, lists + warp);
  }
}
#endif

// Marks the buckets and adds up their rows.
template <int kSize, typename Source>
int AddBuckets(Stream stream, const Buckets& buckets, const Source& source, const int32_t* bad,
               const int32_t* unaligned, Span* spans) {
  const Runs& runs = buckets.runs;
  const int64_t num_buckets = buckets.num_buckets, stretches = NumStretches(runs.n);
  const RowLanes lanes(buckets.width, kSize);
  const int64_t numbers = num_buckets + 2 * stretches;
  const BucketSums<kSize, Source> job{
      buckets, runs, source, lanes, buckets.width, numbers * lanes.chunks, bad, unaligned};
  MONO_GPU_TRY(FillBytes(stream, spans, 0, num_buckets * static_cast<int64_t>(sizeof(Span))));
  MONO_GPU_TRY(ForTiles(stream, CeilDiv(runs.n, kLanes * MarkBuckets::kKeysOfLane),
                        MarkBuckets{runs.keys, runs.n, runs.of.shift, num_buckets, spans}));
  if (num_buckets == 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  const int64_t blocks = CeilDiv(job.items, kBucketWarps);
  BucketKernel<<<static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{1} << 30)),
                 kWarp * kBucketWarps, 0, static_cast<cudaStream_t>(stream)>>>(job);
  MONO_GPU_TRY(CheckCuda(cudaGetLastError(), "launch of a sum by bucket"));
#else
  if (*bad != 0 || *unaligned != 0) return MONO_GPU_OK;
  std::vector<float> sums(buckets.width << runs.of.shift);
  for (int64_t number = 0; number < numbers; ++number) job.Run(number, sums.data());
#endif
  const int64_t tiles = CeilDiv(buckets.width << runs.of.shift, kLanes);
  return ForTiles(stream, stretches * tiles, AddPartials{buckets, tiles, bad, unaligned});
}

// As ScatterSum. *unaligned: whether some place is no multiple of the width; spans has NumBuckets
// elements, partials PartialFloats.
template <int kSize, typename Source>
int SumBuckets(Stream stream, const Runs& runs, const Source& source, int64_t width,
               const int32_t* bad, const int32_t* unaligned, Span* spans, float* partials,
               float* out, int64_t out_size) {
  const int64_t whole = int64_t{runs.of.nowhere} * width;  // what rows can cover
  MONO_GPU_TRY(
      FillBytes(stream, out + whole, 0, (out_size - whole) * static_cast<int64_t>(sizeof(float))));
  const Buckets buckets{runs, spans, width, NumBuckets(runs.of), out, partials};
  MONO_GPU_TRY((AddBuckets<kSize, Source>(stream, buckets, source, bad, unaligned, spans)));
  return ForTiles(stream, kOverlapTiles,
                  AddOverlapping<Source>{runs, source, width, bad, unaligned, out, out_size});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_
