// Divides an index range among TensorFlow's intra-op threads.
//
// TensorFlow's own Shard() cuts a range into a few large pieces by estimated cost; when a core is
// taken by another process all threads wait for the piece that was on it. Loops that stream through
// memory lose nothing by smaller pieces, and gain balance.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_PARALLEL_RANGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_PARALLEL_RANGES_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tensorflow {
namespace monolith_tf {

// Calls run(begin, end) for disjoint ranges of at most `grain` that together are [0, n). A single
// range runs in the calling thread.
inline void ParallelRanges(OpKernelContext* ctx, int64_t n, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& run) {
  if (n <= 0) return;
  const auto& threads = *ctx->device()->tensorflow_cpu_worker_threads();
  if (n <= grain || threads.num_threads < 2) return run(0, n);
  const thread::ThreadPool::SchedulingParams fixed(
      thread::ThreadPool::SchedulingStrategy::kFixedBlockSize, /*cost_per_unit=*/std::nullopt,
      /*block_size=*/grain);
  threads.workers->ParallelFor(n, fixed, run);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_PARALLEL_RANGES_H_
