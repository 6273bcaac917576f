// The base of kernels that read or write checkpoint files: (handle, basename) -> handle.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FILE_KERNEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FILE_KERNEL_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include "monolith/native_training/runtime/files/file_workers.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/random.h"

namespace tensorflow {
namespace monolith_tf {

// Runs on a thread for files: it may take minutes, and lookups need the executor's threads then.
class FileKernel : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final {
    const Tensor& basename = ctx->input(1);
    OP_REQUIRES_OK_ASYNC(ctx, CheckScalar("basename", basename), done);
    const std::string path(basename.scalar<tstring>()());
    OP_REQUIRES_ASYNC(ctx, !path.empty(), errors::InvalidArgument("basename is empty, want a path"),
                      done);
    const int64_t most_ms = std::min(max_delay_ms_, kMaxDelayMs);
    const int64_t delay_ms = most_ms > 0 ? static_cast<int64_t>(random::New64() % most_ms) : 0;
    try {
      ::monolith::engine::RunOnFileThread(delay_ms, [this, ctx, done, path] {
        OP_REQUIRES_OK_ASYNC(ctx, RunOrCatch(ctx, path), done);
        ctx->set_output(0, ctx->input(0));
        done();
      });
    } catch (const std::exception& error) {
      OP_REQUIRES_ASYNC(
          ctx, false,
          errors::ResourceExhausted("no memory or no thread to work on ", path, ": ", error.what()),
          done);
    }
  }

 protected:
  // Delays Run by a random time below this, to spread the load of many tables.
  void set_max_delay_ms(int64_t ms) { max_delay_ms_ = ms; }

 private:
  static constexpr int64_t kMaxDelayMs = 24 * 3600 * 1000;

  virtual Status Run(OpKernelContext* ctx, const std::string& basename) = 0;

  Status RunOrCatch(OpKernelContext* ctx, const std::string& basename) {
    try {
      return Run(ctx, basename);
    } catch (const std::exception& error) {
      return errors::ResourceExhausted("no memory to work on ", basename, ": ", error.what());
    }
  }

  int64_t max_delay_ms_ = 0;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FILE_KERNEL_H_
