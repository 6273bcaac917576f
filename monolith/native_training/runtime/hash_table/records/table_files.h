// A table to and from files: TFRecords of EntryDump in `<basename>-ddddd-of-ddddd`, with a
// manifest (files/file_set.h).
//
// A save is not a snapshot of the whole table: internal shards are written one after another, each
// row as it is at that moment. Rows are independent, so this is what training needs, and no lookup
// waits. A save that fails leaves what was there before; a load that fails leaves the table as it
// was. All calls are thread-safe with everything else that happens to the table.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_TABLE_FILES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_TABLE_FILES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "monolith/native_training/runtime/files/file_system.h"
#include "monolith/native_training/runtime/files/record_reader.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"

namespace monolith {
namespace engine {

struct SaveStats {
  int64_t saved = 0;
  int64_t expired = 0;  // rows that were left out

  void Add(const SaveStats& other) {
    saved += other.saved;
    expired += other.expired;
  }
};

using AppendBytes = std::function<Status(std::string_view bytes)>;

// Takes the records of a load, in one or several passes over all files. An error ends it; the
// destructor of a load that was not finished leaves the table in a state that the error tells.
class RecordLoad {
 public:
  virtual ~RecordLoad() = default;
  virtual int num_passes() const { return 1; }
  // About this many records will come.
  virtual Status BeginPass(int pass, int64_t rows) = 0;
  // Thread-safe.
  virtual Status Add(const RecordView* records, int64_t n, LoadStats* stats) = 0;
  // All records of all passes have come.
  virtual Status Finish() = 0;
};

// A table, wherever it lives, as files see it.
class RecordTable {
 public:
  virtual ~RecordTable() = default;
  virtual Status GetSize(int64_t* size) const = 0;
  virtual int64_t MaxUpdateTs() const = 0;
  virtual const ExpiryPolicy& expiry() const = 0;
  // Hands the rows of one of EmbeddingTable::NumShards() internal shards to `append`, framed.
  virtual Status WriteShard(int shard, const ExpiryPolicy* expiry, const AppendBytes& append,
                            SaveStats* stats) const = 0;
  // Begins to replace the content.
  virtual std::unique_ptr<RecordLoad> NewLoad() = 0;
};

// An EmbeddingTable, which must outlive it, as such.
std::unique_ptr<RecordTable> AsRecordTable(EmbeddingTable* table);

// Replaces what was saved under `basename`. `num_files` -1: one for a million rows, four at most.
// `expiry` null: no row is left out. Logs an error if more than half of the rows are.
// Unimplemented: a SERVING table.
Status SaveTable(FileSystem* files, const RecordTable& table, const std::string& basename,
                 int64_t num_files, const ExpiryPolicy* expiry, SaveStats* stats = nullptr);
Status SaveTable(FileSystem* files, const EmbeddingTable& table, const std::string& basename,
                 int64_t num_files, const ExpiryPolicy* expiry, SaveStats* stats = nullptr);

// Replaces the content of `table` by what was saved.
// FailedPrecondition: a file is damaged. InvalidArgument: files are missing, or rows have another
// dimension.
Status LoadTable(FileSystem* files, const std::string& basename, RecordTable* table,
                 LoadStats* stats = nullptr);
Status LoadTable(FileSystem* files, const std::string& basename, EmbeddingTable* table,
                 LoadStats* stats = nullptr);

// -- Parts of the above, for files that hold several tables.

// -1 becomes a number that fits this many rows; InvalidArgument for what is not possible.
Status ResolveNumFiles(int64_t requested, int64_t rows, int64_t* num_files);

// Hands the rows that belong to file `number` of `num_files` to `append`, framed, a page at a time.
Status WriteTableRecords(const RecordTable& table, const ExpiryPolicy* expiry, int64_t number,
                         int64_t num_files, const AppendBytes& append, SaveStats* stats);

// Says so, loudly, if a save has left out more than half of the rows.
void WarnIfMostExpired(const RecordTable& table, const std::string& what, const SaveStats& stats);

// Adds the next `limit` records to `load`, fewer at the end of the file. `load` null: they are
// skipped. Sets `*loaded` to their number.
Status LoadTableRecords(RecordBatchReader* reader, int64_t limit, RecordLoad* load,
                        LoadStats* stats, int64_t* loaded);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_TABLE_FILES_H_
