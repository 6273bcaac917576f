// Finds the equal ids of batches: positions claim places, lanes of a block are summed up, and the
// result says which positions belong together. A small batch is the work of one block.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DUPLICATES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DUPLICATES_H_

#include <cstdint>

#include "monolith/native_training/runtime/gpu/table_sums.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"

namespace monolith {
namespace gpu {

constexpr uint32_t kNoPosition = 0xffffffffu;

MONO_DEVICE uint32_t CompareAndSwap(uint32_t* word, uint32_t before, uint32_t after) {
#if defined(__CUDACC__)
  return atomicCAS(word, before, after);
#else
  const uint32_t seen = *word;
  if (seen == before) *word = after;
  return seen;
#endif
}

MONO_DEVICE void LowerTo(uint32_t* word, uint32_t value) {
#if defined(__CUDACC__)
  atomicMin(word, value);
#else
  if (value < *word) *word = value;
#endif
}

// Replaces each lane's value by what comes before it, *carry first, and *carry by all of them.
template <typename Op>
MONO_DEVICE void ScanLanes(const ThreadBlock& block, uint32_t* values, uint32_t* of_warps,
                           uint32_t* carry, const Op& op) {
#if defined(__CUDACC__)
  (void)block;
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  uint32_t inclusive = values[threadIdx.x];
  for (int width = 1; width < kWarpLanes; width *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, width);
    if (lane >= width) inclusive = op(other, inclusive);
  }
  if (lane == kWarpLanes - 1) of_warps[warp] = inclusive;
  uint32_t before = *carry;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before = op(before, of_warps[w]);
  const uint32_t left = __shfl_up_sync(kAllLanes, inclusive, 1);
  values[threadIdx.x] = lane == 0 ? before : op(before, left);
  if (threadIdx.x == kLanes - 1) *carry = op(before, inclusive);
  __syncthreads();
#else
  (void)block, (void)of_warps;
  uint32_t before = *carry;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t own = values[lane];
    values[lane] = before;
    before = op(before, own);
  }
  *carry = before;
#endif
}

inline int64_t MostChunks(int64_t n, uint32_t fused) {
  return fused == kNoPosition ? 0 : n / kSumChunk + n / (int64_t{fused} + 1) + 1;
}

// The result for the batches of several tables, on the device. Those of a table follow those of
// the tables before it.
struct FoundDuplicates {
  int64_t* distinct;
  uint32_t* order;
  uint32_t* starts;  // one more for each table
  uint32_t* sum_rows;
  uint32_t* totals;  // distinct ids of each table
  SumChunk* chunks;
  uint32_t* num_chunks;
  uint32_t* arrived;  // all bits set
};

// Ids of a batch that one block can look through.
constexpr int64_t kBlockIds = 4096;

// One launch for batches of at most kBlockIds ids each. Every table has room for `chunk_room`
// chunks, of which some stay empty (kNoChunk).
int LaunchBlockDuplicates(Stream stream, const JoinedBatches& batches, uint32_t fused,
                          int64_t chunk_room, const FoundDuplicates& found);

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DUPLICATES_H_
