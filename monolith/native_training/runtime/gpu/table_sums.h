// Sums of the gradients of equal ids. Which is added to which depends on an id's own gradients
// alone, in the order of the batch: they are added one after the other in chunks of kSumChunk, the
// sums of these again in chunks of this many, and so on. So the bits are the same in every run, on
// every device, whatever else is in the batch.
//
//   gradients     g0 .. g31   g32 .. g63   ...   g992 .. g1023   g1024 ..
//   chunks           s0          s1                  s31           s32         rows of `sums`
//   chunks of them   s0 + s1 + ... + s31                           s32         in the row of the
//   first
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_SUMS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_SUMS_H_

#include <cstdint>

#include "monolith/native_training/runtime/gpu/float_rows.h"
#include "monolith/native_training/runtime/gpu/table_index.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"
#include "monolith/native_training/runtime/gpu/tuning.h"

namespace monolith {
namespace gpu {

// The sums of gradients have these bits because of it.
constexpr uint32_t kSumChunk = 32;
static_assert(kFusedRows <= static_cast<int>(kSumChunk));

constexpr int kMostBatches = 64;  // what fits into the parameters of a kernel

// Batches of several tables, one after the other. Words are 32 positions, tiles more; both are of
// one batch.
struct JoinedBatches {
  int count;
  uint32_t begins[kMostBatches + 1];  // positions of the batches before
  uint32_t words[kMostBatches + 1];
  uint32_t tiles[kMostBatches + 1];
  const int64_t* ids[kMostBatches + 1];
  FloatRows gradients[kMostBatches + 1];

  void Set(int t, int64_t begin, int64_t word, int64_t tile, const int64_t* own_ids,
           const FloatRows& own_gradients) {
    begins[t] = static_cast<uint32_t>(begin);
    words[t] = static_cast<uint32_t>(word);
    tiles[t] = static_cast<uint32_t>(tile);
    ids[t] = own_ids;
    gradients[t] = own_gradients;
  }

  // Positions of a batch, from `first` on.
  struct Part {
    int job;
    uint32_t begin;
    uint32_t end;
    uint32_t first;
    const int64_t* ids;
  };

  MONO_DEVICE Part PartOfWord(int64_t word) const {
    const int job = JobAt(words, count, word);
    return {job, begins[job], begins[job + 1],
            begins[job] + (static_cast<uint32_t>(word) - words[job]) * kWordIds, ids[job]};
  }
  MONO_DEVICE Part PartOfTile(int64_t tile, uint32_t rows) const {
    const int job = JobAt(tiles, count, tile);
    return {job, begins[job], begins[job + 1],
            begins[job] + (static_cast<uint32_t>(tile) - tiles[job]) * rows, ids[job]};
  }
};

// Up to kSumChunk gradients of an id; those of an id have consecutive numbers.
struct alignas(16) SumChunk {
  uint32_t batch;
  uint32_t id;      // number of the distinct id
  uint32_t number;  // of those of the id
  uint32_t reserved;
};

constexpr uint32_t kNoChunk = 0xffffffffu;  // the id of a chunk that is none

struct SumTask {
  JoinedBatches batches;
  const SumChunk* chunks;
  const uint32_t* num_chunks;
  int64_t most_chunks;
  const uint32_t* starts;  // of the ids of all batches, one more for each
  const uint32_t* order;
  int dim;
  uint32_t* arrived;  // of every chunk; all bits set before
  float* sums;        // a row for every chunk; that of an id's first one becomes its sum
};

// All gradients have this type. packed: dim is a multiple of 4, and they are FloatRows::InFours.
int LaunchSums(Stream stream, const SumTask& task, FloatType type, bool packed);

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_SUMS_H_
