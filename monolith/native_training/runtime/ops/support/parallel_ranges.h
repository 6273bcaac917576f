// Divides an index range among TensorFlow's intra-op threads.
//
// TensorFlow's own Shard() cuts a range into a few large pieces by estimated cost; when a core is
// taken by another process all threads wait for the piece that was on it. Loops that stream through
// memory lose nothing by smaller pieces, and gain balance.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_PARALLEL_RANGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_PARALLEL_RANGES_H_

#include <cstdint>
#include <functional>

#include "monolith/native_training/runtime/ops/support/device_threads.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

// Calls run(begin, end) for disjoint ranges of at most `grain` that together are [0, n). A single
// range runs in the calling thread.
inline void ParallelRanges(OpKernelContext* ctx, int64_t n, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& run) {
  const DeviceThreads threads(ctx);
  threads.Run(n, grain, threads.num_threads(), run);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_PARALLEL_RANGES_H_
