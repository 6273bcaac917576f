#include "monolith/native_training/runtime/data/city_hash.h"

#include <cstddef>
#include <utility>

namespace monolith {
namespace data {
namespace {

constexpr uint64_t kPrime0 = 0xc3a5c85c97cb3127ull;
constexpr uint64_t kPrime1 = 0xb492b66fbe98f273ull;
constexpr uint64_t kPrime2 = 0x9ae16a3b2f90404full;
constexpr uint64_t kPairMultiplier = 0x9ddfea08eb382d69ull;
constexpr size_t kBlock = 64;

using Pair = std::pair<uint64_t, uint64_t>;

// Little-endian numbers at an offset.
uint64_t Fetch(std::string_view s, size_t offset, size_t size) {
  uint64_t value = 0;
  for (size_t i = 0; i < size; ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(s[offset + i])) << (8 * i);
  }
  return value;
}
uint64_t Fetch64(std::string_view s, size_t offset) { return Fetch(s, offset, 8); }
uint64_t Fetch32(std::string_view s, size_t offset) { return Fetch(s, offset, 4); }

uint64_t Rotate(uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); }
uint64_t Mix(uint64_t x) { return x ^ (x >> 47); }

uint64_t SwapBytes(uint64_t x) {
  uint64_t swapped = 0;
  for (int i = 0; i < 8; ++i) swapped |= ((x >> (8 * i)) & 0xff) << (8 * (7 - i));
  return swapped;
}

uint64_t HashPair(uint64_t u, uint64_t v, uint64_t multiplier = kPairMultiplier) {
  const uint64_t a = Mix((u ^ v) * multiplier);
  const uint64_t b = Mix((v ^ a) * multiplier);
  return b * multiplier;
}

uint64_t HashUpTo16(std::string_view s) {
  const size_t size = s.size();
  const uint64_t multiplier = kPrime2 + size * 2;
  if (size >= 8) {
    const uint64_t a = Fetch64(s, 0) + kPrime2;
    const uint64_t b = Fetch64(s, size - 8);
    return HashPair(Rotate(b, 37) * multiplier + a, (Rotate(a, 25) + b) * multiplier, multiplier);
  }
  if (size >= 4) {
    return HashPair(size + (Fetch32(s, 0) << 3), Fetch32(s, size - 4), multiplier);
  }
  if (size == 0) return kPrime2;
  const uint64_t y = Fetch(s, 0, 1) + (Fetch(s, size >> 1, 1) << 8);
  const uint64_t z = size + (Fetch(s, size - 1, 1) << 2);
  return Mix(y * kPrime2 ^ z * kPrime0) * kPrime2;
}

uint64_t HashUpTo32(std::string_view s) {
  const size_t size = s.size();
  const uint64_t multiplier = kPrime2 + size * 2;
  const uint64_t a = Fetch64(s, 0) * kPrime1;
  const uint64_t b = Fetch64(s, 8);
  const uint64_t c = Fetch64(s, size - 8) * multiplier;
  const uint64_t d = Fetch64(s, size - 16) * kPrime2;
  return HashPair(Rotate(a + b, 43) + Rotate(c, 30) + d, a + Rotate(b + kPrime2, 18) + c,
                  multiplier);
}

uint64_t HashUpTo64(std::string_view s) {
  const size_t size = s.size();
  const uint64_t multiplier = kPrime2 + size * 2;
  const uint64_t a = Fetch64(s, 0) * kPrime2;
  const uint64_t b = Fetch64(s, 8);
  const uint64_t c = Fetch64(s, size - 24);
  const uint64_t d = Fetch64(s, size - 32);
  const uint64_t e = Fetch64(s, 16) * kPrime2;
  const uint64_t f = Fetch64(s, 24) * 9;
  const uint64_t g = Fetch64(s, size - 8);
  const uint64_t h = Fetch64(s, size - 16) * multiplier;
  const uint64_t u = Rotate(a + g, 43) + (Rotate(b, 30) + c) * 9;
  const uint64_t v = ((a + g) ^ d) + f + 1;
  const uint64_t w = SwapBytes((u + v) * multiplier) + h;
  const uint64_t x = Rotate(e + f, 42) + c;
  const uint64_t y = (SwapBytes((v + w) * multiplier) + g) * multiplier;
  const uint64_t z = e + f + c;
  const uint64_t last = SwapBytes((x + z) * multiplier + y) + b;
  return Mix((z + last) * multiplier + d + h) * multiplier + x;
}

// Hashes the 32 bytes at an offset.
Pair WeakHash32(std::string_view s, size_t offset, uint64_t a, uint64_t b) {
  const uint64_t last = Fetch64(s, offset + 24);
  a += Fetch64(s, offset);
  b = Rotate(b + a + last, 21);
  const uint64_t c = a;
  a += Fetch64(s, offset + 8);
  a += Fetch64(s, offset + 16);
  b += Rotate(a, 44);
  return {a + last, b + c};
}

}  // namespace

uint64_t CityHash64(std::string_view s) {
  const size_t size = s.size();
  if (size <= 16) return HashUpTo16(s);
  if (size <= 32) return HashUpTo32(s);
  if (size <= kBlock) return HashUpTo64(s);
  uint64_t x = Fetch64(s, size - 40);
  uint64_t y = Fetch64(s, size - 16) + Fetch64(s, size - 56);
  uint64_t z = HashPair(Fetch64(s, size - 48) + size, Fetch64(s, size - 24));
  Pair v = WeakHash32(s, size - 64, size, z);
  Pair w = WeakHash32(s, size - 32, y + kPrime1, x);
  x = x * kPrime1 + Fetch64(s, 0);
  // All blocks but the last, which was read above.
  for (size_t at = 0; at + kBlock < size; at += kBlock) {
    x = Rotate(x + y + v.first + Fetch64(s, at + 8), 37) * kPrime1;
    y = Rotate(y + v.second + Fetch64(s, at + 48), 42) * kPrime1;
    x ^= w.second;
    y += v.first + Fetch64(s, at + 40);
    z = Rotate(z + w.first, 33) * kPrime1;
    v = WeakHash32(s, at, v.second * kPrime1, x + w.first);
    w = WeakHash32(s, at + 32, z + w.second, y + Fetch64(s, at + 16));
    std::swap(z, x);
  }
  return HashPair(HashPair(v.first, w.first) + Mix(y) * kPrime1 + z,
                  HashPair(v.second, w.second) + x);
}

}  // namespace data
}  // namespace monolith
