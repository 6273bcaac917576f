// The worker threads of the device that runs a kernel, as the engine borrows threads.
//
// The pool's own ParallelFor lets the calling thread sleep until workers have done its loop; that
// costs two wake-ups, more than a small batch takes. TensorFlow's Shard() cuts a range into a few
// large pieces by estimated cost; when a core is taken by another process all threads wait for the
// piece that was on it. Here the calling thread does its share, and the others take what is left.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_RUNNER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_RUNNER_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tensorflow {
namespace monolith_tf {

class DeviceRunner final : public ::monolith::engine::ParallelRunner {
 public:
  explicit DeviceRunner(OpKernelContext* ctx)
      : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
        num_threads_(std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads)) {}

  int NumThreads() const override { return num_threads_; }

  // Throws what a step has thrown.
  void RunSteps(int64_t max_threads, int64_t cost,
                const ::monolith::engine::SharedWork::Step& step) const override {
    const int64_t threads =
        std::min({max_threads, cost / kMinThreadNanos, static_cast<int64_t>(num_threads_)});
    const int64_t helpers = std::max<int64_t>(0, threads - 1);
    const auto work = std::make_shared<::monolith::engine::SharedWork>(step, helpers);
    const std::function<void()> call_helper = [this, &work] {
      pool_->Schedule([work] { work->Help(); });
    };
    try {
      for (int64_t i = 0; i < helpers; ++i) call_helper();
    } catch (const std::exception&) {
      // Those that are on their way use `step`, so this thread goes on with them.
    }
    work->Finish(call_helper);
  }

 private:
  static constexpr int64_t kMinThreadNanos = 50000;  // to wake a thread for less does not pay

  thread::ThreadPool* pool_;
  int num_threads_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_RUNNER_H_
