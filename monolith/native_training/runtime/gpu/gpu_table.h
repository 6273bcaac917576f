// The collisionless embedding table in the memory of a GPU: int64 id -> float vector with optimizer
// state, with the semantics, the configuration and the records of engine::EmbeddingTable.
//
//   ids of a batch, 32 to a warp
//     | hash; the top 6 bits are the shard
//     v
//   index of 64 shards   id -> row number, ts        (table_index.h)
//     |
//     v
//   rows, which never move                           (table_memory.h, table_rows.h)
//
// A write: Update finds all ids and steps the rows that are there; it leaves a bit for every absent
// id. Scan numbers the bits. Insert makes rows for them, in the order of the batch, and steps
// those. The host waits for none of these: it knows how full the shards were after an earlier
// write, and that hashes spread the ids of a batch evenly; only where that does not leave enough
// room it looks first. Shards above 80 % grow, each on its own; what finds no room all the same
// goes to a spill list that every search knows, until the next write makes room.
//
// Pointers to ids, values and results lie on the device. Calls enqueue work on `stream`; calls on
// different streams are ordered by events: lookups after the last write, writes after everything.
// Functions return MONO_GPU_OK or an error code with a text (errors.h); after an error the content
// is as before.
//
// Thread-safe: a mutex guards what the host knows.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_GPU_TABLE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_GPU_TABLE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/gpu/float_rows.h"
#include "monolith/native_training/runtime/gpu/table_index.h"
#include "monolith/native_training/runtime/gpu/table_memory.h"
#include "monolith/native_training/runtime/gpu/table_rows.h"
#include "monolith/native_training/runtime/gpu/table_streams.h"
#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/expiry.h"
#include "monolith/native_training/runtime/hash_table/records/entry_codec.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"
#include "monolith/native_training/runtime/hash_table/table_config.h"

namespace monolith {
namespace gpu {

// How the ids of a write may come.
enum class Duplicates {
  kNone,   // the caller promises that ids are distinct
  kSteps,  // each occurrence counts, in the order of the batch
  kSum,    // gradients are summed in that order; one step for each distinct id
};

// Says how a row of values or gradients that is not finite is treated.
enum class NotFinite {
  kStop,   // left out, and a later call fails (Check)
  kSkip,   // left out, with a warning
  kWrite,  // written as it is
};

// Lets absent ids in by chance, as engine::ProbabilisticFilter does, without asking the host. The
// same seed, number of the batch, id and occurrence give the same draw.
struct ChanceFilter {
  uint64_t seed;
  uint64_t batch;
  const uint32_t* thresholds;  // on the device, of every slot of ids; null: all have the default
  uint32_t default_threshold;
  bool equal_probability;
};

struct GpuWriteOptions {
  int64_t req_time = 0;
  Duplicates duplicates = Duplicates::kSteps;
  NotFinite not_finite = NotFinite::kStop;
  engine::OccurrenceFilter* filter = nullptr;  // asked, on the host, for absent ids
  const ChanceFilter* chance = nullptr;        // instead of `filter`
};

struct GpuOptimizeOptions {
  GpuWriteOptions write;
  const float* learning_rates = nullptr;  // host, one per segment
  int64_t num_learning_rates = 0;
  int64_t global_step = 0;
};

struct GpuTableStats {
  int64_t size = 0;
  int64_t row_bytes = 0;    // memory under rows
  int64_t index_bytes = 0;  // of all shards
  int64_t other_bytes = 0;  // of batches under way, free rows, spill
  int64_t slots = 0;
  int64_t free_rows = 0;
  int64_t spilled = 0;
  int64_t nonfinite_gradients = 0;
  int64_t filtered = 0;
  int64_t expired = 0;
  int64_t max_update_ts = 0;
  int64_t rebuilds = 0;  // of shards, so far
  int64_t waits = 0;     // for the device, by writes, so far
};

// Rows that were copied to the host.
struct ExportedRows {
  std::vector<int64_t> ids;
  std::vector<uint32_t> ts;
  std::vector<char> rows;         // layout().row_bytes each
  std::vector<uint32_t> numbers;  // of rows, 0 where there is none; ExportIds only
  int64_t live = 0;               // of the whole shard, expired ones too; ExportShard only
};

// A batch as kernels see it.
struct Batch {
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const uint32_t* count = nullptr;   // on the device: how many of the n there are; null: all
  const uint32_t* starts = nullptr;  // occurrences of id i: order[starts[i]] ... ; null: i
  const uint32_t* order = nullptr;
  bool sum = false;  // the occurrences make one step, not one each
  // If they do: the row of sums[] that id i has, if it comes more than `fused` times; else that of
  // the source, if it comes once; else what starts[i] is.
  const uint32_t* sum_rows = nullptr;
  const float* sums = nullptr;
  uint32_t fused = 1;
  const uint32_t* skips = nullptr;  // occurrences of id i that a filter drops; null: none
};

class GpuTable;
struct LookupTask;
struct WriteTask;

// Ids of a table to look up, on the device; `found` may be null.
struct GpuLookupJob {
  GpuTable* table;
  const int64_t* ids;
  int64_t n;
  float* out;
  uint8_t* found;
  int64_t out_stride;  // in floats, from one vector to the next; 0: they have no gaps
};

// Gradients of ids of a table, on the device.
struct GpuOptimizeJob {
  GpuTable* table;
  const int64_t* ids;
  int64_t n;
  FloatRows gradients;
  const GpuOptimizeOptions* options;
};

class GpuTable {
 public:
  // Takes the current device.
  static int Create(const engine::TableConfig& config, const std::string& name,
                    std::unique_ptr<GpuTable>* table);
  ~GpuTable();
  GpuTable(const GpuTable&) = delete;
  GpuTable& operator=(const GpuTable&) = delete;

  int64_t dim() const { return layout_.dim; }
  const engine::RowLayout& layout() const { return layout_; }
  int64_t stride() const { return stride_; }

  // out row i = the vector of ids[i] through the retrievers, zeros where absent. `found` may be
  // null.
  int Lookup(Stream stream, const int64_t* ids, int64_t n, float* out, uint8_t* found);
  // The same for several tables, or parts of one, in one launch.
  static int LookupMany(Stream stream, const GpuLookupJob* jobs, int64_t num_jobs);

  int Assign(Stream stream, const int64_t* ids, int64_t n, const float* values,
             const GpuWriteOptions& options);
  int AssignAdd(Stream stream, const int64_t* ids, int64_t n, const float* values,
                const GpuWriteOptions& options);
  int Optimize(Stream stream, const int64_t* ids, int64_t n, const float* gradients,
               const GpuOptimizeOptions& options);
  // The same for several tables. The jobs of one table have the same options and are one batch, in
  // the order of the jobs. On an error no table has changed.
  static int OptimizeMany(Stream stream, const GpuOptimizeJob* jobs, int64_t num_jobs);
  // existed: n int32 on the device, or null.
  int Reinitialize(Stream stream, const int64_t* ids, int64_t n, int64_t now, int32_t* existed);
  int Erase(Stream stream, const int64_t* ids, int64_t n);

  // These wait for the device.
  int Evict(Stream stream, const engine::ExpiryPolicy& policy, int64_t* erased);
  int Reserve(Stream stream, int64_t rows);
  int Clear(Stream stream);
  int Size(int64_t* size);
  int Stats(GpuTableStats* stats);
  // MONO_GPU_REFUSED, once, where a write that was to stop has left out what is not finite.
  int Check();
  const engine::ExpiryPolicy& expiry() const { return expiry_; }

  // Copies the rows of a shard that `policy` (may be null) does not call expired.
  int ExportShard(Stream stream, int shard, const engine::ExpiryPolicy* policy,
                  ExportedRows* result);
  // The same for the rows of ids on the device; nothing where there is no row.
  int ExportIds(Stream stream, const int64_t* ids, int64_t n, ExportedRows* result);
  // Appends the records of those rows, without frames, and their sizes, 0 where there is no row.
  int SaveIds(Stream stream, const int64_t* ids, int64_t n, std::string* records,
              std::vector<int64_t>* sizes);
  // Appends the framed records of the rows of a shard.
  // *live, if not null: how many rows the shard has.
  int SaveShard(Stream stream, int shard, const engine::ExpiryPolicy* policy, std::string* records,
                int64_t* num_records, int64_t* live = nullptr);
  // Stores what records hold; later duplicates win. On an error some of them are stored.
  int LoadRecords(Stream stream, const engine::RecordView* records, int64_t n,
                  int64_t* state_reset);
  // Stores rows of layout().row_bytes bytes as they are, all on the host; later duplicates win.
  int ImportRows(Stream stream, const int64_t* ids, const uint32_t* ts, const char* rows,
                 int64_t n);

 private:
  // Writes of which the host need not know how they ended before it issues another.
  static constexpr int64_t kPublishedRing = 64;
  struct Shard {
    DeviceBuffer slots;
    uint32_t lines = 0;
    int64_t num_slots() const { return int64_t{lines} * kSlotsPerLine; }
  };
  // A write of which the host does not know yet how it ended.
  struct InFlight {
    int64_t n;
    uint64_t sequence;
    NotFinite not_finite;
  };
  struct Job;  // what a write does

  GpuTable(const engine::TableConfig& config, const std::string& name, engine::RowLayout layout,
           engine::ExpiryPolicy expiry, uint64_t seed);
  int Initialize();

  // Locks of several tables, taken in one order.
  class TableLocks;

  // Runs body() between what orders streams, also if it fails: it may have enqueued work.
  template <typename Body>
  int AsWrite(Stream stream, const Body& body) {
    MONO_GPU_TRY(streams_.BeginWrite(stream));
    const int code = body();
    const int ended = streams_.EndWrite(stream);
    return code != MONO_GPU_OK ? code : ended;
  }

  // -- What the host knows.
  int Poll(int64_t may_stay);
  // Takes in what a write has refused: `state` is the one after it.
  void NoteRefused(const TableState& state, NotFinite not_finite);
  // Fails, once, where writes that were to stop have refused something.
  int TellRefused();
  bool HasArrived(const InFlight& write) const;
  int WaitFor(const InFlight& write) const;
  int ReadState(Stream stream);
  int CheckNothingLost() const;

  // -- Room.
  static int64_t Allowance(int64_t n);
  bool Fits(int64_t n, bool rows_only) const;
  int MakeRoom(Stream stream, const Batch& batch);
  int MakeRoomAhead(Stream stream, int64_t n);
  int GrowCrowdedShards(Stream stream);
  int MoveSpilled(Stream stream);
  using NewLines = std::array<uint32_t, kTableShards>;  // 0: as they are
  int Rebuild(Stream stream, const NewLines& lines);
  int MoveShards(Stream stream, const std::vector<int>& shards, const NewLines& lines);
  int PublishShards(Stream stream, uint64_t rebuilt);
  int EnsureScratch(Stream stream, int64_t n);
  int EnsureFreeStack(Stream stream, int64_t rows);
  int SortFreed(Stream stream, int64_t before);
  uint32_t ScheduledLines(int shard, int64_t keys) const;
  int64_t mapped_rows() const { return arena_.bytes() / stride_; }
  IndexView View() const;

  RowPlan PlanFor(RowMode mode, int64_t global_step) const;
  LookupTask TaskFor(const GpuLookupJob& job) const;

  // -- Writes.
  int BeginCall();
  int CheckOptimize(const GpuOptimizeOptions& options) const;
  Job OptimizeJob(const GpuOptimizeOptions& options) const;
  int AssignOrAdd(RowMode mode, Stream stream, const int64_t* ids, int64_t n, const float* values,
                  const GpuWriteOptions& options);
  static int Write(Stream stream, const std::vector<GpuTable*>& tables, std::vector<Job> jobs);
  static int RunWrites(Stream stream, const std::vector<GpuTable*>& tables, Job* jobs);
  int WriteOne(Stream stream, const Job& job);
  int JoinSpans(Stream stream, Job* job);
  int PrepareBatch(Stream stream, Job* job, Batch* batch);
  int PrepareWrite(Stream stream, const Job& job, const Batch& batch, WriteTask* task);
  int NumberWrite(WriteTask* task);
  static int FindDuplicates(Stream stream, const std::vector<GpuTable*>& tables, const Job* jobs,
                            Batch* batches);
  struct Alike;
  static int FindTogether(Stream stream, const Alike& alike);
  int AskFilter(Stream stream, const Job& job, Batch* batch);
  int DrawAbsent(Stream stream, const ChanceFilter& chance, WriteTask* task);
  int EnsureSkips(Stream stream, int64_t n);

  const engine::TableConfig config_;
  const std::string name_;
  const engine::RowLayout layout_;
  const engine::ExpiryPolicy expiry_;
  const engine::EntryCodec codec_;
  const uint64_t seed_;
  const int64_t stride_;

  std::mutex mutex_;
  StreamOrder streams_;
  DeviceArena arena_;
  Shard shards_[kTableShards];
  DeviceBuffer shard_views_;
  DeviceBuffer state_;
  DeviceBuffer free_stack_;
  DeviceBuffer spill_;
  DeviceBuffer absent_;     // bit map of a batch
  DeviceBuffer prefix_;     // bits before each word
  DeviceBuffer times_;      // of the rows of a batch, before it
  DeviceBuffer sums_;       // gradients of FindDuplicates
  DeviceBuffer skips_;      // of AskFilter
  DeviceBuffer sorting_;    // of FindDuplicates
  DeviceBuffer joined_;     // ids and gradients of JoinSpans
  PinnedBuffer published_;  // a ring
  TableState known_ = {};   // as of the last write that has left the ring
  std::deque<InFlight> in_flight_;
  int64_t in_flight_ids_ = 0;
  uint64_t sequence_ = 0;  // of the last write
  int64_t max_update_ts_ = 0;
  int64_t last_global_step_ = 0;
  int64_t expired_ = 0;
  int64_t refused_ = 0;           // rows, of which no call has told yet
  std::vector<int64_t> bad_ids_;  // some of them
  int64_t warnings_ = 0;          // writes whose refused rows a warning names, or would
  int64_t rebuilds_ = 0;
  int64_t waits_ = 0;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_GPU_TABLE_H_
