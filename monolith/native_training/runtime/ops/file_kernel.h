// Kernels that read or write checkpoint files: (handle, basename) -> handle.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_KERNEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_KERNEL_H_

#include <string>

#include "monolith/native_training/runtime/ops/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

// Runs in a thread of its own: file work may take minutes, and the executor's threads are needed
// for lookups meanwhile.
class FileKernel : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final {
    const Tensor& basename = ctx->input(1);
    OP_REQUIRES_OK_ASYNC(ctx, CheckScalar("basename", basename), done);
    const std::string path(basename.scalar<tstring>()());
    OP_REQUIRES_ASYNC(ctx, !path.empty(), errors::InvalidArgument("basename is empty, want a path"),
                      done);
    ctx->env()->SchedClosure([this, ctx, done, path] {
      OP_REQUIRES_OK_ASYNC(ctx, Run(ctx, path), done);
      ctx->set_output(0, ctx->input(0));
      done();
    });
  }

 private:
  virtual Status Run(OpKernelContext* ctx, const std::string& basename) = 0;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_KERNEL_H_
