// How many accesses a lane has in flight. A card hides the time of one by the others, and more of
// them cost registers, so the best number has to be measured: benchmarks/gpu_kernels.py compiles
// the library with others and compares.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TUNING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TUNING_H_

#include <cstdint>

#ifndef MONO_GPU_SEGMENT_ROWS
#define MONO_GPU_SEGMENT_ROWS 4
#endif
#ifndef MONO_GPU_SEGMENT_EXAMPLES
#define MONO_GPU_SEGMENT_EXAMPLES 4
#endif
#ifndef MONO_GPU_REDUCE_ROWS
#define MONO_GPU_REDUCE_ROWS 4
#endif
#ifndef MONO_GPU_REDUCE_EXAMPLES
#define MONO_GPU_REDUCE_EXAMPLES 4
#endif
#ifndef MONO_GPU_SPREAD_EXAMPLES
#define MONO_GPU_SPREAD_EXAMPLES 4
#endif
#ifndef MONO_GPU_POOL_ITEMS
#define MONO_GPU_POOL_ITEMS 4
#endif
#ifndef MONO_GPU_POOL_BLOCKS
#define MONO_GPU_POOL_BLOCKS 4
#endif
#ifndef MONO_GPU_SCATTER_ROWS
#define MONO_GPU_SCATTER_ROWS 8
#endif
#ifndef MONO_GPU_RUN_STRETCH
#define MONO_GPU_RUN_STRETCH 1024
#endif
#ifndef MONO_GPU_BUCKET_STRETCH
#define MONO_GPU_BUCKET_STRETCH 2048
#endif
#ifndef MONO_GPU_BUCKET_BYTES
#define MONO_GPU_BUCKET_BYTES 4096
#endif
#ifndef MONO_GPU_BUCKET_ROWS
#define MONO_GPU_BUCKET_ROWS 128
#endif
#ifndef MONO_GPU_MAX_PIECES
#define MONO_GPU_MAX_PIECES 8
#endif
#ifndef MONO_GPU_BUCKET_ROUNDS
#define MONO_GPU_BUCKET_ROUNDS 2
#endif
#ifndef MONO_GPU_BUCKET_BLOCKS
#define MONO_GPU_BUCKET_BLOCKS 9
#endif
#ifndef MONO_GPU_FUSED_ROWS
#define MONO_GPU_FUSED_ROWS 4
#endif
#ifndef MONO_GPU_SUM_ROWS
#define MONO_GPU_SUM_ROWS 8
#endif

namespace monolith {
namespace gpu {

constexpr int kSegmentRows = MONO_GPU_SEGMENT_ROWS;          // read at once by a segment sum
constexpr int kSegmentExamples = MONO_GPU_SEGMENT_EXAMPLES;  // of a lane of a segment sum
constexpr int kReduceRows = MONO_GPU_REDUCE_ROWS;            // read at once by reduce-and-split
constexpr int kReduceExamples = MONO_GPU_REDUCE_EXAMPLES;    // of a lane of reduce-and-split
constexpr int kSpreadExamples = MONO_GPU_SPREAD_EXAMPLES;    // of a lane of its gradient
constexpr int kPoolItems = MONO_GPU_POOL_ITEMS;              // places of a lane of the layout
constexpr int kPoolBlocks = MONO_GPU_POOL_BLOCKS;            // of it on a multiprocessor, at least
constexpr int kScatterRows = MONO_GPU_SCATTER_ROWS;          // that a lane of scatter_sum.h adds

// Rows of a stretch (stretches.h); more of one place, or of one bucket, are shared by many warps.
constexpr int64_t kRunStretch = MONO_GPU_RUN_STRETCH;
constexpr int64_t kBucketStretch = MONO_GPU_BUCKET_STRETCH;

constexpr int kMaxBucketBits = 7;                        // of places that a warp adds up
constexpr int64_t kBucketBytes = MONO_GPU_BUCKET_BYTES;  // of shared memory, for a warp
constexpr int64_t kBucketRows = MONO_GPU_BUCKET_ROWS;    // that a bucket should have
constexpr int64_t kMaxPieces = MONO_GPU_MAX_PIECES;      // that a row is cut into, on average
constexpr int kBucketRounds = MONO_GPU_BUCKET_ROUNDS;    // rows of a lane at once
constexpr int kBucketBlocks = MONO_GPU_BUCKET_BLOCKS;    // on a multiprocessor, at least

// Gradients of an id that a step adds up itself, of tables for which it does; at most kSumChunk.
constexpr int kFusedRows = MONO_GPU_FUSED_ROWS;
constexpr int kSumRows = MONO_GPU_SUM_ROWS;  // read at once by the sums before a step

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TUNING_H_
