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
inline uint64_t RowHash(int64_t id, const float* values, int64_t dim) {
  if (IsZeroVector(values, dim)) return 0;
  uint64_t hash = FoldProduct(static_cast<uint64_t>(id) ^ 0x9e3779b97f4a7c15u, 0xa0761d6478bd642fu);
  const char* at = reinterpret_cast<const char*>(values);
  int64_t left = 4 * dim;
  uint64_t words[2];
  for (; left >= 16; left -= 16, at += 16) {
    std::memcpy(words, at, 16);
    hash = FoldProduct(words[0] ^ 0xe7037ed1a0b428dbu, words[1] ^ hash);
  }
  if (left > 0) {
    words[0] = words[1] = 0;
    std::memcpy(words, at, static_cast<size_t>(left));
    hash = FoldProduct(words[0] ^ 0xe7037ed1a0b428dbu, words[1] ^ hash);
  }
  hash = FoldProduct(hash ^ static_cast<uint64_t>(dim), 0x8ebc6af09c88c6e3u);
  return hash == 0 ? 1 : hash;
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
