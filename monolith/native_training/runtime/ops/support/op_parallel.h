// TensorFlow's intra-op threads behind the engine's Parallel interface.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_PARALLEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_PARALLEL_H_

#include <cstdint>
#include <functional>

#include "monolith/native_training/runtime/distribution/parallel.h"
#include "monolith/native_training/runtime/ops/support/device_threads.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

class OpParallel final : public ::monolith::distribution::Parallel {
 public:
  explicit OpParallel(OpKernelContext* ctx) : threads_(ctx) {}

  int num_threads() const override { return threads_.num_threads(); }

  void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const override {
    threads_.Run(num_tasks, /*grain=*/1, num_threads(), [&task](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) task(t);
    });
  }

 private:
  DeviceThreads threads_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_PARALLEL_H_
