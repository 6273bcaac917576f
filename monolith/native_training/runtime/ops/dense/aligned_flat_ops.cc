// MonolithAlignedFlatConcat and ...Split lay many tensors into one flat buffer, for one all-reduce.
//
//   inputs  [a a a]                [b b ... b b]  (17)
//   flat    |a a a 0 0 ... 0|b b b ... b|b 0 0 ... 0|     every tensor starts on a 64-byte boundary
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/dense/dense_kernels.h"
#include "monolith/native_training/runtime/ops/dense/aligned_flat.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

constexpr int64_t kGrain = 1 << 16;

class AlignedFlatConcatOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList inputs;
    OP_REQUIRES_OK(ctx, ctx->input_list("inputs", &inputs));
    const Tensor& scale_tensor = ctx->input(inputs.size());
    OP_REQUIRES_OK(ctx, CheckScalar("scale", scale_tensor));
    const float scale = scale_tensor.scalar<float>()();
    const std::vector<int64_t> offsets = AlignedOffsets(inputs);
    Tensor* flat;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {offsets.back()}, &flat));
    float* out = flat->flat<float>().data();
    // Takes as many tensors at a time as hold kGrain elements on average.
    const int64_t grain = 1 + inputs.size() * kGrain / (offsets.back() + 1);
    DeviceRunner(ctx).RunRanges(inputs.size(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = inputs[i].NumElements();
        ::monolith::dense::Scale(inputs[i].flat<float>().data(), scale, n, out + offsets[i]);
        std::fill(out + offsets[i] + n, out + offsets[i + 1], 0.0f);
      }
    });
  }
};

// Views, wherever the buffer lies: there is nothing for a device to do.
class AlignedFlatSplitOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList inputs;
    OP_REQUIRES_OK(ctx, ctx->input_list("inputs", &inputs));
    const Tensor& flat = ctx->input(inputs.size());
    OP_REQUIRES_OK(ctx, CheckVector("flat", flat));
    const std::vector<int64_t> offsets = AlignedOffsets(inputs);
    OP_REQUIRES_OK(ctx, CheckEqual("size of flat", flat.NumElements(),
                                   "the aligned sizes of inputs together", offsets.back()));
    for (int i = 0; i < inputs.size(); ++i) {
      Tensor view;
      OP_REQUIRES(ctx,
                  view.CopyFrom(flat.Slice(offsets[i], offsets[i] + inputs[i].NumElements()),
                                inputs[i].shape()),
                  errors::Internal("cannot view flat as inputs[", i, "]"));
      ctx->set_output(i, std::move(view));
    }
  }
};

REGISTER_OP("MonolithAlignedFlatConcat")
    .Input("inputs: N * float")
    .Input("scale: float")
    .Output("concat: float")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Lays the flattened inputs end to end, each padded with zeros to a multiple of 16 floats.

scale: every element is multiplied by it.
)doc");

REGISTER_OP("MonolithAlignedFlatSplit")
    .Input("inputs: N * float")
    .Input("flat: float")
    .Output("concat: N * float")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_inputs() - 1;
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(n), 1, &unused));
      for (int i = 0; i < n; ++i) c->set_output(i, c->input(i));
      return OkStatus();
    })
    .Doc(R"doc(
Undoes MonolithAlignedFlatConcat without copying.

inputs: only their shapes count.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithAlignedFlatConcat").Device(DEVICE_CPU), AlignedFlatConcatOp);
REGISTER_GUARDED_KERNEL(Name("MonolithAlignedFlatSplit").Device(DEVICE_CPU), AlignedFlatSplitOp);
REGISTER_GUARDED_KERNEL(Name("MonolithAlignedFlatSplit").Device(DEVICE_GPU), AlignedFlatSplitOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
