// The collisionless embedding table: int64 id -> float vector with optimizer state. Batches only.
//
//   ids of a batch
//     | hash; the top 6 bits are the shard
//     v
//   shard 0        shard 1                 shard 63
//   +-----------+  +-----------+           +-----------+
//   | RW lock   |  | RW lock   |    ...    | RW lock   |
//   | FlatIndex |  | FlatIndex |           | FlatIndex |  id -> row number, ts   (flat_index.h)
//   | RowSlab   |  | RowSlab   |           | RowSlab   |  row number -> address  (row_slab.h)
//   +-----------+  +-----------+           +-----------+
//        |              |                       |
//        +--------------+-- RunPool, RowArena --+         huge pages
//
//   row: | values of all segments | state of segment 0 | state of segment 1 | ... |
//
// How a batch runs: every id goes through the same stages, some ids apart, so that no cache miss is
// waited for.
//   Fetch    prefetch the index line
//   Probe    look into the home line, prefetch the row
//   Resolve  overflowed lines, filter, insert
//   Finish   copy or optimise
//
// Concurrency
//   - Any mix of calls is safe, Clear, SwapContent and eviction included. A lookup never sees a
//     torn row; updates of one id are serialised. A call is not a snapshot: parts of a batch are
//     locked one after another.
//   - Shard locks are taken in ascending order; whole-table calls take all, ascending.
//   - Lookups take ids in batch order, a tile at a time (read_pipeline.h). While no write is under
//     way (room_lock.h) they need no shard lock. A write that begins waits for the tiles in
//     progress, half a millisecond. While writes are under way lookups hold the shared locks of the
//     shards of some thousand ids.
//   - Shard locks are fair (fair_shared_mutex.h): neither lookups nor writes starve.
//   - A write that finds no other at the table locks all shards it needs and takes some thousand
//     ids as they come (write_stages.h). Otherwise it sorts its ids by groups of shards and locks
//     one group at a time, so that several writers do not wait for each other.
//   - Filters are asked before any lock is taken, and growth moves a piece of a shard's index at a
//     time (flat_index.h): no call waits for more than a batch of writes.
//   - With a runner, lookups split the batch by tile and writes split it by group of shards, so no
//     two threads touch one row, and results do not depend on the number of threads.
//   - Duplicates of an id in one batch are applied in batch order, one after another.
//
// Cost per id on a table far larger than the caches: 1 index line, the row's value lines (lookup)
// or value and state lines (update), all prefetched; no allocation, lock, virtual call or atomic
// per id.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EMBEDDING_TABLE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EMBEDDING_TABLE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/allocator/run_pool.h"
#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/concurrency/fair_shared_mutex.h"
#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/concurrency/room_lock.h"
#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/expiry.h"
#include "monolith/native_training/runtime/hash_table/index/flat_index.h"
#include "monolith/native_training/runtime/hash_table/records/entry_codec.h"
#include "monolith/native_training/runtime/hash_table/rows/row_hash.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"
#include "monolith/native_training/runtime/hash_table/rows/row_slab.h"
#include "monolith/native_training/runtime/hash_table/table_config.h"

namespace monolith {
namespace engine {

class EmbeddingTable;

// Part of a write: n ids, and n rows of dim floats (values or gradients), row i for ids[i].
struct WriteSpan {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* values = nullptr;
  // Floats from one row to the next, for updates with `dedup` alone; 0: dim.
  int64_t stride = 0;
};

// Chooses the fate of a row of values or (summed) gradients with a NaN or an infinity.
enum class NonFinite : uint8_t {
  kWrite,  // written as it is
  kSkip,   // left out, as if its id were not in the batch; a warning names the table and ids
  kStop,   // left out, and the call fails with InvalidArgument, which names them
};

struct WriteOptions {
  int64_t req_time = 0;                // becomes the rows' timestamp, clamped to [0, 2^32 - 1]
  OccurrenceFilter* filter = nullptr;  // asked for absent ids; null: nothing is filtered
  ParallelRunner* runner = nullptr;    // null: this thread
  NonFinite non_finite = NonFinite::kWrite;
};

struct OptimizeOptions {
  WriteOptions write;
  const float* learning_rates = nullptr;  // one per segment
  int64_t num_learning_rates = 0;
  int64_t global_step = 0;
  // Sum the gradients of equal ids (over all spans, in order) and take one step per distinct id.
  // The filter is then asked once with the number of occurrences.
  bool dedup = false;
  // With `dedup`: for the filter an id has come once, however often it comes, as it has where ids
  // were made distinct on their way here.
  bool count_once = false;
};

struct LookupRequest {
  const EmbeddingTable* table = nullptr;
  const int64_t* ids = nullptr;
  int64_t n = 0;
  float* out = nullptr;        // n rows of table->dim() floats
  uint8_t* found = nullptr;    // n flags, 1 for ids that are present; null: not wanted
  uint64_t* hashes = nullptr;  // n of RowHash, of rows of `out`; null: not wanted, or `found` is
  int64_t stride = 0;          // floats from one row of `out` to the next; 0: dim

  // The `size` ids from number `begin` on.
  LookupRequest Part(int64_t begin, int64_t size) const;
};

struct OptimizeRequest {
  EmbeddingTable* table = nullptr;
  const WriteSpan* spans = nullptr;  // applied in order
  int64_t num_spans = 0;
  OptimizeOptions options;  // options.write.runner is ignored, OptimizeMany has its own
};

struct LoadStats {
  int64_t loaded = 0;
  int64_t skipped_zero = 0;  // skip_zero_embedding
  int64_t state_reset = 0;   // segments whose dump was missing or of another optimizer or length

  void Add(const LoadStats& other) {
    loaded += other.loaded;
    skipped_zero += other.skipped_zero;
    state_reset += other.state_reset;
  }
};

// Counts the rows, the memory and the work of a table.
struct TableStats {
  int64_t size = 0;  // rows
  // Bytes that the table really takes: pages under rows, free ones that were not given back
  // included, the index, and what is known of blocks of rows.
  int64_t memory = 0;
  int64_t memory_if_not_compressed = 0;  // the index, and 4 bytes for every value of every row
  int64_t row_memory = 0;                // of `memory`, for rows
  int64_t index_memory = 0;              // of `memory`, for the index
  int64_t free_rows = 0;                 // rows that there is memory or room for, but no id
  double load_factor = 0.0;              // of the index
  int64_t rows_reused = 0;
  int64_t expired = 0;
  int64_t filtered = 0;
  int64_t nonfinite_gradients = 0;  // rows of any write but loading, written or not
  int64_t restore_skipped = 0;
  int64_t restore_state_reset = 0;
};

// Where a shard's save stands; {} is the start.
struct ShardCursor {
  uint64_t next_hash = 0;
  int64_t expired = 0;  // rows that were left out so far
  bool done = false;
};

// A row as it was when a visitor was called. `values` is what a lookup returns.
struct RowView {
  int64_t id = 0;
  uint32_t last_update = 0;  // seconds
  const float* values = nullptr;
};

class EmbeddingTable {
 public:
  static Status Create(const TableConfig& config, std::unique_ptr<EmbeddingTable>* table);
  ~EmbeddingTable();
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  int64_t dim() const { return layout_.dim; }
  int64_t num_segments() const { return layout_.num_segments(); }
  const RowLayout& layout() const { return layout_; }
  const TableConfig& config() const { return config_; }
  const ExpiryPolicy& expiry() const { return expiry_; }

  // -- Reading. Thread-safe with everything; duplicates allowed.

  // out row i = the vector of ids[i] through the retrievers, zeros where absent. Nothing is
  // inserted.
  void Lookup(const int64_t* ids, int64_t n, float* out, ParallelRunner* runner = nullptr) const;

  // The same, and found[i] = 1 where ids[i] is present, else 0.
  void Lookup(const int64_t* ids, int64_t n, float* out, uint8_t* found,
              ParallelRunner* runner = nullptr) const;
  // The same, and hashes[i] = RowHash(ids[i], row i): what is absent has the hash 0, like zeros.
  void LookupHashed(const int64_t* ids, int64_t n, float* out, uint64_t* hashes) const;

  // Many lookups, of many tables, as one set of tasks.
  static void LookupMany(const LookupRequest* requests, int64_t num_requests,
                         ParallelRunner* runner);

  // entries[i] = serialized EntryDump of ids[i] without `id`, empty where absent.
  Status LookupEntries(const int64_t* ids, int64_t n, std::vector<std::string>* entries) const;

  // found[i] = 1 where ids[i] is present.
  void Contains(const int64_t* ids, int64_t n, uint8_t* found) const;

  int64_t Size() const;

  // Calls visit(row) for every row, in no order, until it returns false. Every row that is there
  // from begin to end is visited once. No lock is held during the call: the visitor may use the
  // table. Some thousand rows are copied at a time.
  void VisitRows(const std::function<bool(const RowView& row)>& visit) const;

  // Largest req_time of any write and any restored timestamp, clamped as those of rows are; 0 for a
  // fresh table.
  int64_t MaxUpdateTs() const { return max_update_ts_.load(std::memory_order_relaxed); }

  // -- Writing. Thread-safe with everything; arguments are checked before anything changes.

  // Overwrites vectors; a new row is initialised first, existing optimizer state stays.
  Status Assign(const WriteSpan& span, const WriteOptions& options);

  // Assigns, and changes `digest` as that changes the table's: by the hashes of what lookups of the
  // ids returned before, and of what they return now. Exact also where memory is missing.
  Status AssignDigested(const WriteSpan& span, const WriteOptions& options, TableDigest* digest);

  // Adds to vectors.
  Status AssignAdd(const WriteSpan& span, const WriteOptions& options);

  // One optimizer step per id; span.values are gradients.
  // OptimizeOptions::dedup says what happens to ids that come twice.
  Status Optimize(const WriteSpan& span, const OptimizeOptions& options);

  // Many updates, of many tables, as one set of (table, shard) tasks. Several requests for one
  // table are applied in order only if they are spans of one request. All arguments are checked
  // before anything changes.
  static Status OptimizeMany(const OptimizeRequest* requests, int64_t num_requests,
                             ParallelRunner* runner);

  // Values and state as new; no filter. existed[i] = 1 if ids[i] was present, else 0. The timestamp
  // is MaxUpdateTs(), the time of the data, or `now` if no data had a time: replaying old logs must
  // not make the rows beside these look old.
  Status Reinitialize(const int64_t* ids, int64_t n, int64_t now, int32_t* existed);

  // Removes ids; absent ones are ignored.
  void Erase(const int64_t* ids, int64_t n);

  // Removes rows that `policy` calls expired against MaxUpdateTs(); returns how many. One shard at
  // a time. Gives memory back to the system, and needs none.
  int64_t Evict(const ExpiryPolicy& policy);

  // Index room for `rows` rows in all: address space, which takes memory as rows come.
  // InvalidArgument: there are fewer row numbers than that, or this machine could never hold them.
  Status Reserve(int64_t rows);

  void Clear();

  // -- Saving (TRAINING tables).

  static constexpr int NumShards() { return kNumShards; }

  // Appends TFRecord-framed EntryDumps of part of internal shard `shard` to `out`, about
  // `target_bytes` at a time, and moves `cursor`; cursor->done ends the shard. Rows that `policy`
  // (may be null) calls expired are left out. Holds the shard's shared lock during the call only:
  // lookups go on, writers of this shard wait a millisecond. Pages are ranges of hashes, so every
  // row that is there from begin to end is written exactly once, also when the shard grows in
  // between. `framed` false: no framing; `sizes` (may be null) then receives record sizes.
  Status SaveShard(int shard, const ExpiryPolicy* policy, int64_t target_bytes, bool framed,
                   ShardCursor* cursor, std::string* out, std::vector<int64_t>* sizes,
                   int64_t* num_records) const;

  // Pages of entries for the save_as_tensor op: partition `part` of `num_parts` (internal shards
  // part, part + num_parts, ...), at most `limit` entries from `offset` (0 starts), each a
  // serialized EntryDump. Fewer than `limit` entries: the partition is finished.
  Status SavePage(int64_t part, int64_t num_parts, int64_t limit, int64_t offset,
                  int64_t* new_offset, std::vector<std::string>* entries) const;

  // -- Loading: fill an empty twin, then swap.

  // An empty table of the same configuration and seed.
  std::unique_ptr<EmbeddingTable> NewEmptyTwin() const;

  // Inserts parsed records (later duplicates win). Several threads may load into one table. On an
  // error the table holds some of the records: throw it away.
  Status LoadRecords(const RecordView* records, int64_t n, LoadStats* stats);

  // Exchanges the content with `other`, a twin that no other thread uses. Excludes all other calls
  // on this table. MaxUpdateTs() becomes the larger of both.
  void SwapContent(EmbeddingTable* other);

  // -- Observing.

  // Names the table in messages. Call it before the table is shared.
  void SetName(std::string name) { name_ = std::move(name); }
  const std::string& name() const { return name_; }

  // Called after rows were changed by Optimize or Reinitialize (not by assigns) with their ids,
  // from the threads that run the batch, without locks held. Set it before the table is shared.
  using TouchedCallback = std::function<void(const int64_t* ids, int64_t n)>;
  void SetTouchedCallback(TouchedCallback callback) { touched_ = std::move(callback); }

  // Called after rows were removed by Erase or Evict with their ids, shard by shard where there are
  // many. It must not use the table. Set it before the table is shared.
  void SetErasedCallback(TouchedCallback callback) { erased_ = std::move(callback); }

  // Called after any rows may have changed or gone at once: by Clear, by SwapContent, or by an
  // eviction that had no memory to remember ids. It must not use the table. Set it before the table
  // is shared.
  void SetReplacedCallback(std::function<void()> callback) { replaced_ = std::move(callback); }

  TableStats Stats() const;

  // Stats() as JSON: accessor, size, memory, memory_if_not_compressed, load_factor, rows_reused,
  // expired, filtered, nonfinite_gradients, restore_skipped, restore_state_reset.
  std::string DebugString() const;

 private:
  friend struct TableInternals;  // the batch code in table_lookup.cc, table_update.cc,
                                 // table_save.cc

  struct alignas(128) Shard {
    Shard(int number, RunPool* pool, RowArena* arena, FlatIndex::Directory* directory)
        : index(number, pool, directory), rows(arena) {}
    mutable FairSharedMutex mutex;
    FlatIndex index;
    RowSlab rows;
    std::atomic<int64_t> size{0};  // index.live(), readable without the lock
  };

  struct Counters {
    std::atomic<int64_t> expired{0};
    std::atomic<int64_t> filtered{0};
    std::atomic<int64_t> nonfinite{0};
    std::atomic<int64_t> refused_calls{0};  // that left such rows out
    std::atomic<int64_t> restore_skipped{0};
    std::atomic<int64_t> restore_state_reset{0};
  };

  EmbeddingTable(const TableConfig& config, RowLayout layout, ExpiryPolicy expiry, uint64_t seed);

  void MakeShards();
  // Lets the index tell more pieces apart, as some shard wants, and 2^min_depth of each shard at
  // least. False: out of memory, or, unless it shall wait, another thread is at a shard; pieces
  // become larger instead.
  bool DeepenIndex(int min_depth, bool wait);
  // Calls the callback of erased rows; that of replaced ones if there is no memory for it.
  void ReportErased(const std::vector<int64_t>& ids);
  // Clamps the time; warns, once per table, if that changes it.
  void RaiseMaxUpdateTs(int64_t requested);

  const TableConfig config_;
  const RowLayout layout_;
  const ExpiryPolicy expiry_;
  const EntryCodec codec_;
  const uint64_t seed_;
  // Memory outlives the shards that draw from it.
  std::unique_ptr<RunPool> index_pool_;
  std::unique_ptr<RowArena> arena_;
  std::unique_ptr<FlatIndex::Directory> directory_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<int64_t> max_update_ts_{0};
  std::atomic<bool> warned_of_time_{false};
  std::atomic<int64_t> last_global_step_{0};
  mutable RoomLock room_;  // every change of an index or a row happens in its write room
  Counters counters_;
  std::string name_;
  TouchedCallback touched_;
  TouchedCallback erased_;
  std::function<void()> replaced_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EMBEDDING_TABLE_H_
