// Digests of tables: equal digests of two tables mean equal rows, bit by bit.
//
// A table's digest is the sum, modulo 2^64, of a 64-bit hash of each row's id and float bits. A sum
// knows no order, and one row can be taken out of it or put into it. Rows of zeros count as absent:
// a table may be told not to keep them, and a lookup answers zeros either way.
//
// Writer and reader of a row log compute the same function: a change of it is a change of the
// format.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_HASH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_HASH_H_

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace monolith {
namespace engine {

// The sum of squares is below the smallest normal float. Sums only grow, so that most vectors are
// told by their first value. In double, so that threads that take subnormal floats for zeros, as
// TensorFlow's do, decide like others.
inline bool IsZeroVector(const float* values, int64_t dim) {
  double sum = 0.0;
  for (int64_t i = 0; i < dim; ++i) {
    const double value = values[i];
    sum += value * value;
    if (!(sum < std::numeric_limits<float>::min())) return false;
  }
  return true;
}

inline uint64_t FoldProduct(uint64_t a, uint64_t b) {
  const __uint128_t product = static_cast<__uint128_t>(a) * b;
  return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

// Each 8 bytes of values are two 32-bit numbers, to which the halves of a key of their place are
// added; the products, of 64 bits, are summed up (NH of UMAC). One multiplication of the fast kind
// takes in 8 bytes, and none waits for another one. Compilers find no vectors in that by
// themselves.
inline uint64_t SumOfProducts(const float* values, int64_t dim) {
  constexpr uint64_t kFirstKey = 0x9e3779b97f4a7c15u;
  constexpr uint64_t kNextKey = 0xa0761d6478bd642fu;
  uint64_t key = kFirstKey;
  uint64_t sum = 0;
  int64_t i = 0;
#if defined(__SSE2__)
  __m128i keys =
      _mm_set_epi64x(static_cast<int64_t>(kFirstKey + kNextKey), static_cast<int64_t>(kFirstKey));
  const __m128i next = _mm_set1_epi64x(static_cast<int64_t>(2 * kNextKey));
  __m128i sums = _mm_setzero_si128();
  for (; i + 4 <= dim; i += 4) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
    const __m128i pairs = _mm_add_epi32(bits, keys);
    sums = _mm_add_epi64(sums, _mm_mul_epu32(pairs, _mm_srli_epi64(pairs, 32)));
    keys = _mm_add_epi64(keys, next);
  }
  uint64_t halves[2];
  std::memcpy(halves, &sums, sizeof(halves));
  sum = halves[0] + halves[1];
#elif defined(__ARM_NEON)
  const uint64_t first_keys[2] = {kFirstKey, kFirstKey + kNextKey};
  uint64x2_t keys = vld1q_u64(first_keys);
  const uint64x2_t next = vdupq_n_u64(2 * kNextKey);
  uint64x2_t sums = vdupq_n_u64(0);
  for (; i + 4 <= dim; i += 4) {
    const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(values + i));
    const uint64x2_t pairs = vreinterpretq_u64_u32(vaddq_u32(bits, vreinterpretq_u32_u64(keys)));
    sums = vmlal_u32(sums, vmovn_u64(pairs), vshrn_n_u64(pairs, 32));
    keys = vaddq_u64(keys, next);
  }
  sum = vgetq_lane_u64(sums, 0) + vgetq_lane_u64(sums, 1);
#endif
  key += static_cast<uint64_t>(i / 2) * kNextKey;
  for (; i < dim; i += 2, key += kNextKey) {
    uint32_t pair[2] = {0, 0};
    std::memcpy(pair, values + i, i + 1 < dim ? 8 : 4);
    sum += uint64_t{pair[0] + static_cast<uint32_t>(key)} *
           uint64_t{pair[1] + static_cast<uint32_t>(key >> 32)};
  }
  return sum;
}

// Never 0, except for a row of zeros.
inline uint64_t RowHash(int64_t id, const float* values, int64_t dim) {
  if (IsZeroVector(values, dim)) return 0;
  const uint64_t hash = FoldProduct(static_cast<uint64_t>(id) ^ 0xe7037ed1a0b428dbu,
                                    SumOfProducts(values, dim) ^ 0x9e3779b97f4a7c15u);
  const uint64_t mixed = FoldProduct(hash ^ static_cast<uint64_t>(dim), 0x8ebc6af09c88c6e3u);
  return mixed == 0 ? 1 : mixed;
}

struct TableDigest {
  uint64_t sum = 0;
  int64_t rows = 0;  // those that are not zeros

  void Add(uint64_t hash) {
    sum += hash;
    rows += hash != 0;
  }
  void Remove(uint64_t hash) {
    sum -= hash;
    rows -= hash != 0;
  }
  TableDigest& operator+=(const TableDigest& change) {
    sum += change.sum;
    rows += change.rows;
    return *this;
  }
  friend bool operator==(const TableDigest& a, const TableDigest& b) {
    return a.sum == b.sum && a.rows == b.rows;
  }
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_HASH_H_
