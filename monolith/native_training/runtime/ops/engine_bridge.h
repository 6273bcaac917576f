// What kernels need to call the engine: its status as TensorFlow's, TensorFlow's threads as its.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_ENGINE_BRIDGE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_ENGINE_BRIDGE_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/hash_table/status.h"
#include "monolith/native_training/runtime/ops/device_threads.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

namespace engine = ::monolith::engine;

inline Status FromEngine(const engine::Status& status) {
  switch (status.code) {
    case engine::StatusCode::kOk:
      return OkStatus();
    case engine::StatusCode::kInvalidArgument:
      return errors::InvalidArgument(status.message);
    case engine::StatusCode::kFailedPrecondition:
      return errors::FailedPrecondition(status.message);
    case engine::StatusCode::kResourceExhausted:
      return errors::ResourceExhausted(status.message);
    case engine::StatusCode::kUnimplemented:
      // What a table cannot do depends on its configuration, so the caller's argument is wrong.
      return errors::InvalidArgument(status.message);
  }
  return errors::Internal(status.message);
}

// The worker threads of the device that runs a kernel.
class DeviceRunner final : public engine::ParallelRunner {
 public:
  explicit DeviceRunner(OpKernelContext* ctx) : threads_(ctx) {}

  int NumThreads() const override { return threads_.num_threads(); }

  void ParallelFor(int64_t n, int64_t cost_per_unit,
                   const std::function<void(int64_t, int64_t)>& fn) override {
    const int64_t threads = std::min<int64_t>(NumThreads(), n * cost_per_unit / kMinThreadNanos);
    // Several pieces per thread, so that one that comes late leaves its share to the others.
    threads_.Run(n, n / (kPiecesPerThread * NumThreads()), threads, fn);
  }

 private:
  static constexpr int64_t kMinThreadNanos = 50000;  // to wake a thread for less does not pay
  static constexpr int64_t kPiecesPerThread = 8;

  DeviceThreads threads_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_ENGINE_BRIDGE_H_
