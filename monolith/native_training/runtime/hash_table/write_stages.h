// The pipeline stages of every write: one probe answers "exists? filter? insert? update".
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_WRITE_STAGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_WRITE_STAGES_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_table/batch_windows.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
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

// One write batch of one table. Shared by the threads that run it, constant but for
// `out_of_memory`.
struct WriteJob {
  EmbeddingTable* table = nullptr;
  WriteMode mode = WriteMode::kAssign;
  uint32_t ts = 0;
  OccurrenceFilter* filter = nullptr;
  int64_t global_step = 0;
  bool skip_nonfinite = false;
  std::vector<RunSegment> segments;  // kOptimize
  std::vector<Segment> fused;        // owns what `segments` points to where neighbours were fused
  std::atomic<bool> out_of_memory{false};
};

// The ids of one tile of a job, by position.
struct WriteTile {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* values = nullptr;      // dim floats per position
  const uint32_t* counts = nullptr;   // occurrences per position; null: 1
  int32_t* existed = nullptr;         // kReinitialize
  const char* load_rows = nullptr;    // kLoad: stride bytes per position
  const uint32_t* load_ts = nullptr;  // kLoad
};

// The sum of squares is below the smallest normal float.
bool IsZeroVector(const float* values, int64_t dim);

// Stages for RunWindows over one tile. Used by one thread.
class WriteStages {
 public:
  WriteStages(WriteJob* job, const WriteTile& tile);
  // Reports touched ids; no lock is held any more.
  ~WriteStages();

  void Fetch(Window* window);
  void Probe(Window* window);
  void Resolve(Window* window);
  void Finish(Window* window);

 private:
  using Shard = TableInternals::Shard;

  const float* Values(const BatchEntry& entry) const {
    return tile_.values + entry.position * layout_.dim;
  }
  const char* ValueBytes(const BatchEntry& entry) const {
    return values_begin_ + entry.position * value_bytes_;
  }
  void SetRow(const RowArena::View& rows, FlatIndex::Slot* slot, Window* window, int j);
  void FindOrInsert(Shard* shard, Window* window, int j);
  void InsertFiltered(Shard* shard, Window* window, const int* absent, int count);
  void OutOfMemory() { job_->out_of_memory.store(true, std::memory_order_relaxed); }
  bool EraseIfZero(Shard* shard, const BatchEntry& entry);
  void InitializeRow(int64_t id, char* row);
  void FinishAssign(const BatchEntry& entry, bool fresh, char* row);
  void FinishAssignAdd(const BatchEntry& entry, bool fresh, char* row);
  void FinishOptimize(Window* window);
  void HashNetStep(const RunSegment& run, char* const* rows, const float* const* grads, int count);

  WriteJob* const job_;
  const WriteTile tile_;
  const RowLayout& layout_;
  const std::vector<std::unique_ptr<Shard>>& shards_;
  const int64_t value_bytes_;  // of one position in the tile
  const char* const values_begin_;
  const bool skip_zero_;
  const bool report_touched_;
  int64_t filtered_ = 0;
  int64_t nonfinite_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_WRITE_STAGES_H_
