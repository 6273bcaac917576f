// Hot places: groups of sorted rows that are too many for one warp to add up in time.
//
// Sorted rows are cut into stretches of one length, and a group that has more rows is long. What a
// stretch has of long groups is added up by itself, to a partial sum. That are two parts at most:
// of the group that its first row is in, and of one that begins later, which its last row is in.
// Then the partial sums of a group are added. Which is added to which depends on the positions
// alone, so the result is the same every time.
//
//   stretches    | 1 1 2 2 | 2 2 2 2 | 2 2 3 4 |     group 2 is long
//   parts            [ 1 ]   [  2  ]   [ 4 ]         by their numbers: 2 * stretch, + 1 if later
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_STRETCHES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_STRETCHES_H_

#include <cstdint>

#include "monolith/native_training/runtime/base/host_device.h"
#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/place_keys.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"

namespace monolith {
namespace gpu {

constexpr int64_t kPartBlocks = 1024;  // share all parts: usually there are none

MONOLITH_HOST_DEVICE inline int64_t NumParts(int64_t n, int64_t rows) {
  return n > rows ? 2 * ((n + rows - 1) / rows) : 0;
}

struct Stretches {
  const uint32_t* keys;  // sorted by their groups
  int64_t n;
  int64_t rows;  // of a stretch, an even number
  Keys of;
  int64_t num_groups;  // later ones do not count
  float* partials;     // of NumParts(n, rows) parts
  int64_t floats;      // of each
  int32_t* any_long;   // 0 before one was found

  // The rows that a stretch has of a long group.
  struct Part {
    int64_t number;
    int64_t group;
    int64_t begin;
    int64_t end;
  };

  MONO_DEVICE int64_t GroupAt(int64_t i) const { return of.Group(keys[i]); }

  // Tells whether the group that begins there is long.
  MONO_DEVICE bool IsLong(int64_t begin) const {
    return begin + rows < n && GroupAt(begin + rows) == GroupAt(begin);
  }

  // False: there is nothing to do.
  MONO_DEVICE bool Find(int64_t number, Part* part) const {
    const int64_t first = number / 2 * rows, end = first + rows < n ? first + rows : n;
    const bool later = number % 2 != 0;
    const int64_t at = later ? end - 1 : first, group = GroupAt(at);
    if (group >= num_groups || !MayBeLong(at, group)) return false;
    if (later && GroupAt(first) == group) return false;
    const int64_t earliest = later ? first : first > rows ? first - rows : 0;
    const int64_t begin = FirstOf(group, earliest, at);
    if (!IsLong(begin)) return false;
    *part = {number, group, begin > first ? begin : first,
             later ? end : FirstOf(group + 1, first, end)};
    return true;
  }

  // The part of a stretch with which a long group begins.
  MONO_DEVICE bool FindStart(int64_t stretch, Part* part) const {
    const int64_t first = stretch * rows, end = first + rows;
    if (end >= n) return false;
    const int64_t group = GroupAt(end - 1);
    const bool whole = GroupAt(first) == group;
    if (group >= num_groups || GroupAt(end) != group) return false;
    // Short groups reach over most ends, too: without this each of them would be searched for.
    if (!MayBeLong(end - 1, group)) return false;
    if (whole && first > 0 && GroupAt(first - 1) == group) return false;
    const int64_t begin = whole ? first : FirstOf(group, first, end - 1);
    *part = {2 * stretch + (begin > first), group, begin, end};
    return IsLong(begin);
  }

  // Partial sums of the group that begins with a part.
  MONO_DEVICE int64_t NumPartials(const Part& part) const {
    const int64_t next = part.number / 2 + 1;
    int64_t low = next, high = NumParts(n, rows) / 2;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (GroupAt(middle * rows) == part.group) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return 1 + low - next;
  }

  MONO_DEVICE float* Partial(int64_t number) const { return partials + number * floats; }

  // The k-th partial sum of the group that begins with a part.
  MONO_DEVICE const float* Partial(const Part& part, int64_t k) const {
    return Partial(k == 0 ? part.number : 2 * (part.number / 2 + k));
  }

  // The first row in [low, high) of a group or a later one, or high.
  MONO_DEVICE int64_t FirstOf(int64_t group, int64_t low, int64_t high) const {
    // Inside a hot group it is one of these.
    if (low >= high || GroupAt(low) >= group) return low;
    if (GroupAt(high - 1) < group) return high;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (GroupAt(middle) < group) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  // A long group has as many rows on one side of each of its rows.
  MONO_DEVICE bool MayBeLong(int64_t at, int64_t group) const {
    const int64_t before = at - rows / 2, after = at + rows / 2;
    const bool reaches_before = before >= 0 && GroupAt(before) == group;
    const bool reaches_after = after < n && GroupAt(after) == group;
    return reaches_before || reaches_after;
  }
};

// Returns the logarithm of the lanes that read a row of this many packs of columns.
MONOLITH_HOST_DEVICE inline int LogLanes(int64_t packs, int most) {
  int log_lanes = 0;
  while (log_lanes < most && (int64_t{1} << log_lanes) < packs) ++log_lanes;
  return log_lanes;
}

constexpr int kLogBlockLanes = 8;
static_assert(1 << kLogBlockLanes == kLanes);

// Adds up what all groups of 1 << log_lanes lanes have, as a tree: terms(group, number of groups,
// lane of the group) returns it, and done(lane of the group, sum) gets the result. The block has
// kLanes * kSize floats of memory.
template <int kSize, typename Terms, typename Done>
MONO_DEVICE void SumOfGroups(const ThreadBlock& block, int log_lanes, const Terms& terms,
                             const Done& done) {
  float* const sums = block.At<float>(0);
  const int groups = kLanes >> log_lanes, lanes = 1 << log_lanes;
  block.Each([&](int lane) {
    StoreAligned<kSize>(terms(lane >> log_lanes, groups, lane & (lanes - 1)), sums + lane * kSize);
  });
  for (int half = groups / 2; half > 0; half /= 2) {
    block.Each([&](int lane) {
      if (lane >= half * lanes) return;
      Pack<kSize> sum = LoadAligned<kSize>(sums + lane * kSize);
      AddTo(&sum, LoadAligned<kSize>(sums + (lane + half * lanes) * kSize));
      StoreAligned<kSize>(sum, sums + lane * kSize);
    });
  }
  block.Each([&](int lane) {
    if (lane < lanes) done(lane, LoadAligned<kSize>(sums + lane * kSize));
  });
}

// Adds the partial sums of long groups up. An Owner has
//   bool IsOff()                  nothing is to be done
//   float* To(part), int64_t NumFloats(part)   what the group of a part adds up to
template <typename Owner>
struct AddPartials {
  static constexpr int64_t kBytes = kLanes * static_cast<int64_t>(sizeof(float));

  Stretches stretches;
  Owner owner;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    if (*stretches.any_long == 0 || owner.IsOff()) return;
    const int64_t chunks = (stretches.floats + kLanes - 1) / kLanes;
    const int64_t items = NumParts(stretches.n, stretches.rows) / 2 * chunks;
    for (int64_t item = block.number; item < items; item += kPartBlocks) {
      int64_t stretch, chunk;
      DivMod(item, chunks, &stretch, &chunk);
      Stretches::Part part;
      if (stretches.FindStart(stretch, &part)) Add(block, part, chunk * kLanes);
    }
  }

  MONO_DEVICE void Add(const ThreadBlock& block, const Stretches::Part& part,
                       int64_t first_column) const {
    const int64_t columns = owner.NumFloats(part) - first_column;
    if (columns <= 0) return;
    const int64_t count = stretches.NumPartials(part);
    const auto terms = [&](int group, int groups, int own) {
      constexpr int kAtOnce = 8;
      Pack<1> sum = Zeros<1>();
      if (own >= columns) return sum;
      for (int64_t first = group; first < count; first += kAtOnce * groups) {
        float values[kAtOnce];
        MONO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          const int64_t i = first + k * groups;
          values[k] = i < count ? stretches.Partial(part, i)[first_column + own] : 0.0f;
        }
        MONO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) sum.values[0] += values[k];
      }
      return sum;
    };
    float* const to = owner.To(part) + first_column;
    SumOfGroups<1>(block, LogLanes(columns, kLogBlockLanes), terms, [&](int own, Pack<1> sum) {
      if (own < columns) to[own] = sum.values[0];
    });
  }
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_STRETCHES_H_
