// The writer's side of the row log: from touched ids to messages.
//
//   updates, evictions ----> set of touched (table, id), bounded
//                                   |  Begin: takes the set, plans chunks
//                                   v
//   chunk: ids -> one lookup -> | rows of those present | ids of those absent = deleted |
//                                   |  Take: encodes some chunks at a time
//                                   v
//                         messages (row_batch.h)
//
// Whether an id is a row or a deletion is decided by the table when the batch is made, so it does
// not matter in which order an id was updated, evicted and created again.
//
// When single ids cannot tell what changed, the next batch is a scan of all rows, marked as such:
// the set was full, memory was missing, or the content of a table was replaced.
//
// The digest of what was published is kept beside it, as a hash of the last published row of every
// id: the tables themselves are ahead of the log.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_BUILDER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_BUILDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/row_log/id_hashes.h"
#include "monolith/native_training/runtime/row_log/row_batch.h"
#include "monolith/native_training/runtime/row_log/served_values.h"

namespace monolith {
namespace engine {

// Why the next batch has to hold all rows.
enum ScanReason : uint32_t {
  kScanNone = 0,
  kScanOverflow = 1,  // more ids were touched than are remembered
  kScanReplaced = 2,  // a table was restored, cleared or is new
};

// Thread-safe.
class BatchBuilder {
 public:
  static constexpr int64_t kDefaultCapacity = 2097152;

  struct Options {
    bool full_scan = false;    // all rows, whatever was touched
    bool keep_hashes = false;  // needed for digests, of this batch and later ones
    bool half = false;         // rows in half precision
    // Ask for a digest in the last chunk. Needs keep_hashes. There is none in the first batch after
    // all rows were hashed unless that was a scan: updates that were under way may not be in it.
    bool digest = false;
  };

  struct Info {
    int64_t num_tables = 0;
    int64_t waiting_ids = 0;
    int64_t waiting_bytes = 0;    // of a batch, at most
    uint32_t scan_reasons = 0;    // ScanReason, or-ed
    int64_t scan_generation = 0;  // grows with every reason that comes up
    int64_t chunks_left = 0;      // of the batch that is being taken
  };

  struct Counts {
    int64_t num_chunks = 0;
    int64_t num_ids = 0;  // rows and deletions together
    bool full_scan = false;
  };

  // More than `capacity` touched ids make the next batch a scan.
  explicit BatchBuilder(int64_t capacity = kDefaultCapacity);

  // From now on `table` is part of the log, under `name`. It must stay until Detach, which waits
  // for a batch that is being encoded.
  void Attach(const std::string& name, EmbeddingTable* table);
  void Detach(const EmbeddingTable* table);

  // Never throws: missing memory makes the next batch a scan.
  void Touch(const EmbeddingTable* table, const int64_t* ids, int64_t n);
  void RequestScan(ScanReason reason);

  // Touches all ids of a message's tables, as far as these tables are attached. A message of a scan
  // asks for a scan: ids that it made disappear are not in it.
  void TouchMessage(const BatchView& batch);

  // Says that what was replaced up to `generation` needs no scan, because ids that differ were
  // touched one by one.
  void ForgetReplaced(int64_t generation);

  Info GetInfo() const;

  // Takes the touched ids. InvalidArgument: a row does not fit into a message. FailedPrecondition:
  // a batch is being taken. Chunk and num_chunks of `header` are set here, and newest_event_time to
  // the newest time of any update if it is less. After an error the next batch is a scan.
  Status Begin(const BatchHeader& header, const Options& options, Counts* counts);

  // Encodes chunks of the batch until they have `max_bytes` or there are none left; at least one if
  // any is left. After an error or exception the batch is gone, and the next one is a scan. Strings
  // that `messages` has are written over: who takes one chunk after another with the same vector
  // has them written to memory that is mapped and in the cache.
  Status Take(int64_t max_bytes, std::vector<std::string>* messages, int64_t* num_rows,
              int64_t* num_deleted);

  // Drops what is left of a batch; the next one is a scan.
  void Abandon();

 private:
  struct Source {
    Source(std::string name, EmbeddingTable* table)
        : name(std::move(name)), table(table), served(table->config()), published(table) {}
    std::string name;
    EmbeddingTable* table;
    ServedValues served;
    IdHashes published;
    TableDigest digest;
    std::vector<int64_t> ids;  // of the batch
  };

  // Ids [begin, end) of a source.
  struct Piece {
    size_t source;
    int64_t begin;
    int64_t end;
  };

  // Buffers that chunks are encoded with.
  struct Scratch {
    std::vector<float> values;
    std::vector<uint16_t> halves;
    std::vector<uint8_t> found;
    std::vector<uint64_t> hashes;
    std::string ids, rows, deleted;  // of a table of which some ids are deleted
  };

  Status BeginLocked(const BatchHeader& header, const Options& options, Counts* counts);
  void HashAllRows();
  void CollectTouched();
  void CollectAll();
  Status PlanChunks();
  void EncodePiece(const Piece& piece, std::string* message, int64_t* num_rows,
                   int64_t* num_deleted);
  // Looks `n` ids up and keeps their hashes; the values are those that the log gets. Returns how
  // many are there.
  int64_t ReadBlock(Source* source, const int64_t* ids, int64_t n);
  // Makes row `place` of the scratch, whose id is `id`, what the log gets, and keeps its hash.
  void PublishRow(Source* source, int64_t id, uint64_t id_hash, int64_t place);
  void EndBatch(bool failed);
  BatchDigest CurrentDigest() const;

  ConcurrentKeySet<TableKey> touched_;
  mutable std::mutex reasons_mutex_;
  uint32_t reasons_ = kScanReplaced;
  int64_t generation_ = 1;
  std::atomic<int64_t> max_row_bytes_{0};

  mutable std::mutex mutex_;  // all below
  std::vector<std::unique_ptr<Source>> sources_;
  bool hashes_valid_ = false;
  BatchHeader header_;
  Options options_;
  std::vector<std::vector<Piece>> chunks_;  // of the batch
  std::vector<int64_t> chunk_bytes_;        // of their messages, at most
  size_t next_chunk_ = 0;
  Scratch scratch_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_BATCH_BUILDER_H_
