// Saves tables to files and restores them. Adds to hash_table/records/table_files.h what needs
// TensorFlow: its file systems, and groups of tables, whose format needs Snappy.
//
//   single table   <basename>-ddddd-of-ddddd        TFRecords of EntryDump
//   group          <basename>-ddddd-of-ddddd        the same, Snappy-compressed, table after table
//                  <basename>.meta-ddddd-of-ddddd   TFRecords of MultiHashTableMetadata
//   both           .<name>.manifest                 in the same folder (files/file_set.h)
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CHECKPOINT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/records/table_files.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

struct NamedTable {
  std::string name;
  ::monolith::engine::EmbeddingTable* table;
};

// The same wherever the table lives.
struct NamedRecordTable {
  std::string name;
  ::monolith::engine::RecordTable* table;
};

struct SaveOptions {
  int64_t nshards = -1;         // -1: by size
  bool use_own_expiry = false;  // what each table is configured with, instead of `expiry`
  ::monolith::engine::ExpiryPolicy expiry;
};

Status SaveTable(Env* env, const ::monolith::engine::RecordTable& table,
                 const std::string& basename, const SaveOptions& options);

Status RestoreTable(Env* env, const std::string& basename, ::monolith::engine::RecordTable* table);

Status SaveTables(Env* env, const std::vector<NamedRecordTable>& tables,
                  const std::string& basename, const SaveOptions& options);
Status SaveTables(Env* env, const std::vector<NamedTable>& tables, const std::string& basename,
                  const SaveOptions& options);

// Leaves tables that the checkpoint does not hold as they are, and skips what it holds beyond
// `tables`.
Status RestoreTables(Env* env, const std::string& basename,
                     const std::vector<NamedRecordTable>& tables);
Status RestoreTables(Env* env, const std::string& basename, const std::vector<NamedTable>& tables);

// Reads the number of rows per table of a saved group, in the order they were saved.
Status ReadTableSizes(Env* env, const std::string& basename,
                      std::vector<std::pair<std::string, uint64_t>>* sizes);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CHECKPOINT_H_
