// The reader's side of the row log: from messages to the rows of serving tables.
//
// A follower remembers the last batch it has applied, (epoch, seq). Batches that are not newer are
// skipped, a newer one is applied when all its chunks are there, in whatever order they come;
// chunks that came twice count once. So messages may be repeated, and a batch whose writer died in
// the middle changes nothing.
//
// A scan of all rows may be as large as the tables, so its chunks do not wait for one another: each
// is applied as it comes, and only the ids are kept. Rows that no chunk has named go with the last
// one. If that never comes, rows are as new as the chunks before it, and since nothing counts as
// applied, the writer's next scan or the next writer's brings the rest.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_FOLLOWER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_FOLLOWER_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/row_log/row_batch.h"

namespace monolith {
namespace engine {

// Where a follower stands. All but the first two start at 0 with it.
struct FollowerState {
  int64_t epoch = 0;
  int64_t seq = 0;
  int64_t newest_event_time = 0;
  double send_time = 0;        // of the last batch
  int64_t batches = 0;         // applied
  int64_t rows = 0;            // written
  int64_t deleted = 0;         // ids that were said to be gone
  int64_t skipped = 0;         // messages that were not newer
  int64_t torn = 0;            // batches of which a newer one came before they were complete
  int64_t gaps = 0;            // batches whose predecessor was not applied
  int64_t unknown_tables = 0;  // parts of messages for tables that are not here
  int64_t waiting_chunks = 0;  // of a batch that is not complete
  int64_t digest_seq = 0;      // seq at which digests were compared last
  int64_t digest_ok = -1;      // whether they were equal; -1: none has come
};

// Thread-safe; lookups of the tables go on while a batch is applied.
class BatchFollower {
 public:
  struct NamedTable {
    std::string name;
    EmbeddingTable* table = nullptr;
  };

  enum class Outcome { kApplied = 0, kWaiting = 1, kOld = 2 };

  // Continues behind batch (epoch, seq), whose rows `tables` have: after a restore. Reads all rows.
  void Seek(const std::vector<NamedTable>& tables, int64_t epoch, int64_t seq);

  // Takes one message. Errors are those of ParseMessage, InvalidArgument if rows do not fit the
  // tables or chunks do not fit together, ResourceExhausted if memory is missing for new rows;
  // nothing is applied then, except in the last case: the message is to be tried again.
  Status Apply(const std::vector<NamedTable>& tables, const char* data, int64_t size,
               Outcome* outcome);

  FollowerState GetState() const;

  // Digests as they are kept with each batch, by table.
  std::map<std::string, TableDigest> Digests() const;

 private:
  struct Batch {
    BatchHeader header;                     // of its first chunk to come; no chunks: none has
    std::map<int32_t, std::string> chunks;  // messages that wait
    // Chunks of a scan that were applied.
    std::set<int32_t> applied;
    std::map<std::string, std::vector<int64_t>> kept;

    int64_t size() const { return static_cast<int64_t>(chunks.size() + applied.size()); }
  };

  struct Scratch {
    // Rows that are assigned at a time.
    std::vector<int64_t> ids;
    std::vector<float> values;
    // Those that are sorted by groups of shards at a time.
    std::vector<int64_t> window;
    std::vector<uint8_t> groups;
    std::vector<uint32_t> positions;
  };

  void ScanDigests(const std::vector<NamedTable>& tables);
  // Takes a chunk of the batch that waits. Whether that is complete.
  Status TakeChunk(const std::vector<NamedTable>& tables, const BatchView& chunk, const char* data,
                   int64_t size, bool* complete);
  Status TakeScanChunk(const std::vector<NamedTable>& tables, const BatchView& chunk,
                       bool* complete);
  Status ApplyChunk(const std::vector<NamedTable>& tables, const BatchView& chunk);
  void EndBatch(const std::vector<NamedTable>& tables);
  Status ApplyRows(const TableRowsView& rows, EmbeddingTable* table, int64_t time,
                   TableDigest* digest);
  static void RemoveOthers(EmbeddingTable* table, std::vector<int64_t> kept, TableDigest* digest);
  void CompareDigests(const BatchDigest& digest);

  mutable std::mutex mutex_;
  FollowerState state_;
  Batch waiting_;
  Scratch scratch_;
  std::map<std::string, TableDigest> digests_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_FOLLOWER_H_
