// A stable sort of (key, number) pairs on the device; keys are uint32_t or uint64_t.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SORT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SORT_H_

#include <cstdint>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

// Bits that numbers up to `largest` have.
inline int BitsOf(uint64_t largest) {
  int bits = 1;
  while (bits < 64 && largest >> bits != 0) ++bits;
  return bits;
}

// Sets *bytes to the scratch that SortPairs needs.
template <typename Key>
int SortScratch(int64_t n, int bits, int64_t* bytes, int first_bit = 0);

// Sorts by the bits [first_bit, bits) of the keys; n is below 2^31.
template <typename Key>
int SortPairs(Stream stream, void* scratch, int64_t scratch_bytes, const Key* keys,
              Key* sorted_keys, const uint32_t* numbers, uint32_t* sorted_numbers, int64_t n,
              int bits, int first_bit = 0);

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SORT_H_
