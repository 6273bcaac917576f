// The pipeline of every write: one probe answers "exists? filter? insert? update".
//
//   ids, in the order of the batch   . . . . . . . . . . . . . . . . . . . . . .
//                                      ^      ^      ^            ^
//                                  Finish  Resolve  Probe       Fetch
//
//   Fetch    prefetch the home line of the index, and values that are not read front to back
//   Probe    look into it, prefetch the row
//   Resolve  ids that are not in their home line: overflowed, or absent: insert
//   Finish   assign or optimise: a few ids at a time, or the one row at once where that is inlined
//
// They advance together, one id at a time, so that memory is busy while optimizers compute: windows
// of 32 ids sorted by shard, each stage a burst of prefetches, took twice as long.
//
// A filter is asked beforehand, with all ids that are absent, while no lock is held (Admit).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_STAGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_STAGES_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "monolith/native_training/runtime/hash_table/batch/batch_tiles.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/rows/row_hash.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {

enum class WriteMode : uint8_t { kAssign, kAssignAdd, kOptimize, kReinitialize, kLoad };

// A segment of the row as this batch runs it: neighbours of one rule and one rate are fused.
struct RunSegment {
  const Segment* segment;
  float learning_rate;
  float hash_net_scale;
};

// The ids whose values were not finite. Thread-safe.
class BadIds {
 public:
  static constexpr size_t kNamed = 8;

  void Add(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    if (named_.size() < kNamed) named_.push_back(id);
  }
  // When no thread adds any more. The first few, and how many there were.
  const std::vector<int64_t>& named() const { return named_; }
  int64_t count() const { return count_; }

 private:
  std::mutex mutex_;
  int64_t count_ = 0;
  std::vector<int64_t> named_;
};

// One write batch of one table. Shared by the threads that run it, constant but for the atomics.
struct WriteJob {
  EmbeddingTable* table = nullptr;
  WriteMode mode = WriteMode::kAssign;
  uint32_t ts = 0;
  OccurrenceFilter* filter = nullptr;
  NonFinite non_finite = NonFinite::kWrite;
  BadIds bad_ids;
  int64_t global_step = 0;
  std::vector<RunSegment> segments;  // kOptimize
  std::vector<Segment> fused;        // owns what `segments` points to where neighbours were fused
  std::atomic<bool> out_of_memory{false};
  bool keep_digest = false;  // kAssign: sum up what the digest of the table changes by
  std::atomic<uint64_t> digest_sum{0};
  std::atomic<int64_t> digest_rows{0};
};

// The ids of one tile of a job, by position.
struct WriteTile {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* values = nullptr;      // dim floats per position
  int64_t stride = 0;                 // from one of these to the next, where they are summed first
  const uint32_t* counts = nullptr;   // occurrences per position; null: 1
  int32_t* existed = nullptr;         // kReinitialize
  const char* load_rows = nullptr;    // kLoad: stride bytes per position
  const uint32_t* load_ts = nullptr;  // kLoad
};

// Applies ids of one tile. Used by one thread.
class WriteStages {
 public:
  WriteStages(WriteJob* job, const WriteTile& tile);
  // Reports touched ids and the change of the digest; no lock is held any more.
  ~WriteStages();

  // Applies the ids at n positions of the tile, all in the shards [shard_begin, shard_end), in
  // order. Waits for others.
  void Run(const uint32_t* positions, int64_t n, int shard_begin, int shard_end);
  // The same for all ids of the tile.
  void RunAll(int shard_begin, int shard_end);

 private:
  using Shard = TableInternals::Shard;

  // Ids that Finish takes together.
  static constexpr int kBlock = 4;
  // Distances in ids to Fetch. Finish may only see what Resolve has seen.
  static constexpr int64_t kProbeLag = 12;
  static constexpr int64_t kResolveLag = 16;
  static constexpr int64_t kFinishLag = 24;
  static constexpr int64_t kRing = 32;
  static_assert(kFinishLag >= kResolveLag && kFinishLag % kBlock == 0);
  static_assert(kRing >= kFinishLag + kBlock && kRing % kBlock == 0);

  class BlockFinisher;
  template <int kDim>
  class AdagradFinisher;
  template <int kDim, bool kDigest>
  class CopyFinisher;

  // An id that is ready to be finished.
  struct Item {
    int64_t key;
    int64_t position;
    char* row;   // null: nothing to do
    bool fresh;  // the row is new and not initialised
  };

  // Ids that are locked at once.
  int64_t LockedIds() const;
  // Bits of the shards [begin, end) that hold some of the ids. Where there are many ids that is
  // taken to be all, but not for a checkpoint or rows of a log, whose ids come shard by shard:
  // threads that load files at the same time would wait for each other, and lookups for rows that
  // they do not ask for.
  template <typename Ids>
  uint64_t ShardsOf(const Ids& ids, int64_t n, int begin, int end) const;
  template <typename Ids>
  void RunInSteps(Ids ids, int64_t n, int shard_begin, int shard_end);
  template <typename Ids>
  void RunStep(const Ids& ids, int64_t n, int shard_begin, int shard_end);
  // The same where some values are not finite. Out of line: it hardly ever runs.
  template <typename Ids>
  void RunStepWithBadIds(const Ids& ids, int64_t n, int shard_begin, int shard_end);
  template <typename Ids>
  bool AreFinite(const Ids& ids, int64_t n) const;
  // Asks the filter which of n ids may get rows, as if each were offered when its turn comes, and
  // remembers for Resolve which may not. Ids that are there, and those that get in, are offered no
  // more. What others insert meanwhile is there, and is not dropped.
  template <typename Ids>
  void Admit(const Ids& ids, int64_t n, uint64_t shards);
  const float* Values(int64_t position) const { return tile_.values + position * layout_.dim; }
  uint32_t Timestamp(int64_t position) const {
    return tile_.load_ts == nullptr ? job_->ts : tile_.load_ts[position];
  }
  template <typename Ids>
  void RunLocked(const Ids& ids, int64_t n);
  template <typename Ids, typename Finisher>
  void RunPipeline(const Ids& ids, int64_t n, Finisher finish);
  char* Resolve(int64_t key, uint64_t hash, FlatIndex::Line* home, FlatIndex::Line* end,
                int64_t position, bool dropped, uint8_t* fresh);
  // Erases the row of id i if its values are zeros. Ids from `finished` on that have the same row
  // are finished first, while they have it.
  template <typename Ids>
  bool EraseIfZero(Ids ids, int64_t i, int64_t finished, const int64_t* keys, char** rows,
                   uint8_t* fresh);
  // The hash of what a lookup of a row returns.
  uint64_t HashOf(int64_t id, const char* row) const;
  void OutOfMemory() { job_->out_of_memory.store(true, std::memory_order_relaxed); }
  void Finish(const Item* items, int count);
  void InitializeRow(int64_t id, char* row);
  void FinishAssign(const Item& item);
  void FinishAssignAdd(const Item& item);
  void FinishOptimize(const Item* items, int count);
  void HashNetStep(const RunSegment& run, char* const* rows, const float* const* grads, int count);

  WriteJob* const job_;
  const WriteTile tile_;
  const RowLayout& layout_;
  const std::vector<std::unique_ptr<Shard>>& shards_;
  const int64_t value_bytes_;  // of one position in the tile
  const char* const values_begin_;
  const bool checks_values_;
  const bool skip_zero_;
  const bool report_touched_;
  const bool plain_adagrad_;          // AdagradFinisher can run it
  const bool plain_copy_;             // CopyFinisher can
  const uint8_t* dropped_ = nullptr;  // by number of the id in the step; null: no filter
  bool index_changed_ = false;        // lines have moved in the last Resolve
  TableDigest digest_;                // what it changes by
  int64_t filtered_ = 0;
  int64_t nonfinite_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_STAGES_H_
