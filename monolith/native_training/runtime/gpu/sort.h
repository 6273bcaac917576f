// Stable sorts on the device: of (key, number) pairs, whose keys are uint32_t, and of words.
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
int SortScratch(int64_t n, int bits, int64_t* bytes);

// Sorts by the lowest bits of the keys; n is below 2^31.
template <typename Key>
int SortPairs(Stream stream, void* scratch, int64_t scratch_bytes, const Key* keys,
              Key* sorted_keys, const uint32_t* numbers, uint32_t* sorted_numbers, int64_t n,
              int bits);

// The same for single words, by the bits [first_bit, end_bit) of them.
int SortWordsScratch(int64_t n, int first_bit, int end_bit, int64_t* bytes);
int SortWords(Stream stream, void* scratch, int64_t scratch_bytes, const uint64_t* words,
              uint64_t* sorted, int64_t n, int first_bit, int end_bit);

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_SORT_H_
