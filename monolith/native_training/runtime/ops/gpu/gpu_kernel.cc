#include "monolith/native_training/runtime/ops/gpu/gpu_kernel.h"

#include <memory>
#include <numeric>

#include "tensorflow/core/common_runtime/device/device_event_mgr.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/stream_executor.h"

namespace tensorflow {
namespace monolith_tf {

Status GpuCall::Init(OpKernelContext* ctx) {
  ctx_ = ctx;
  TF_RETURN_IF_ERROR(GetGpuLibrary(&library_));
  if (ctx->op_device_context() == nullptr || ctx->op_device_context()->stream() == nullptr) {
    return errors::FailedPrecondition(ctx->op_kernel().name(), " runs on ", ctx->device()->name(),
                                      ", which has no CUDA stream");
  }
  stream_ = ctx->op_device_context()->stream()->platform_specific_handle().stream;
  return OkStatus();
}

Status GpuCall::Run(const std::function<int(void*, int64_t*)>& call) {
  int64_t bytes = 0;
  TF_RETURN_IF_ERROR(Check(call(nullptr, &bytes)));
  TF_RETURN_IF_ERROR(ctx_->allocate_temp(DT_INT8, TensorShape({bytes}), &workspace_));
  return Check(call(workspace_.data(), &bytes));
}

Status GpuCall::ReadInOrder(const void* from, void* to, int64_t bytes) const {
  if (bytes == 0) return OkStatus();
  TF_RETURN_IF_ERROR(Check(library_->read(stream_, from, to, bytes)));
  return Check(library_->synchronize(stream_));
}

Status GpuCall::ReadThen(const void* from, const Tensor& to, int64_t bytes,
                         std::function<void()> then) {
  TF_RETURN_IF_ERROR(Check(library_->read(stream_, from, to.data(), bytes)));
  ctx_->device()->tensorflow_accelerator_device_info()->event_mgr->ThenExecute(
      ctx_->op_device_context()->stream(), std::move(then));
  return OkStatus();
}

Status AllocateSlices(OpKernelContext* ctx, const std::vector<TensorShape>& shapes, Tensor* whole,
                      std::vector<int64_t>* offsets) {
  std::vector<int> outputs(shapes.size());
  std::iota(outputs.begin(), outputs.end(), 0);
  return AllocateSlices(ctx, outputs, shapes, whole, offsets);
}

Status AllocateSlices(OpKernelContext* ctx, const std::vector<int>& outputs,
                      const std::vector<TensorShape>& shapes, Tensor* whole,
                      std::vector<int64_t>* offsets) {
  constexpr int64_t kAlignment = 64 / sizeof(float);
  offsets->assign(1, 0);
  for (const TensorShape& shape : shapes) {
    const int64_t n = shape.num_elements();
    int64_t end;
    if (n > INT64_MAX - kAlignment ||
        __builtin_add_overflow(offsets->back(), (n + kAlignment - 1) / kAlignment * kAlignment,
                               &end)) {
      return errors::InvalidArgument("the outputs have more elements together than int64 counts");
    }
    offsets->push_back(end);
  }
  TensorShape all;
  TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({offsets->back()}, &all));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_FLOAT, all, whole));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t begin = (*offsets)[i];
    Tensor view;
    if (!view.CopyFrom(whole->Slice(begin, begin + shapes[i].num_elements()), shapes[i])) {
      return errors::Internal("cannot view a slice as ", shapes[i].DebugString());
    }
    ctx->set_output(outputs[i], view);
  }
  return OkStatus();
}

void GpuKernel::Compute(OpKernelContext* ctx) {
  GpuCall call;
  OP_REQUIRES_OK(ctx, call.Init(ctx));
  OP_REQUIRES_OK(ctx, Launch(ctx, &call));
}

void CheckedGpuKernel::ComputeAsync(OpKernelContext* ctx, DoneCallback done) {
  const Status status = CatchExceptions([&]() -> Status {
    auto call = std::make_shared<GpuCall>();
    Describe describe;
    TF_RETURN_IF_ERROR(call->Init(ctx));
    TF_RETURN_IF_ERROR(Launch(ctx, call.get(), &describe));
    // Nothing for the device to check.
    if (describe == nullptr) {
      done();
      return OkStatus();
    }
    Tensor bad;
    AllocatorAttributes on_host;
    on_host.set_on_host(true);
    on_host.set_gpu_compatible(true);
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT32, TensorShape({}), &bad, on_host));
    return call->ReadThen(
        call->workspace().data(), bad, sizeof(int32_t), [ctx, done, call, bad, describe] {
          if (bad.scalar<int32_t>()() != 0) {
            const Status error = CatchExceptions([&] { return describe(*call); });
            ctx->CtxFailure(__FILE__, __LINE__,
                            error.ok() ? errors::Internal("the GPU found bad offsets that "
                                                          "the CPU does not")
                                       : error);
          }
          done();
        });
  });
  OP_REQUIRES_OK_ASYNC(ctx, status, done);
}

}  // namespace monolith_tf
}  // namespace tensorflow
