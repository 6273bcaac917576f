// GPU kernels of the dense ops: optimizers, clipping, flat concatenation, FFM.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/dense/aligned_flat.h"
#include "monolith/native_training/runtime/ops/dense/clip_norm.h"
#include "monolith/native_training/runtime/ops/dense/ffm_sizes.h"
#include "monolith/native_training/runtime/ops/dense/locked_variables.h"
#include "monolith/native_training/runtime/ops/gpu/gpu_kernel.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// Pointers to scalars that lie on the device: inputs [first, first + names.size()).
Status ScalarPointers(OpKernelContext* ctx, int first, const std::vector<const char*>& names,
                      std::vector<const float*>* pointers) {
  for (size_t i = 0; i < names.size(); ++i) {
    const Tensor& tensor = ctx->input(first + static_cast<int>(i));
    if (!TensorShapeUtils::IsScalar(tensor.shape())) {
      return errors::InvalidArgument(names[i], " is not a scalar: ", tensor.shape().DebugString());
    }
    pointers->push_back(Floats(tensor));
  }
  return OkStatus();
}

// Variables [0, pointers->size()) for writing.
Status MutablePointers(const GpuCall& call, LockedVariables* variables,
                       std::vector<float*>* pointers) {
  for (size_t i = 0; i < pointers->size(); ++i) {
    TF_RETURN_IF_ERROR(variables->MutableValues(
        call.ctx(), static_cast<int>(i),
        [&call](const void* from, void* to, int64_t bytes) {
          return call.Check(call.library().copy(call.stream(), from, to, bytes));
        },
        &(*pointers)[i]));
  }
  return OkStatus();
}

class ResourceApplyRmspropGpuOp : public GpuKernel {
 public:
  explicit ResourceApplyRmspropGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("update_slots", &update_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_v2", &use_v2_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    std::vector<const float*> scalars;
    TF_RETURN_IF_ERROR(
        ScalarPointers(ctx, 3, {"lr", "beta1", "beta2", "epsilon", "weight_decay"}, &scalars));
    const Tensor& grad = ctx->input(8);
    const std::vector<const char*> names = {"var", "m", "v"};
    LockedVariables variables;
    TF_RETURN_IF_ERROR(variables.Lock(ctx, names));
    TF_RETURN_IF_ERROR(variables.Check(ctx, names, grad));
    if (!update_slots_) return OkStatus();
    std::vector<float*> values(3);
    TF_RETURN_IF_ERROR(MutablePointers(*call, &variables, &values));
    return call->Check(call->library().op_rmsprop(call->stream(), grad.NumElements(),
                                                  scalars.data(), Floats(grad), values[0],
                                                  values[1], values[2], use_v2_));
  }

 private:
  bool update_slots_;
  bool use_v2_;
};

class ResourceApplyAdamomGpuOp : public CheckedGpuKernel {
 public:
  explicit ResourceApplyAdamomGpuOp(OpKernelConstruction* ctx) : CheckedGpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("update_slots", &update_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_v2", &use_v2_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    std::vector<const float*> scalars;
    TF_RETURN_IF_ERROR(ScalarPointers(
        ctx, 4, {"lr", "ada_decay", "mom_decay", "epsilon", "weight_decay"}, &scalars));
    const Tensor& grad = ctx->input(9);
    const std::vector<const char*> names = {"var", "m", "v", "c"};
    LockedVariables variables;
    TF_RETURN_IF_ERROR(variables.Lock(ctx, names));
    TF_RETURN_IF_ERROR(variables.Check(ctx, names, grad));
    const int64_t n = grad.NumElements();
    std::vector<float*> values(update_slots_ ? 4 : 1);
    TF_RETURN_IF_ERROR(MutablePointers(*call, &variables, &values));
    if (update_slots_) {
      return call->Check(call->library().op_adamom(call->stream(), n, scalars.data(), Floats(grad),
                                                   values[0], values[1], values[2], values[3],
                                                   use_v2_));
    }
    const float *m = variables.values(1), *v = variables.values(2), *c = variables.values(3);
    *describe = [](const GpuCall&) {
      return errors::InvalidArgument(
          "update_slots is false while c holds 0: the first step must update the slots");
    };
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_adamom_move(call->stream(), n, scalars.data(), m, v, c, values[0],
                                            use_v2_, workspace, bytes);
    });
  }

 private:
  bool update_slots_;
  bool use_v2_;
};

// The pointers and sizes of a list of tensors.
struct FloatList {
  explicit FloatList(const OpInputList& tensors) {
    for (const Tensor& tensor : tensors) {
      pointers.push_back(Floats(tensor));
      sizes.push_back(tensor.NumElements());
      shapes.push_back(tensor.shape());
    }
  }

  int64_t n() const { return static_cast<int64_t>(pointers.size()); }

  std::vector<const float*> pointers;
  std::vector<int64_t> sizes;
  std::vector<TensorShape> shapes;
};

// Outputs of the shapes of `inputs`, in one allocation.
Status AllocateLike(OpKernelContext* ctx, const FloatList& inputs, std::vector<float*>* outputs) {
  Tensor whole;
  std::vector<int64_t> offsets;
  TF_RETURN_IF_ERROR(AllocateSlices(ctx, inputs.shapes, &whole, &offsets));
  for (int64_t i = 0; i < inputs.n(); ++i) outputs->push_back(MutableFloats(whole) + offsets[i]);
  return OkStatus();
}

class ClipByGlobalNormGpuOp : public GpuKernel {
 public:
  using GpuKernel::GpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("grad_list", &inputs));
    const Tensor& norm_tensor = ctx->input(inputs.size());
    TF_RETURN_IF_ERROR(CheckScalar("global_norm", norm_tensor));
    float clip_norm;
    TF_RETURN_IF_ERROR(ReadClipNorm(ctx->input(inputs.size() + 1), &clip_norm));
    const float norm = norm_tensor.scalar<float>()();
    if (std::isfinite(norm) && norm <= clip_norm) {
      for (int i = 0; i < inputs.size(); ++i) ctx->set_output(i, inputs[i]);
      return OkStatus();
    }
    const float factor =
        std::isfinite(norm) ? clip_norm / norm : std::numeric_limits<float>::quiet_NaN();
    const FloatList list(inputs);
    std::vector<float*> outputs;
    TF_RETURN_IF_ERROR(AllocateLike(ctx, list, &outputs));
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_scale_by(call->stream(), list.n(), list.pointers.data(),
                                         list.sizes.data(), outputs.data(), list.sizes.data(),
                                         factor, workspace, bytes);
    });
  }
};

// Asynchronous for the sake of the norm, which the host gets when the device has it.
class ClipByGlobalNormFusedGpuOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const Status status = CatchExceptions([&] { return Launch(ctx, done); });
    OP_REQUIRES_OK_ASYNC(ctx, status, done);
  }

 private:
  static Status Launch(OpKernelContext* ctx, const DoneCallback& done) {
    GpuCall call;
    TF_RETURN_IF_ERROR(call.Init(ctx));
    OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("grad_list", &inputs));
    float clip_norm;
    TF_RETURN_IF_ERROR(ReadClipNorm(ctx->input(inputs.size()), &clip_norm));
    const FloatList list(inputs);
    std::vector<float*> outputs;
    TF_RETURN_IF_ERROR(AllocateLike(ctx, list, &outputs));
    Tensor norm;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_FLOAT, TensorShape({}), &norm));
    // Page-locked: a copy to other memory would hold up this thread.
    AllocatorAttributes on_host = ctx->output_alloc_attr(inputs.size());
    on_host.set_on_host(true);
    on_host.set_gpu_compatible(true);
    Tensor* global_norm;
    TF_RETURN_IF_ERROR(ctx->allocate_output(inputs.size(), TensorShape({}), &global_norm, on_host));
    TF_RETURN_IF_ERROR(call.Run([&](void* workspace, int64_t* bytes) {
      return call.library().op_clip(call.stream(), list.n(), list.pointers.data(),
                                    list.sizes.data(), outputs.data(), clip_norm,
                                    MutableFloats(norm), workspace, bytes);
    }));
    // The device's norm must live until it was copied.
    return call.ReadThen(norm.data(), *global_norm, sizeof(float), [done, norm] { done(); });
  }
};

class GlobalL2ReduceGpuOp : public GpuKernel {
 public:
  using GpuKernel::GpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("grad_list", &inputs));
    const FloatList list(inputs);
    Tensor* sum;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &sum));
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_sum_of_squares(call->stream(), list.n(), list.pointers.data(),
                                               list.sizes.data(), MutableFloats(*sum), workspace,
                                               bytes);
    });
  }
};

class AlignedFlatConcatGpuOp : public GpuKernel {
 public:
  using GpuKernel::GpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(ctx->input_list("inputs", &inputs));
    const Tensor& scale = ctx->input(inputs.size());
    TF_RETURN_IF_ERROR(CheckScalar("scale", scale));
    const FloatList list(inputs);
    const std::vector<int64_t> offsets = AlignedOffsets(inputs);
    Tensor* flat;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {offsets.back()}, &flat));
    std::vector<float*> outputs;
    std::vector<int64_t> padded;
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      outputs.push_back(MutableFloats(*flat) + offsets[i]);
      padded.push_back(offsets[i + 1] - offsets[i]);
    }
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_scale(call->stream(), list.n(), list.pointers.data(),
                                      list.sizes.data(), outputs.data(), padded.data(),
                                      Floats(scale), workspace, bytes);
    });
  }
};

class FfmGpuOpBase : public GpuKernel {
 public:
  explicit FfmGpuOpBase(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    std::string int_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim_size", &dim_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("int_type", &int_type));
    dot_ = int_type == "dot";
  }

 protected:
  int64_t dim_size_ = 1;
  bool dot_ = false;
};

class FfmGpuOp : public FfmGpuOpBase {
 public:
  using FfmGpuOpBase::FfmGpuOpBase;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    const Tensor &left = ctx->input(0), &right = ctx->input(1);
    FfmSizes s;
    TF_RETURN_IF_ERROR(GetFfmSizes(left, right, dim_size_, dot_, &s));
    Tensor* out;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {s.batch, s.out_width}, &out));
    return call->Check(call->library().op_ffm(call->stream(), s.batch, s.num_left, s.num_right,
                                              s.dim, dot_, Floats(left), Floats(right),
                                              MutableFloats(*out)));
  }
};

class FfmGradGpuOp : public FfmGpuOpBase {
 public:
  using FfmGpuOpBase::FfmGpuOpBase;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    const Tensor &grad = ctx->input(0), &left = ctx->input(1), &right = ctx->input(2);
    FfmSizes s;
    TF_RETURN_IF_ERROR(GetFfmSizes(left, right, dim_size_, dot_, &s));
    if (grad.dims() != 2 || grad.dim_size(0) != s.batch || grad.dim_size(1) != s.out_width) {
      return errors::InvalidArgument("the in/out shape not match: grad has shape ",
                                     grad.shape().DebugString(), ", want [", s.batch, ",",
                                     s.out_width, "]");
    }
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, {left.shape(), right.shape()}, &whole, &offsets));
    float* const base = MutableFloats(whole);
    return call->Check(call->library().op_ffm_grad(
        call->stream(), s.batch, s.num_left, s.num_right, s.dim, dot_, Floats(grad), Floats(left),
        Floats(right), base + offsets[0], base + offsets[1]));
  }
};

REGISTER_GUARDED_KERNEL(Name("ResourceApplyRmsprop").Device(DEVICE_GPU), ResourceApplyRmspropGpuOp);
REGISTER_GUARDED_KERNEL(Name("ResourceApplyAdamom").Device(DEVICE_GPU), ResourceApplyAdamomGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithClipByGlobalNorm")
                            .Device(DEVICE_GPU)
                            .HostMemory("global_norm")
                            .HostMemory("clip_norm"),
                        ClipByGlobalNormGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithClipByGlobalNormFused")
                            .Device(DEVICE_GPU)
                            .HostMemory("clip_norm")
                            .HostMemory("global_norm"),
                        ClipByGlobalNormFusedGpuOp);
REGISTER_GUARDED_KERNEL(Name("GlobalL2Reduce").Device(DEVICE_GPU), GlobalL2ReduceGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithAlignedFlatConcat").Device(DEVICE_GPU),
                        AlignedFlatConcatGpuOp);
REGISTER_GUARDED_KERNEL(Name("FFM").Device(DEVICE_GPU), FfmGpuOp);
REGISTER_GUARDED_KERNEL(Name("FFMGrad").Device(DEVICE_GPU), FfmGradGpuOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
