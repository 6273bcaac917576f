// Digests of tables: equal digests of two tables mean equal rows, bit by bit.
//
// A table's digest is the sum, modulo 2^64, of a 64-bit hash of each row's id and float bits. A sum
// knows no order, and one row can be taken out of it or put into it. Rows of zeros count as absent:
// a table may be told not to keep them, and a lookup answers zeros either way.
//
// Writer and reader of a row log compute the same function: a change of it is a change of the
// format.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_HASH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_HASH_H_

#include <cstdint>
#include <cstring>

#include "monolith/native_training/runtime/hash_table/batch/write_stages.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"

namespace monolith {
namespace engine {

inline uint64_t FoldProduct(uint64_t a, uint64_t b) {
  const __uint128_t product = static_cast<__uint128_t>(a) * b;
  return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

// Never 0, except for a row of zeros.
//
// Each 8 bytes of values are two 32-bit numbers, to which the halves of a key of their place are
// added; the products, of 64 bits, are summed up (NH of UMAC). One multiplication of the fast kind
// takes in 8 bytes, and none waits for another one.
inline uint64_t RowHash(int64_t id, const float* values, int64_t dim) {
  if (IsZeroVector(values, dim)) return 0;
  const char* at = reinterpret_cast<const char*>(values);
  uint64_t key = 0x9e3779b97f4a7c15u;
  uint64_t sum = 0;
  const auto add = [&](const void* from, size_t size) {
    uint32_t pair[2] = {0, 0};
    std::memcpy(pair, from, size);
    sum += uint64_t{pair[0] + static_cast<uint32_t>(key)} *
           uint64_t{pair[1] + static_cast<uint32_t>(key >> 32)};
    key += 0xa0761d6478bd642fu;
  };
  for (int64_t i = 0; i < dim / 2; ++i, at += 8) add(at, 8);
  if (dim % 2 != 0) add(at, 4);
  const uint64_t hash =
      FoldProduct(static_cast<uint64_t>(id) ^ 0xe7037ed1a0b428dbu, sum ^ 0x9e3779b97f4a7c15u);
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
  friend bool operator==(const TableDigest& a, const TableDigest& b) {
    return a.sum == b.sum && a.rows == b.rows;
  }
};

// Reads every row. Exact only while nobody writes.
inline TableDigest DigestOf(const EmbeddingTable& table) {
  TableDigest digest;
  table.VisitRows([&](const RowView& row) {
    digest.Add(RowHash(row.id, row.values, table.dim()));
    return true;
  });
  return digest;
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_HASH_H_
