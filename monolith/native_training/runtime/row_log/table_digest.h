// The digest of a table that is there, for those that keep one beside it (row_hash.h).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_TABLE_DIGEST_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_TABLE_DIGEST_H_

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/rows/row_hash.h"

namespace monolith {
namespace engine {

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

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_TABLE_DIGEST_H_
