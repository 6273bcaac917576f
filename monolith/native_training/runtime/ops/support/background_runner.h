// Threads for what no step waits for: a lookup ahead of its step, an update behind it.
//
// All threads of a device are in one pool. What takes all of them lets the step that runs at the
// same time wait for threads; on few cores that does not matter, as the sum of the work counts.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_BACKGROUND_RUNNER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_BACKGROUND_RUNNER_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

// A DeviceRunner that leaves half of a large pool to others.
class BackgroundRunner final : public ::monolith::engine::ParallelRunner {
 public:
  explicit BackgroundRunner(OpKernelContext* ctx) : runner_(ctx) {}

  int NumThreads() const override {
    const int all = runner_.NumThreads();
    return all < kLargePool ? all : all / 2;
  }

  // Throws what a step has thrown.
  void RunSteps(int64_t max_threads, int64_t cost,
                const ::monolith::engine::SharedWork::Step& step) const override {
    runner_.RunSteps(std::min<int64_t>(max_threads, NumThreads()), cost, step);
  }

 private:
  static constexpr int kLargePool = 8;

  const DeviceRunner runner_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_BACKGROUND_RUNNER_H_
