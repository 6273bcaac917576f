// Hashes that make ids: CityHash64 of a number, and the cross of two ids.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_HASH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_HASH_H_

#include <cstdint>

namespace monolith {
namespace data {

// CityHash64 of the 8 little-endian bytes of `number`.
constexpr uint64_t HashNumber(uint64_t number) {
  constexpr uint64_t kPrime = 0x9ae16a3b2f90404full;
  constexpr uint64_t kMultiplier = kPrime + 2 * 8;  // 8 bytes
  const auto rotate = [](uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); };
  const uint64_t a = number + kPrime;
  const uint64_t b = number;
  const uint64_t c = rotate(b, 37) * kMultiplier + a;
  const uint64_t d = (rotate(a, 25) + b) * kMultiplier;
  uint64_t x = (c ^ d) * kMultiplier;
  x ^= x >> 47;
  uint64_t y = (d ^ x) * kMultiplier;
  y ^= y >> 47;
  return y * kMultiplier;
}

// Both halves of the signed 128-bit product.
constexpr uint64_t CombineFids(int64_t first, int64_t second) {
  const __int128 product = static_cast<__int128>(first) * second;
  return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_HASH_H_
