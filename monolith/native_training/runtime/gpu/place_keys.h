// Places of a buffer as keys to sort by.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PLACE_KEYS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PLACE_KEYS_H_

#include <cstdint>
#include <string>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/sort.h"

namespace monolith {
namespace gpu {

// The key of what goes to no place.
constexpr uint32_t kNothing = 0xffffffffu;

struct Keys {
  int64_t min_width;  // of a row; a key is place / min_width
  int log_width;      // of min_width, if that is a power of two, else -1
  uint32_t nowhere;   // keys of places are below
  // Keys are sorted by these bits.
  int shift;
  int bits;

  // *unaligned becomes 1 where a place is no multiple of min_width.
  MONO_DEVICE uint32_t Of(int64_t place, int32_t* unaligned) const {
    int64_t key = place >> (log_width & 63), rest = place & (min_width - 1);
    if (log_width < 0) DivMod(place, min_width, &key, &rest);
    if (rest != 0) MarkBad(unaligned);
    return static_cast<uint32_t>(key);
  }

  // Returns the group that a key is sorted by. kNothing comes last, with other keys or behind them.
  MONO_DEVICE uint32_t Group(uint32_t key) const {
    return static_cast<uint32_t>((key & ((uint64_t{1} << bits) - 1)) >> shift);
  }
};

inline int MakeKeys(int64_t out_size, int64_t min_width, Keys* keys) {
  const int64_t nowhere = out_size / min_width;
  if (nowhere > INT64_C(0xffffffff)) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the gradient has " + std::to_string(out_size) +
                                               " elements, want less than 2^32 times " +
                                               std::to_string(min_width));
  }
  const int log_width = BitsOf(static_cast<uint64_t>(min_width)) - 1;
  *keys = {min_width, min_width == int64_t{1} << log_width ? log_width : -1,
           static_cast<uint32_t>(nowhere), 0, BitsOf(static_cast<uint64_t>(nowhere))};
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PLACE_KEYS_H_
