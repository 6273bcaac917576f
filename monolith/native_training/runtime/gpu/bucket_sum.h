// The sums of scatter_sum.h where all rows have one width: their places are the multiples of it.
// Then it is enough to put the rows into buckets, each of 1 << shift neighbouring places, in their
// order. A block takes the rows of a bucket, sorts them by place in its memory and adds them up; it
// writes all places of the bucket, those without rows too.
//
//   keys        9 2 9 1 3 8        shift 2: buckets 0 (places 0 to 3) and 2 (places 8 to 11)
//   in buckets  2 1 3 | 9 9 8      the order of the rows, inside a bucket
//   sorted      1 2 3 | 8 9 9
//
// Up to kMaxBuckets are made in one pass (partition.h), more by a sort.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/partition.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"
#include "monolith/native_training/runtime/gpu/tuning.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {

// (key, occurrence) pairs in buckets: the key is in the high half.
struct PairRuns {
  const uint64_t* pairs;
  const int32_t* count;
  Keys of;

  MONO_DEVICE int64_t Size() const { return *count; }
  MONO_DEVICE uint32_t KeyAt(int64_t i) const { return static_cast<uint32_t>(pairs[i] >> 32); }
  MONO_DEVICE uint32_t OccurrenceAt(int64_t i) const { return static_cast<uint32_t>(pairs[i]); }
};

inline int64_t NumBuckets(const Keys& of) {
  return (static_cast<int64_t>(of.nowhere) + (int64_t{1} << of.shift) - 1) >> of.shift;
}

// Sets keys->shift: the smallest with few buckets, within the memory of a block.
inline void ChooseBuckets(Keys* keys) {
  constexpr int64_t kFew = 2048;
  keys->shift = 0;
  while (keys->shift < kMaxBucketBits && NumBuckets(*keys) > kFew) ++keys->shift;
}

// Pairs for the sort.
template <typename LoadKey>
struct ListPairs {
  LoadKey keys;
  uint64_t* pairs;

  MONO_DEVICE void operator()(int64_t i) const {
    pairs[i] = uint64_t{keys(i)} << 32 | static_cast<uint32_t>(i);
  }
};

// Notes where the buckets begin and end among the sorted pairs.
struct MarkBuckets {
  const uint64_t* pairs;
  int64_t n;
  int shift;
  int64_t num_buckets;
  Span* spans;

  static constexpr int kOfLane = 4;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t first = tile * (kLanes * kOfLane) + lane;
    uint32_t own[kOfLane], next[kOfLane];
    MONO_UNROLL
    for (int k = 0; k < kOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      own[k] = i < n ? static_cast<uint32_t>(pairs[i] >> 32) >> shift : 0;
      next[k] = i + 1 < n ? static_cast<uint32_t>(pairs[i + 1] >> 32) >> shift : own[k];
    }
    MONO_UNROLL
    for (int k = 0; k < kOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      if (i >= n) continue;
      if (i + 1 < n && next[k] == own[k]) continue;
      if (own[k] < num_buckets) spans[own[k]].end = static_cast<int32_t>(i + 1);
      if (i + 1 < n && next[k] < num_buckets) spans[next[k]].begin = static_cast<int32_t>(i + 1);
    }
  }
};

// The buckets of n occurrences, with their room in a workspace.
class Buckets {
 public:
  // Fails if the size of a sort cannot be told.
  int Reserve(int64_t n, const Keys& of, Workspace* space) {
    of_ = of;
    n_ = n;
    tiles_ = Tiles(n, NumBuckets(of));
    count_ = space->Put(std::vector<int32_t>{static_cast<int32_t>(n)});
    spans_ = space->Scratch<Span>(tiles_.buckets);
    pairs_ = space->Scratch<uint64_t>(n);
    if (InOnePass()) {
      offsets_ = space->Scratch<uint16_t>(tiles_.count * kWarps * tiles_.buckets);
      counts_ = space->Scratch<uint32_t>(tiles_.count * tiles_.buckets);
      totals_ = space->Scratch<uint32_t>(tiles_.buckets);
      return MONO_GPU_OK;
    }
    unsorted_ = space->Scratch<uint64_t>(n);
    MONO_GPU_TRY(SortWordsScratch(n, FirstBit(), EndBit(), &sort_bytes_));
    sort_scratch_ = space->Scratch<char>(sort_bytes_);
    return MONO_GPU_OK;
  }

  // LoadKey is that of partition.h.
  template <typename LoadKey>
  int Fill(Stream stream, const Workspace& space, const LoadKey& keys) {
    Span* const spans = space.At(spans_);
    uint64_t* const pairs = space.At(pairs_);
    if (InOnePass()) {
      tiles_.offsets = space.At(offsets_);
      tiles_.counts = space.At(counts_);
      tiles_.totals = space.At(totals_);
      return Partition(stream, keys, of_, tiles_, spans, space.At(count_), pairs);
    }
    uint64_t* const unsorted = space.At(unsorted_);
    MONO_GPU_TRY(ForEach(stream, n_, ListPairs<LoadKey>{keys, unsorted}));
    MONO_GPU_TRY(SortWords(stream, space.At(sort_scratch_), sort_bytes_, unsorted, pairs, n_,
                           FirstBit(), EndBit()));
    MONO_GPU_TRY(FillBytes(stream, spans, 0, tiles_.buckets * static_cast<int64_t>(sizeof(Span))));
    return ForTiles(stream, CeilDiv(n_, kLanes * MarkBuckets::kOfLane),
                    MarkBuckets{pairs, n_, of_.shift, tiles_.buckets, spans});
  }

  PairRuns runs(const Workspace& space) const { return {space.At(pairs_), space.At(count_), of_}; }
  const Span* spans(const Workspace& space) const { return space.At(spans_); }
  int64_t size() const { return tiles_.buckets; }

 private:
  bool InOnePass() const { return tiles_.buckets <= kMaxBuckets; }
  int FirstBit() const { return 32 + of_.shift; }
  // Keys of what counts for nothing are the largest.
  int EndBit() const { return 32 + BitsOf(of_.nowhere); }

  Keys of_ = {};
  int64_t n_ = 0;
  Tiles tiles_{0, 0};
  int64_t sort_bytes_ = 0;
  Workspace::Slot<int32_t> count_ = {};
  Workspace::Slot<Span> spans_ = {};
  Workspace::Slot<uint64_t> pairs_ = {}, unsorted_ = {};
  Workspace::Slot<uint16_t> offsets_ = {};
  Workspace::Slot<uint32_t> counts_ = {}, totals_ = {};
  Workspace::Slot<char> sort_scratch_ = {};
};

// A block adds up a bucket, kPairs of its rows after the other: what those before added up to is
// read back from the output.
template <int kSize, typename Source>
struct SumBucket {
  PairRuns runs;
  Source source;
  const Span* spans;
  int log_lanes;  // lanes of a row
  int64_t width;
  const int32_t* bad;
  const int32_t* unaligned;  // then AddOverlapping does it all
  float* out;

  static constexpr int kMinBlocks = kBucketBlocks;
  static constexpr int kPairs = 10 * kLanes;

  // The memory of a block.
  struct Memory {
    uint32_t sums[kLanes];
    typename Source::Location locations[kPairs];  // sorted by place
    uint16_t begins[(1 << kMaxBucketBits) + 8];
    // Behind it are the counters of each warp, for each place.
  };

  static int64_t MemoryBytes(int shift) {
    return static_cast<int64_t>(sizeof(Memory)) +
           (static_cast<int64_t>(kWarps * sizeof(uint16_t)) << shift);
  }

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    if (*bad != 0 || *unaligned != 0) return;
    const Source ready = source.Ready();
    const Span span = spans[block.number];
    // At least once, for the places without rows.
    for (int64_t first = span.begin; first == span.begin || first < span.end; first += kPairs) {
      const int64_t left = span.end - first;
      const int n = static_cast<int>(left < kPairs ? left : kPairs);
      Sort(block, ready, first, n);
      block.Each([&](int lane) {
        AddUp(ready, *block.At<Memory>(0), block.number, lane, first == span.begin);
      });
    }
  }

  // Sets the locations of n pairs, and where those of each place begin.
  MONO_DEVICE void Sort(const ThreadBlock& block, const Source& ready, int64_t first, int n) const {
    Memory& memory = *block.At<Memory>(0);
    uint16_t* const counters = block.At<uint16_t>(sizeof(Memory));
    const int places = 1 << runs.of.shift;
    const uint32_t mask = static_cast<uint32_t>(places) - 1, nowhere = runs.of.nowhere;
    const int share = (n + kLanes - 1) / kLanes * kWarp;
    const auto key_of = [&](int64_t i) { return runs.KeyAt(first + i); };
    const auto place_of = [mask, nowhere](uint32_t key) {
      return key < nowhere ? static_cast<int>(key & mask) : -1;
    };
    block.Each([&](int lane) {
      for (int i = lane; i < kWarps * places; i += kLanes) counters[i] = 0;
    });
    block.CountInOrder(n, share, counters, places, key_of, place_of,
                       [](int64_t, uint32_t, int, uint32_t) {});
    // A lane has neighbouring places.
    const int of_lane = (places + kLanes - 1) / kLanes;
    block.Each([&](int lane) {
      uint32_t sum = 0;
      for (int p = lane * of_lane; p < (lane + 1) * of_lane && p < places; ++p) {
        uint32_t own[kWarps], count = 0;
        MONO_UNROLL
        for (int w = 0; w < kWarps; ++w) own[w] = counters[w * places + p];
        MONO_UNROLL
        for (int w = 0; w < kWarps; ++w) {
          counters[w * places + p] = static_cast<uint16_t>(count);
          count += own[w];
        }
        memory.begins[p] = static_cast<uint16_t>(sum);
        sum += count;
      }
      memory.sums[lane] = sum;
    });
    // The last lane has places only if all have.
    const uint32_t of_last = memory.sums[kLanes - 1];
    block.SumBefore(memory.sums);
    block.Each([&](int lane) {
      for (int p = lane * of_lane; p < (lane + 1) * of_lane && p < places; ++p) {
        memory.begins[p] = static_cast<uint16_t>(memory.begins[p] + memory.sums[lane]);
      }
      if (lane == kLanes - 1) {
        memory.begins[places] = static_cast<uint16_t>(memory.sums[lane] + of_last);
      }
    });
    block.CountInOrder(n, share, counters, places, key_of, place_of,
                       [&](int64_t i, uint32_t, int place, uint32_t number) {
                         memory.locations[memory.begins[place] + number] =
                             ready.Locate(runs.OccurrenceAt(first + i));
                       });
  }

  // Lanes of a row have neighbouring places and walk through their rows, kRowsAtOnce at a time.
  MONO_DEVICE void AddUp(const Source& ready, const Memory& memory, int64_t bucket, int lane,
                         bool from_zero) const {
    const int places = 1 << runs.of.shift, groups = kLanes >> log_lanes;
    const int of_group = (places + groups - 1) / groups;
    const int begin = (lane >> log_lanes) * of_group;
    const int end = begin + of_group < places ? begin + of_group : places;
    if (begin >= end) return;
    const int64_t number = bucket << runs.of.shift;
    for (int64_t column = (lane & ((1 << log_lanes) - 1)) * kSize; column < width;
         column += int64_t{kSize} << log_lanes) {
      AddColumns(ready, memory, number, begin, end, column, from_zero);
    }
  }

  MONO_DEVICE void AddColumns(const Source& ready, const Memory& memory, int64_t number, int begin,
                              int end, int64_t column, bool from_zero) const {
    constexpr int kRowsAtOnce = kBucketRowsAtOnce;
    const int last = memory.begins[end];
    int place = begin, place_end = memory.begins[begin + 1];
    bool any = place_end > memory.begins[begin];
    float* to = out + (number + begin) * width + column;
    Pack<kSize> sum = any && !from_zero ? Load<kSize>(to) : Zeros<kSize>();
    // Stores the place's sum and goes on to the next.
    const auto go_on = [&] {
      if ((any || from_zero) && number + place < runs.of.nowhere) Store<kSize>(sum, to);
      if (++place >= end) return;
      to += width;
      const int place_begin = place_end;
      place_end = memory.begins[place + 1];
      any = place_end > place_begin;
      sum = any && !from_zero ? Load<kSize>(to) : Zeros<kSize>();
    };
    for (int first = memory.begins[begin]; first < last; first += kRowsAtOnce) {
      typename Source::Location locations[kRowsAtOnce];
      const float* from[kRowsAtOnce];
      Pack<kSize> values[kRowsAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kRowsAtOnce; ++k) {
        const bool there = first + k < last;
        locations[k] = there ? memory.locations[first + k] : typename Source::Location{};
        from[k] = there ? ready.Address(locations[k], column) : nullptr;
      }
      MONO_UNROLL
      for (int k = 0; k < kRowsAtOnce; ++k) {
        values[k] = from[k] != nullptr ? Load<kSize>(from[k]) : Zeros<kSize>();
      }
      MONO_UNROLL
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (first + k >= last) break;
        while (first + k >= place_end) go_on();
        if (from[k] == nullptr) continue;
        ready.template Finish<kSize>(locations[k], &values[k]);
        AddTo(&sum, values[k]);
      }
    }
    while (place < end) go_on();
  }
};

// As ScatterSum, of filled buckets. *unaligned: whether some place is no multiple of the width.
template <int kSize, typename Source>
int SumBuckets(Stream stream, const Workspace& space, const Buckets& buckets, const Source& source,
               int64_t width, const int32_t* unaligned, float* out, int64_t out_size) {
  const PairRuns runs = buckets.runs(space);
  const int32_t* const bad = space.bad();
  const int64_t whole = int64_t{runs.of.nowhere} * width;  // what rows can cover
  MONO_GPU_TRY(
      FillBytes(stream, out + whole, 0, (out_size - whole) * static_cast<int64_t>(sizeof(float))));
  int log_lanes = 0;
  while (log_lanes < 5 && (int64_t{kSize} << log_lanes) < width) ++log_lanes;
  using Sum = SumBucket<kSize, Source>;
  MONO_GPU_TRY(
      ForBlocks(stream, buckets.size(), Sum::MemoryBytes(runs.of.shift),
                Sum{runs, source, buckets.spans(space), log_lanes, width, bad, unaligned, out}));
  return ForTiles(
      stream, kOverlapTiles,
      AddOverlapping<PairRuns, Source>{runs, source, width, bad, unaligned, out, out_size});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_BUCKET_SUM_H_
