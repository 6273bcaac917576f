// A source of its own: the radix sort takes nvcc longer than all other kernels together.
#include "monolith/native_training/runtime/gpu/sort.h"

#if defined(__CUDACC__)
#include <cub/device/device_radix_sort.cuh>
#else
#include <algorithm>
#include <numeric>
#include <vector>
#endif

namespace monolith {
namespace gpu {

#if defined(__CUDACC__)

template <typename Key>
int SortScratch(int64_t n, int bits, int64_t* bytes) {
  size_t size = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortPairs<Key, uint32_t>(
      nullptr, size, nullptr, nullptr, nullptr, nullptr, static_cast<int>(n), 0, bits, nullptr);
  *bytes = static_cast<int64_t>(size);
  return CheckCuda(error, "size of a sort");
}

template <typename Key>
int SortPairs(Stream stream, void* scratch, int64_t scratch_bytes, const Key* keys,
              Key* sorted_keys, const uint32_t* numbers, uint32_t* sorted_numbers, int64_t n,
              int bits) {
  if (n == 0) return MONO_GPU_OK;
  size_t size = static_cast<size_t>(scratch_bytes);
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      scratch, size, keys, sorted_keys, numbers, sorted_numbers, static_cast<int>(n), 0, bits,
      static_cast<cudaStream_t>(stream));
  return CheckCuda(error, "sort");
}

int SortWordsScratch(int64_t n, int first_bit, int end_bit, int64_t* bytes) {
  size_t size = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortKeys<uint64_t>(
      nullptr, size, nullptr, nullptr, static_cast<int>(n), first_bit, end_bit, nullptr);
  *bytes = static_cast<int64_t>(size);
  return CheckCuda(error, "size of a sort");
}

int SortWords(Stream stream, void* scratch, int64_t scratch_bytes, const uint64_t* words,
              uint64_t* sorted, int64_t n, int first_bit, int end_bit) {
  if (n == 0) return MONO_GPU_OK;
  size_t size = static_cast<size_t>(scratch_bytes);
  return CheckCuda(
      cub::DeviceRadixSort::SortKeys(scratch, size, words, sorted, static_cast<int>(n), first_bit,
                                     end_bit, static_cast<cudaStream_t>(stream)),
      "sort");
}

#else

template <typename Key>
int SortScratch(int64_t, int, int64_t* bytes) {
  *bytes = 0;
  return MONO_GPU_OK;
}

template <typename Key>
int SortPairs(Stream, void*, int64_t, const Key* keys, Key* sorted_keys, const uint32_t* numbers,
              uint32_t* sorted_numbers, int64_t n, int bits) {
  const Key mask = bits >= static_cast<int>(8 * sizeof(Key)) ? ~Key{0} : (Key{1} << bits) - 1;
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return (keys[a] & mask) < (keys[b] & mask); });
  for (int64_t i = 0; i < n; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_numbers[i] = numbers[order[i]];
  }
  return MONO_GPU_OK;
}

int SortWordsScratch(int64_t, int, int, int64_t* bytes) {
  *bytes = 0;
  return MONO_GPU_OK;
}

int SortWords(Stream, void*, int64_t, const uint64_t* words, uint64_t* sorted, int64_t n,
              int first_bit, int end_bit) {
  const uint64_t mask = end_bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << end_bit) - 1;
  std::copy(words, words + n, sorted);
  std::stable_sort(sorted, sorted + n, [&](uint64_t a, uint64_t b) {
    return (a & mask) >> first_bit < (b & mask) >> first_bit;
  });
  return MONO_GPU_OK;
}

#endif

template int SortScratch<uint32_t>(int64_t, int, int64_t*);
template int SortPairs<uint32_t>(Stream, void*, int64_t, const uint32_t*, uint32_t*,
                                 const uint32_t*, uint32_t*, int64_t, int);

}  // namespace gpu
}  // namespace monolith
