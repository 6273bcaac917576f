// Adding rows to places of a buffer in one order, without atomics: occurrences (a place and the
// number of a row) are sorted by place, and the first at a place adds up all that
// follow.
//
//   places    3 0 3 0 7         occurrences 0 1 2 3 4
//   sorted    0 0 | 3 3 | 7                 1 3 | 0 2 | 4
//
// A row covers [place, place + width). Rows of one place usually have one width, and rows of
// different places do not overlap. Where that is not so, every float of the buffer looks for the
// rows that cover it, which is slow but right. Which way to go is found out on the device.
//
// A Source has
//   int64_t Width(uint32_t occurrence)
//   int64_t AddGroup<kSize>(runs, first, place, column, Pack<kSize>* sum)
//     adds columns [column, column + kSize) of the occurrences from position `first` on that stand
//     at `place`, or of the first few of them; returns the position after those
//   float AddOne(occurrence, column, sum)     returns sum plus one column of one occurrence
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_

#include <cstdint>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

// Occurrences sorted by place. Those at or behind `limit` do not count.
template <typename Key>
struct Runs {
  const Key* places;
  const uint32_t* occurrences;
  int64_t n;
  int64_t limit;

  MONO_DEVICE bool IsAt(int64_t i, int64_t place) const {
    return i < n && static_cast<int64_t>(places[i]) == place;
  }
};

template <typename Key, typename Source>
struct FindOverlap {
  Runs<Key> runs;
  Source source;
  int32_t* overlap;

  MONO_DEVICE void operator()(int64_t i) const {
    if (i + 1 >= runs.n) return;
    const int64_t place = static_cast<int64_t>(runs.places[i]);
    const int64_t next = static_cast<int64_t>(runs.places[i + 1]);
    if (next >= runs.limit) return;
    const int64_t width = source.Width(runs.occurrences[i]);
    if (next == place ? source.Width(runs.occurrences[i + 1]) != width : place + width > next) {
      MarkBad(overlap);
    }
  }
};

// 1 << log_lanes lanes for each position; those of the first at a place add.
template <int kSize, typename Key, typename Source>
struct AddRuns {
  Runs<Key> runs;
  Source source;
  int log_lanes;
  const int32_t* bad;
  const int32_t* overlap;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    const int64_t first = item >> log_lanes;
    const int64_t place = static_cast<int64_t>(runs.places[first]);
    if (place >= runs.limit || *bad != 0 || *overlap != 0) return;
    if (first > 0 && static_cast<int64_t>(runs.places[first - 1]) == place) return;
    const int64_t width = source.Width(runs.occurrences[first]);
    const int64_t lane = item & ((int64_t{1} << log_lanes) - 1);
    for (int64_t c = lane * kSize; c < width; c += int64_t{kSize} << log_lanes) {
      Pack<kSize> sum = Zeros<kSize>();
      for (int64_t i = first; runs.IsAt(i, place);) {
        i = source.template AddGroup<kSize>(runs, i, place, c, &sum);
      }
      Store<kSize>(sum, out + place + c);
    }
  }
};

// A few tiles share all floats: usually there is nothing to do.
constexpr int64_t kOverlapTiles = 512;

template <typename Key, typename Source>
struct AddOverlapping {
  Runs<Key> runs;
  Source source;
  int64_t max_width;
  const int32_t* bad;
  const int32_t* overlap;
  float* out;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (*bad != 0 || *overlap == 0) return;
    for (int64_t x = tile * kLanes + lane; x < runs.limit; x += kOverlapTiles * kLanes) {
      out[x] = SumAt(x);
    }
  }

  MONO_DEVICE float SumAt(int64_t x) const {
    int64_t low = 0, high = runs.n;  // the first whose row may reach x
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (static_cast<int64_t>(runs.places[middle]) + max_width <= x) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    float sum = 0;
    for (int64_t i = low; i < runs.n && static_cast<int64_t>(runs.places[i]) <= x; ++i) {
      const int64_t column = x - static_cast<int64_t>(runs.places[i]);
      if (column < source.Width(runs.occurrences[i])) {
        sum = source.AddOne(runs.occurrences[i], column, sum);
      }
    }
    return sum;
  }
};

// out, of runs.limit floats, is 0 on entry; so is *overlap. kSize: columns of a lane, which divides
// the widths.
template <int kSize, typename Key, typename Source>
int ScatterSum(Stream stream, const Runs<Key>& runs, const Source& source, int64_t max_width,
               const int32_t* bad, int32_t* overlap, float* out) {
  if (runs.n == 0) return MONO_GPU_OK;
  int log_lanes = 0;
  while (log_lanes < 5 && (int64_t{kSize} << log_lanes) < max_width) ++log_lanes;
  MONO_GPU_TRY(ForEach(stream, runs.n, FindOverlap<Key, Source>{runs, source, overlap}));
  MONO_GPU_TRY(ForEach(stream, runs.n << log_lanes,
                       AddRuns<kSize, Key, Source>{runs, source, log_lanes, bad, overlap, out}));
  return ForTiles(stream, kOverlapTiles,
                  AddOverlapping<Key, Source>{runs, source, max_width, bad, overlap, out});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SCATTER_SUM_H_
