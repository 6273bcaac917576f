// Loops on the worker threads of the device that runs a kernel.
//
// The pool's own ParallelFor lets the calling thread sleep until workers have done its loop; that
// costs two wake-ups, more than a small batch takes. Here the calling thread does its share.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_THREADS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_THREADS_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "monolith/native_training/runtime/concurrency/shared_work.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tensorflow {
namespace monolith_tf {

class DeviceThreads {
 public:
  using Range = ::monolith::engine::RangeSteps::Range;
  using Step = ::monolith::engine::SharedWork::Step;

  explicit DeviceThreads(OpKernelContext* ctx)
      : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
        num_threads_(std::max(1, ctx->device()->tensorflow_cpu_worker_threads()->num_threads)) {}

  // Threads that a loop may use, the calling one included.
  int num_threads() const { return num_threads_; }

  // Calls fn(begin, end) for disjoint ranges of at most `grain` that cover [0, n), on up to
  // `max_threads` threads of which the calling one is the first; returns when all are done.
  void Run(int64_t n, int64_t grain, int64_t max_threads, const Range& fn) const {
    if (n <= 0) return;
    grain = std::max<int64_t>(1, grain);
    const int64_t pieces = (n - 1) / grain + 1;
    const int64_t threads = std::min({pieces, max_threads, static_cast<int64_t>(num_threads_)});
    if (threads <= 1) return fn(0, n);
    ::monolith::engine::RangeSteps ranges(n, grain, fn);
    RunSteps(threads, [&ranges] { return ranges.Next(); });
  }

  // Calls step() again and again on up to `max_threads` threads of which the calling one is the
  // first, in each until it has returned false; returns when all have.
  void RunSteps(int64_t max_threads, const Step& step) const {
    const int64_t helpers = std::max<int64_t>(0, std::min<int64_t>(max_threads, num_threads_) - 1);
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
  thread::ThreadPool* pool_;
  int num_threads_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_DEVICE_THREADS_H_
