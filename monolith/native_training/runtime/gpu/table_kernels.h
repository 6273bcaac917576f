// The kernels of GPU tables that more than one source launches.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KERNELS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/gpu_table.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"

namespace monolith {
namespace gpu {

// Sets prefix[w] to the bits of words[0 .. w) for w < num_words, and *total to those of all.
int ScanBits(Stream stream, const uint32_t* words, int64_t num_words, uint32_t* prefix,
             uint32_t* total);

// Ids of one table to look up.
struct LookupTask {
  IndexView index;
  const char* rows;
  int64_t stride;
  const int64_t* ids;
  int64_t n;
  float* out;  // row i, at i * out_stride, = the row of ids[i]
  int64_t out_stride;
  uint8_t* found;  // or null
  int32_t dim;
  int32_t pack;  // floats that a lane takes at once; 0: through the retrievers of a plan
};

int LaunchLookup(Stream stream, const LookupTask& task, const RowPlan& plan);
// One launch for all of them; plans[i] is that of tasks[i].
int LaunchLookups(Stream stream, const std::vector<LookupTask>& tasks,
                  const std::vector<RowPlan>& plans);

// Everything that the kernels of a write read.
struct WriteArguments {
  IndexView index;
  char* rows;
  int64_t stride;
  Batch batch;
  FloatRows source;       // of 32 bits, unless SumsGradients
  int64_t source_floats;  // of one row of it
  uint32_t ts;
  const uint32_t* load_ts;  // of every position, or null
  int32_t* existed;         // of every position, or null
  uint32_t* absent;
  uint32_t* prefix;
  const uint32_t* free_stack;
  uint32_t* times;  // of the rows that were found, as they were before
  bool refuses;     // what is not finite
};

// Batches of fewer ids walk far (Walk::kFar): there waiting counts more than bytes and registers.
// Measured; benchmarks try others.
struct TableTuning {
  int64_t lookup_far_below = (1 << 18) + 1;
  int64_t update_far_below = 1 << 17;
};
TableTuning& Tuning();

// A write to one table.
struct WriteTask {
  WriteArguments arguments;
  RowPlan plan;
  PublishedState* host;  // page-locked: where the state goes
  uint64_t sequence;     // what tells the host that it is there
};

// Whether the kernels of this write add up a few gradients of equal ids themselves, and read those
// of 16 bits as they are.
bool SumsGradients(const RowPlan& plan, int64_t stride, const FloatRows& source);

// Find the ids and step the rows that are there.
int LaunchUpdates(Stream stream, const std::vector<WriteTask>& tasks, WriteUploads* uploads);
// Make rows for the absent ids, step them, and tell the host. The tasks are those of the update, or
// `uploads` is empty.
int LaunchInserts(Stream stream, const std::vector<WriteTask>& tasks, WriteUploads* uploads);

// Adds the ids of the batch that are absent to counts, one for each shard.
int LaunchCountAbsent(Stream stream, const IndexView& index, const Batch& batch, uint64_t* counts);

// Lets go of a slot: empty if its line has an empty one, else erased. Returns whether this call did
// it.
MONO_DEVICE bool EraseSlot(const IndexView& index, TableSlot* slot, uint32_t* free_stack) {
  const TableSlot seen = LoadSlot(slot);
  if (!IsLive(seen.row)) return false;
  const bool spilled = slot >= index.spill && slot < index.spill + index.spill_capacity;
  bool has_empty = false;
  if (!spilled) {
    const auto line = reinterpret_cast<TableSlot*>(reinterpret_cast<uintptr_t>(slot) &
                                                   ~uintptr_t{kSlotsPerLine * sizeof(*slot) - 1});
    for (int i = 0; i < kSlotsPerLine; ++i) has_empty |= line[i].row == 0;
  }
  const uint32_t left = has_empty ? 0 : kErasedRow;
#if defined(__CUDACC__)
  const unsigned long long before = static_cast<unsigned long long>(seen.ts) << 32 | seen.row;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&slot->row), before,
                static_cast<unsigned long long>(left)) != before) {
    return false;
  }
#else
  slot->row = left;
  slot->ts = 0;
#endif
  free_stack[AtomicAdd(&index.state->free_rows, uint64_t{1})] = seen.row;
  const int shard = ShardOfHash(index.hash(seen.key));
  AtomicAdd(&index.state->live[shard], int64_t{-1});
  if (!spilled && !has_empty) AtomicAdd(&index.state->erased[shard], int64_t{1});
  return true;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KERNELS_H_
