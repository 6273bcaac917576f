// Adding rows to places of a buffer in one order, without atomics: occurrences (a place and the
// number of a row) are sorted by place, and lanes that find the first at a place add up all that
// follow.
//
//   places    3 0 3 0 7         occurrences 0 1 2 3 4
//   sorted    0 0 | 3 3 | 7                 1 3 | 0 2 | 4
//
// A row covers [place, place + width). Rows of one place usually have one width, and rows of
// different places do not overlap; so it is enough to sort by key = place / the smallest width,
// which has fewer bits, and every pass of the sort moves all pairs. Where rows do overlap, every
// float of the buffer looks for the rows that cover it, which is slow but right. Which way to go is
// found out on the device.
//
// A Source has
//   Source Ready()                            itself, with what all its functions read read
//   int64_t Place(key, occurrence), int64_t Width(occurrence)
//   uint32_t Locate(occurrence)               what the three below know an occurrence by
//   bool CannotOverlap()                      known without a look at every row
//   const float* Address(location, column)    what is to be added, or null
//   void Finish(location, Pack<kSize>*)       turns what is at that address into a term
//   void AddRun(runs, first, column, Pack<kSize>* sum)   adds all occurrences of the key at `first`
//                                             in an order of its own, where it has one
//   float AddOne(location, column, sum)       returns sum plus one column of one occurrence
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_

#include <cstdint>
#include <string>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/tuning.h"

namespace monolith {
namespace gpu {

// How places become keys. Occurrences that do not count have the key `nowhere`, the largest.
struct Keys {
  int64_t min_width;
  uint32_t nowhere;
  int shift;  // bits that are not sorted by (bucket_sum.h)

  MONO_DEVICE uint32_t Of(int64_t place) const {
    int64_t key, rest;
    DivMod(place, min_width, &key, &rest);
    return static_cast<uint32_t>(key);
  }
};

inline int MakeKeys(int64_t out_size, int64_t min_width, Keys* keys) {
  const int64_t nowhere = out_size / min_width;
  if (nowhere > INT64_C(0xffffffff)) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the gradient has " + std::to_string(out_size) +
                                               " elements, want less than 2^32 times " +
                                               std::to_string(min_width));
  }
  *keys = {min_width, static_cast<uint32_t>(nowhere), 0};
  return MONO_GPU_OK;
}

// Occurrences sorted by key >> of.shift.
struct Runs {
  const uint32_t* keys;
  const uint32_t* occurrences;
  int64_t n;
  Keys of;

  MONO_DEVICE bool IsAt(int64_t i, uint32_t key) const { return i < n && keys[i] == key; }

  // The first place of what is sorted together with i.
  MONO_DEVICE int64_t FirstPlace(int64_t i) const {
    return (static_cast<int64_t>(keys[i] >> of.shift) << of.shift) * of.min_width;
  }
};

// A few tiles share all positions or floats: usually there is nothing to do.
constexpr int64_t kOverlapTiles = 512;

template <typename Source>
struct FindOverlap {
  Runs runs;
  Source source;
  const int32_t* bad;
  int32_t* overlap;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Source ready = source.Ready();
    if (ready.CannotOverlap() || *bad != 0) return;
    for (int64_t i = tile * kLanes + lane; i + 1 < runs.n; i += kOverlapTiles * kLanes) {
      if (runs.keys[i + 1] >= runs.of.nowhere) return;
      const uint32_t first = runs.occurrences[i], second = runs.occurrences[i + 1];
      const int64_t place = ready.Place(runs.keys[i], first);
      const int64_t next = ready.Place(runs.keys[i + 1], second);
      const int64_t width = ready.Width(first);
      // Places of one key are in any order.
      if (next == place ? ready.Width(second) != width : next < place + width) MarkBad(overlap);
    }
  }
};

// Stores what the rows of a run, of which `row` is the first, add up to.
template <int kSize, typename Source>
MONO_DEVICE void Write(const Source& source, uint32_t key, uint32_t row, int64_t column,
                       const Pack<kSize>& sum, float* out) {
  if (column < source.Width(row)) Store<kSize>(sum, out + source.Place(key, row) + column);
}

// 1 << log_lanes lanes for kScatterRows positions. They add up the runs that begin there, to their
// ends.
template <int kSize, typename Source>
struct AddRuns {
  Runs runs;
  Source source;
  int log_lanes;
  int64_t max_width;
  const int32_t* bad;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    const int32_t wrong = *bad;  // looked at when the keys have come, too
    const Source ready = source.Ready();
    const int64_t first = (item >> log_lanes) * kScatterRows;
    const int64_t count = runs.n - first < kScatterRows ? runs.n - first : kScatterRows;
    const int64_t before = first > 0 ? static_cast<int64_t>(runs.keys[first - 1]) : -1;
    uint32_t keys[kScatterRows], rows[kScatterRows];
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) {
      const int64_t i = first + (k < count ? k : count - 1);
      keys[k] = runs.keys[i];
      rows[k] = runs.occurrences[i];
    }
    if (wrong != 0 || static_cast<int64_t>(keys[kScatterRows - 1]) == before) return;
    const int64_t lane = item & ((int64_t{1} << log_lanes) - 1);
    for (int64_t c = lane * kSize; c < max_width; c += int64_t{kSize} << log_lanes) {
      AddColumns(ready, first, count, before, keys, rows, c);
    }
  }

  MONO_DEVICE void AddColumns(const Source& ready, int64_t first, int64_t count, int64_t before,
                              const uint32_t* keys, const uint32_t* rows, int64_t column) const {
    const float* from[kScatterRows];
    bool mine[kScatterRows];
    uint32_t locations[kScatterRows];
    Pack<kSize> values[kScatterRows];
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) {
      mine[k] = k < count && static_cast<int64_t>(keys[k]) != before && keys[k] < runs.of.nowhere;
      locations[k] = mine[k] ? ready.Locate(rows[k]) : 0;
    }
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) {
      from[k] = mine[k] ? ready.Address(locations[k], column) : nullptr;
    }
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) values[k] = LoadOrZero(from[k]);
    int64_t current = -1;
    uint32_t head = 0;  // the first row of the run
    Pack<kSize> sum = Zeros<kSize>();
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) {
      if (!mine[k]) continue;
      if (static_cast<int64_t>(keys[k]) != current) {
        if (current >= 0) Write(ready, static_cast<uint32_t>(current), head, column, sum, out);
        current = keys[k];
        head = rows[k];
        sum = Zeros<kSize>();
      }
      if (from[k] == nullptr) continue;
      ready.template Finish<kSize>(locations[k], &values[k]);
      AddTo(&sum, values[k]);
    }
    if (current < 0) return;
    AddRest(ready, first + kScatterRows, static_cast<uint32_t>(current), column, &sum);
    Write(ready, static_cast<uint32_t>(current), head, column, sum, out);
  }

  MONO_DEVICE void AddRest(const Source& ready, int64_t i, uint32_t key, int64_t column,
                           Pack<kSize>* sum) const {
    constexpr int kAtOnce = 4;
    for (bool more = true; more; i += kAtOnce) {
      const float* from[kAtOnce];
      uint32_t keys[kAtOnce], locations[kAtOnce];
      Pack<kSize> values[kAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const bool inside = i + k < runs.n;
        keys[k] = inside ? runs.keys[i + k] : runs.of.nowhere;
        locations[k] = inside ? runs.occurrences[i + k] : 0;
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        more = more && keys[k] == key;
        locations[k] = more ? ready.Locate(locations[k]) : 0;
        from[k] = more ? ready.Address(locations[k], column) : nullptr;
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) values[k] = LoadOrZero(from[k]);
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (from[k] == nullptr) continue;
        ready.template Finish<kSize>(locations[k], &values[k]);
        AddTo(sum, values[k]);
      }
    }
  }

  MONO_DEVICE static Pack<kSize> LoadOrZero(const float* from) {
    return from != nullptr ? Load<kSize>(from) : Zeros<kSize>();
  }
};

// The same for sources that have an order of their own: lanes for one position.
template <int kSize, typename Source>
struct AddWholeRuns {
  Runs runs;
  Source source;
  int log_lanes;
  int64_t max_width;
  const int32_t* bad;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    const Source ready = source.Ready();
    const int64_t first = item >> log_lanes;
    const uint32_t key = runs.keys[first];
    if (*bad != 0 || key >= runs.of.nowhere || (first > 0 && runs.keys[first - 1] == key)) return;
    const int64_t lane = item & ((int64_t{1} << log_lanes) - 1);
    for (int64_t c = lane * kSize; c < max_width; c += int64_t{kSize} << log_lanes) {
      Pack<kSize> sum = Zeros<kSize>();
      ready.template AddRun<kSize>(runs, first, c, &sum);
      Write(ready, key, runs.occurrences[first], c, sum, out);
    }
  }
};

template <typename Source>
struct AddOverlapping {
  Runs runs;
  Source source;
  int64_t max_width;
  const int32_t* bad;
  const int32_t* overlap;
  float* out;
  int64_t out_size;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (*bad != 0 || *overlap == 0) return;
    const Source ready = source.Ready();
    for (int64_t x = tile * kLanes + lane; x < out_size; x += kOverlapTiles * kLanes) {
      out[x] = SumAt(ready, x);
    }
  }

  MONO_DEVICE float SumAt(const Source& ready, int64_t x) const {
    const int64_t together = runs.of.min_width << runs.of.shift;
    int64_t low = 0, high = runs.n;  // the first whose row may reach x
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (runs.FirstPlace(middle) + together + max_width <= x) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    float sum = 0;
    for (int64_t i = low; i < runs.n && runs.FirstPlace(i) <= x; ++i) {
      if (runs.keys[i] >= runs.of.nowhere) continue;
      const uint32_t row = runs.occurrences[i];
      const int64_t column = x - ready.Place(runs.keys[i], row);
      if (column >= 0 && column < ready.Width(row)) {
        sum = ready.AddOne(ready.Locate(row), column, sum);
      }
    }
    return sum;
  }
};

// *overlap is 0 on entry. kSize: columns of a lane, which divides the widths. kInOrder:
// the rows of a place are added in their order.
template <int kSize, bool kInOrder, typename Source>
int ScatterSum(Stream stream, const Runs& runs, const Source& source, int64_t max_width,
               const int32_t* bad, int32_t* overlap, float* out, int64_t out_size) {
  MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
  if (runs.n == 0) return MONO_GPU_OK;
  int log_lanes = 0;
  while (log_lanes < 5 && (int64_t{kSize} << log_lanes) < max_width) ++log_lanes;
  const auto add = [&](auto functor, int64_t groups) {
    const int64_t items = groups << log_lanes;
    return ForTiles(stream, CeilDiv(items, kLanes), EachItem<decltype(functor)>{items, functor},
                    kOverlapTiles, FindOverlap<Source>{runs, source, bad, overlap});
  };
  if constexpr (kInOrder) {
    MONO_GPU_TRY(add(AddRuns<kSize, Source>{runs, source, log_lanes, max_width, bad, out},
                     CeilDiv(runs.n, kScatterRows)));
  } else {
    MONO_GPU_TRY(
        add(AddWholeRuns<kSize, Source>{runs, source, log_lanes, max_width, bad, out}, runs.n));
  }
  return ForTiles(stream, kOverlapTiles,
                  AddOverlapping<Source>{runs, source, max_width, bad, overlap, out, out_size});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
