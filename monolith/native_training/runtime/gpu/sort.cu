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
int SortScratch(int64_t n, int bits, int64_t* bytes, int first_bit) {
  *bytes = 0;
  if (first_bit >= bits) return MONO_GPU_OK;
  // The library asks the driver about its kernels each time, and batches are often of one size.
  struct Answer {
    int device = -1;
    int64_t n = 0;
    int first_bit = 0, bits = 0;
    int64_t bytes = 0;
  };
  thread_local Answer last;
  int device = 0;
  MONO_GPU_TRY(CheckCuda(cudaGetDevice(&device), "current device"));
  if (last.device == device && last.n == n && last.first_bit == first_bit && last.bits == bits) {
    *bytes = last.bytes;
    return MONO_GPU_OK;
  }
  size_t size = 0;
  const cudaError_t error = cub::DeviceRadixSort::SortPairs<Key, uint32_t>(
      nullptr, size, nullptr, nullptr, nullptr, nullptr, static_cast<int>(n), first_bit, bits,
      nullptr);
  MONO_GPU_TRY(CheckCuda(error, "size of a sort"));
  *bytes = static_cast<int64_t>(size);
  last = {device, n, first_bit, bits, *bytes};
  return MONO_GPU_OK;
}

template <typename Key>
int SortPairs(Stream stream, void* scratch, int64_t scratch_bytes, const Key* keys,
              Key* sorted_keys, const uint32_t* numbers, uint32_t* sorted_numbers, int64_t n,
              int bits, int first_bit) {
  if (n == 0) return MONO_GPU_OK;
  if (first_bit >= bits) {  // all are equal; the library's sort takes no empty range of bits
    const auto on = static_cast<cudaStream_t>(stream);
    const size_t count = static_cast<size_t>(n);
    MONO_GPU_TRY(CheckCuda(
        cudaMemcpyAsync(sorted_keys, keys, count * sizeof(Key), cudaMemcpyDeviceToDevice, on),
        "copy of keys"));
    return CheckCuda(cudaMemcpyAsync(sorted_numbers, numbers, count * sizeof(uint32_t),
                                     cudaMemcpyDeviceToDevice, on),
                     "copy of numbers");
  }
  size_t size = static_cast<size_t>(scratch_bytes);
  const cudaError_t error = cub::DeviceRadixSort::SortPairs(
      scratch, size, keys, sorted_keys, numbers, sorted_numbers, static_cast<int>(n), first_bit,
      bits, static_cast<cudaStream_t>(stream));
  return CheckCuda(error, "sort");
}

#else

template <typename Key>
int SortScratch(int64_t, int, int64_t* bytes, int) {
  *bytes = 0;
  return MONO_GPU_OK;
}

template <typename Key>
int SortPairs(Stream, void*, int64_t, const Key* keys, Key* sorted_keys, const uint32_t* numbers,
              uint32_t* sorted_numbers, int64_t n, int bits, int first_bit) {
  const Key mask = bits >= static_cast<int>(8 * sizeof(Key)) ? ~Key{0} : (Key{1} << bits) - 1;
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return (keys[a] & mask) >> first_bit < (keys[b] & mask) >> first_bit;
  });
  for (int64_t i = 0; i < n; ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_numbers[i] = numbers[order[i]];
  }
  return MONO_GPU_OK;
}

#endif

template int SortScratch<uint32_t>(int64_t, int, int64_t*, int);
template int SortScratch<uint64_t>(int64_t, int, int64_t*, int);
template int SortPairs<uint32_t>(Stream, void*, int64_t, const uint32_t*, uint32_t*,
                                 const uint32_t*, uint32_t*, int64_t, int, int);
template int SortPairs<uint64_t>(Stream, void*, int64_t, const uint64_t*, uint64_t*,
                                 const uint32_t*, uint32_t*, int64_t, int, int);

}  // namespace gpu
}  // namespace monolith
