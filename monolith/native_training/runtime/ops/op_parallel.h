// TensorFlow's intra-op threads behind the engine's Parallel interface.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_OP_PARALLEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_OP_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "monolith/native_training/runtime/distribution/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tensorflow {
namespace monolith_tf {

class OpParallel final : public ::monolith::distribution::Parallel {
 public:
  explicit OpParallel(OpKernelContext* ctx)
      : pool_(ctx->device()->tensorflow_cpu_worker_threads()->workers),
        num_threads_(ctx->device()->tensorflow_cpu_worker_threads()->num_threads) {}

  int num_threads() const override { return num_threads_; }

  void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const override {
    if (num_tasks == 1) {
      task(0);
      return;
    }
    const thread::ThreadPool::SchedulingParams one_each(
        thread::ThreadPool::SchedulingStrategy::kFixedBlockSize, /*cost_per_unit=*/std::nullopt,
        /*block_size=*/1);
    pool_->ParallelFor(num_tasks, one_each, [&task](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) task(t);
    });
  }

 private:
  thread::ThreadPool* pool_;
  int num_threads_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_OP_PARALLEL_H_
