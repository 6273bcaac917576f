// Adding rows to places of a buffer in one order, without atomics: occurrences (a place and the
// number of a row) are sorted by place, and lanes that find the first at a place add up all that
// follow; where those are many, many lanes do (stretches.h).
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
//   const float* Row(location)                Address(location, 0), if the other columns follow it;
//                                             may be null
//   kWithLocations                            Row may be null, or Finish looks at the location
//   void Finish(location, Pack<kSize>*)       turns what is at that address into a term
//   void AddRun(runs, first, column, Pack<kSize>* sum)   adds all occurrences of the key at `first`
//                                             in an order of its own, where it has one
//   void AddOne(location, column, Pack<kSize>* sum)   adds one occurrence
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_

#include <cstdint>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/place_keys.h"
#include "monolith/native_training/runtime/gpu/stretches.h"
#include "monolith/native_training/runtime/gpu/tuning.h"

namespace monolith {
namespace gpu {

// Sorted occurrences.
struct Runs {
  const uint32_t* keys;
  const uint32_t* occurrences;
  int64_t n;
  Keys of;

  MONO_DEVICE bool IsAt(int64_t i, uint32_t key) const { return i < n && keys[i] == key; }

  // The first place of what is sorted together with i.
  MONO_DEVICE int64_t FirstPlace(int64_t i) const {
    return (static_cast<int64_t>(of.Group(keys[i])) << of.shift) * of.min_width;
  }
};

// A few tiles share all floats: usually there is nothing to do.
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
    const int64_t i = tile * kLanes + lane;
    if (i + 1 >= runs.n || runs.keys[i + 1] >= runs.of.nowhere) return;
    const uint32_t first = runs.occurrences[i], second = runs.occurrences[i + 1];
    const int64_t place = ready.Place(runs.keys[i], first);
    const int64_t next = ready.Place(runs.keys[i + 1], second);
    const int64_t width = ready.Width(first);
    // Places of one key are in any order.
    if (next == place ? ready.Width(second) != width : next < place + width) MarkBad(overlap);
  }
};

// Stores what the rows of a run, of which `row` is the first, add up to.
template <int kSize, typename Source>
MONO_DEVICE void Write(const Source& source, uint32_t key, uint32_t row, int64_t column,
                       const Pack<kSize>& sum, float* out) {
  if (column < source.Width(row)) Store<kSize>(sum, out + source.Place(key, row) + column);
}

// 1 << log_lanes lanes for kScatterRows positions. They add up the runs that begin there, to their
// ends, but long ones.
template <int kSize, typename Source>
struct AddRuns {
  Runs runs;
  Source source;
  Stretches stretches;
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
    int64_t last = first;  // where the last run begins
    MONO_UNROLL
    for (int k = 0; k < kScatterRows; ++k) last += keys[k] != keys[kScatterRows - 1];
    const bool is_long = keys[kScatterRows - 1] < runs.of.nowhere && stretches.IsLong(last);
    if (is_long) MarkBad(stretches.any_long);
    const int64_t lane = item & ((int64_t{1} << log_lanes) - 1);
    for (int64_t c = lane * kSize; c < max_width; c += int64_t{kSize} << log_lanes) {
      AddColumns(ready, first, count, before, keys, rows, is_long, c);
    }
  }

  MONO_DEVICE void AddColumns(const Source& ready, int64_t first, int64_t count, int64_t before,
                              const uint32_t* keys, const uint32_t* rows, bool is_long,
                              int64_t column) const {
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
    if (current < 0 || is_long) return;
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
  Stretches stretches;
  int log_lanes;
  int64_t max_width;
  const int32_t* bad;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    const Source ready = source.Ready();
    const int64_t first = item >> log_lanes;
    const uint32_t key = runs.keys[first];
    if (*bad != 0 || key >= runs.of.nowhere || (first > 0 && runs.keys[first - 1] == key)) return;
    if (stretches.IsLong(first)) {
      MarkBad(stretches.any_long);
      return;
    }
    const int64_t lane = item & ((int64_t{1} << log_lanes) - 1);
    for (int64_t c = lane * kSize; c < max_width; c += int64_t{kSize} << log_lanes) {
      Pack<kSize> sum = Zeros<kSize>();
      ready.template AddRun<kSize>(runs, first, c, &sum);
      Write(ready, key, runs.occurrences[first], c, sum, out);
    }
  }
};

// Floats of a partial sum of a long run: they begin with the first place of its key.
inline int64_t RunFloats(const Keys& of, int64_t max_width) {
  return (of.min_width + max_width + 3) / 4 * 4;
}

// Floats of all of them.
inline int64_t RunPartials(int64_t n, const Keys& of, int64_t max_width) {
  return NumParts(n, kRunStretch) * RunFloats(of, max_width);
}

// The parts of long runs, by blocks.
template <int kSize, bool kInOrder, typename Source>
struct AddParts {
  Runs runs;
  Source source;
  Stretches stretches;
  const int32_t* bad;
  const int32_t* overlap;

  static constexpr int kMinBlocks = 4;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    if (*stretches.any_long == 0 || *bad != 0) return;
    const Source ready = source.Ready();
    const bool overlapping = *overlap != 0;
    const int64_t parts = NumParts(stretches.n, stretches.rows);
    for (int64_t number = block.number; number < parts; number += kPartBlocks) {
      Stretches::Part part;
      if (!stretches.Find(number, &part)) continue;
      if (overlapping) {
        AddAnyRows(block, ready, part);
      } else {
        AddEqualRows(block, ready, part);
      }
    }
  }

  // Rows of one place and width.
  MONO_DEVICE void AddEqualRows(const ThreadBlock& block, const Source& ready,
                                const Stretches::Part& part) const {
    const int64_t width = ready.Width(runs.occurrences[part.begin]);
    const int log_lanes = LogLanes((width + kSize - 1) / kSize, 5);
    for (int64_t first = 0; first < width; first += int64_t{kSize} << log_lanes) {
      const auto terms = [&](int group, int groups, int own) {
        Pack<kSize> sum = Zeros<kSize>();
        const int64_t column = first + own * kSize;
        if (column >= width) return sum;
        constexpr int kAtOnce = 4;
        for (int64_t i = part.begin + group; i < part.end; i += kAtOnce * groups) {
          uint32_t locations[kAtOnce];
          MONO_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            const int64_t at = i + k * groups;
            locations[k] = ready.Locate(runs.occurrences[at < part.end ? at : i]);
          }
          const int64_t left = (part.end - i + groups - 1) / groups;
          AddAtOnce<kAtOnce>(ready, locations, left < kAtOnce ? left : kAtOnce, column, &sum);
        }
        return sum;
      };
      float* const to = stretches.Partial(part.number) + first;
      SumOfGroups<kSize>(block, log_lanes, terms, [&](int own, const Pack<kSize>& sum) {
        if (first + own * kSize < width) Store<kSize>(sum, to + own * kSize);
      });
    }
  }

  template <int kAtOnce>
  MONO_DEVICE void AddAtOnce(const Source& ready, const uint32_t* locations, int64_t count,
                             int64_t column, Pack<kSize>* sum) const {
    if constexpr (kInOrder) {
      const float* from[kAtOnce];
      Pack<kSize> values[kAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        from[k] = k < count ? ready.Address(locations[k], column) : nullptr;
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        values[k] = from[k] != nullptr ? Load<kSize>(from[k]) : Zeros<kSize>();
      }
      MONO_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (from[k] == nullptr) continue;
        ready.template Finish<kSize>(locations[k], &values[k]);
        AddTo(sum, values[k]);
      }
    } else {
      for (int k = 0; k < count; ++k) ready.template AddOne<kSize>(locations[k], column, sum);
    }
  }

  // Rows of one key.
  MONO_DEVICE void AddAnyRows(const ThreadBlock& block, const Source& ready,
                              const Stretches::Part& part) const {
    const int64_t columns = stretches.floats, place = runs.FirstPlace(part.begin);
    const int log_lanes = LogLanes(columns, kLogBlockLanes);
    for (int64_t first = 0; first < columns; first += int64_t{1} << log_lanes) {
      const auto terms = [&](int group, int groups, int own) {
        Pack<1> sum = Zeros<1>();
        for (int64_t i = part.begin + group; i < part.end; i += groups) {
          const uint32_t row = runs.occurrences[i];
          const int64_t column = place + first + own - ready.Place(runs.keys[i], row);
          if (column >= 0 && column < ready.Width(row)) {
            ready.template AddOne<1>(ready.Locate(row), column, &sum);
          }
        }
        return sum;
      };
      float* const to = stretches.Partial(part.number) + first;
      SumOfGroups<1>(block, log_lanes, terms, [&](int own, const Pack<1>& sum) {
        if (first + own < columns) to[own] = sum.values[0];
      });
    }
  }
};

// Where long runs go.
template <typename Source>
struct LongRuns {
  Runs runs;
  Source source;
  const int32_t* bad;
  const int32_t* overlap;  // then AddOverlapping does it
  float* out;

  MONO_DEVICE bool IsOff() const { return *bad != 0 || *overlap != 0; }
  MONO_DEVICE float* To(const Stretches::Part& part) const {
    return out + source.Ready().Place(runs.keys[part.begin], runs.occurrences[part.begin]);
  }
  MONO_DEVICE int64_t NumFloats(const Stretches::Part& part) const {
    return source.Ready().Width(runs.occurrences[part.begin]);
  }
};

template <typename Source>
struct AddOverlapping {
  Runs runs;
  Source source;
  Stretches stretches;  // or nothing: then no run is long
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
    Pack<1> sum = Zeros<1>();
    for (int64_t i = low; i < runs.n && runs.FirstPlace(i) <= x;) {
      if (runs.keys[i] >= runs.of.nowhere) {
        ++i;
      } else if (stretches.IsLong(i)) {
        i = AddLong(i, x, &sum);
      } else {
        for (const uint32_t key = runs.keys[i]; runs.IsAt(i, key); ++i) {
          const uint32_t row = runs.occurrences[i];
          const int64_t column = x - ready.Place(key, row);
          if (column >= 0 && column < ready.Width(row)) {
            ready.template AddOne<1>(ready.Locate(row), column, &sum);
          }
        }
      }
    }
    return sum.values[0];
  }

  // Adds the partial sums of the run that begins at i; returns its end.
  MONO_DEVICE int64_t AddLong(int64_t i, int64_t x, Pack<1>* sum) const {
    const int64_t stretch = i / stretches.rows, key = runs.keys[i];
    const int64_t number = 2 * stretch + (i > stretch * stretches.rows);
    const Stretches::Part part{number, key, i, i};
    const int64_t count = stretches.NumPartials(part), column = x - runs.FirstPlace(i);
    for (int64_t k = 0; k < count && column < stretches.floats; ++k) {
      sum->values[0] += stretches.Partial(part, k)[column];
    }
    return stretches.FirstOf(key + 1, i, runs.n);
  }
};

// Does two things that few calls need in one launch.
template <typename Owner, typename Source>
struct FinishSums {
  AddPartials<Owner> partials;
  AddOverlapping<Source> overlapping;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    partials(block);
    if (block.number >= kOverlapTiles) return;
    block.Each([&](int lane) { overlapping(block.number, lane); });
  }
};

template <typename Owner, typename Source>
int Finish(Stream stream, const AddPartials<Owner>& partials,
           const AddOverlapping<Source>& overlapping) {
  static_assert(kPartBlocks >= kOverlapTiles);
  return ForBlocks(stream, kPartBlocks, AddPartials<Owner>::kBytes,
                   FinishSums<Owner, Source>{partials, overlapping});
}

// *overlap and *any_long are 0 on entry; partials has RunPartials elements. kSize: columns of a
// lane, which divides the widths. kInOrder: the rows of a place are added in their order.
template <int kSize, bool kInOrder, typename Source>
int ScatterSum(Stream stream, const Runs& runs, const Source& source, int64_t max_width,
               const int32_t* bad, int32_t* overlap, float* partials, int32_t* any_long, float* out,
               int64_t out_size) {
  MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
  if (runs.n == 0) return MONO_GPU_OK;
  const int log_lanes = LogLanes(CeilDiv(max_width, kSize), 5);
  const Stretches stretches{runs.keys,
                            runs.n,
                            kRunStretch,
                            runs.of,
                            runs.of.nowhere,
                            partials,
                            RunFloats(runs.of, max_width),
                            any_long};
  const auto add = [&](auto functor, int64_t groups) {
    const int64_t items = groups << log_lanes;
    return ForTiles(stream, CeilDiv(items, kLanes), EachItem<decltype(functor)>{items, functor},
                    CeilDiv(runs.n, kLanes), FindOverlap<Source>{runs, source, bad, overlap});
  };
  if constexpr (kInOrder) {
    MONO_GPU_TRY(
        add(AddRuns<kSize, Source>{runs, source, stretches, log_lanes, max_width, bad, out},
            CeilDiv(runs.n, kScatterRows)));
  } else {
    MONO_GPU_TRY(
        add(AddWholeRuns<kSize, Source>{runs, source, stretches, log_lanes, max_width, bad, out},
            runs.n));
  }
  if (runs.n > kRunStretch) {
    MONO_GPU_TRY(
        ForBlocks(stream, kPartBlocks, kLanes * kSize * static_cast<int64_t>(sizeof(float)),
                  AddParts<kSize, kInOrder, Source>{runs, source, stretches, bad, overlap}));
  }
  return Finish(
      stream,
      AddPartials<LongRuns<Source>>{stretches, LongRuns<Source>{runs, source, bad, overlap, out}},
      AddOverlapping<Source>{runs, source, stretches, max_width, bad, overlap, out, out_size});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
