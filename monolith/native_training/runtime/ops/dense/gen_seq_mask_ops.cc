// GenSeqMask turns row splits into a [B, max_seq_length] matrix of leading ones.
#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// Accepts a slice of a longer vector of row splits too: only differences matter.
template <typename T>
Status CheckSplits(const T* splits, int64_t size) {
  if (size < 1) return errors::InvalidArgument("splits is empty, want at least one element");
  if (splits[0] < 0) {
    return errors::InvalidArgument("splits[0] is ", splits[0], ", want at least 0");
  }
  for (int64_t i = 1; i < size; ++i) {
    if (splits[i] < splits[i - 1]) {
      return errors::InvalidArgument("splits must not decrease, but splits[", i, "] = ", splits[i],
                                     " follows ", splits[i - 1]);
    }
  }
  return OkStatus();
}

template <typename T>
class GenSeqMaskOp : public OpKernel {
 public:
  explicit GenSeqMaskOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_seq_length", &max_seq_length_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckVector("splits", input));
    const T* splits = input.flat<T>().data();
    OP_REQUIRES_OK(ctx, CheckSplits(splits, input.NumElements()));
    const int64_t batch = input.NumElements() - 1;
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({batch, max_seq_length_}, &shape));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    if (out->NumElements() == 0) return;

    T* mask = out->flat<T>().data();
    const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
    Shard(workers.num_threads, workers.workers, batch, 1 + max_seq_length_,
          [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              const int64_t length = static_cast<int64_t>(splits[i + 1]) - splits[i];
              const int64_t ones = std::min(length, max_seq_length_);
              T* row = mask + i * max_seq_length_;
              std::fill(row, row + ones, T{1});
              std::fill(row + ones, row + max_seq_length_, T{0});
            }
          });
  }

 private:
  int64_t max_seq_length_ = 0;
};

REGISTER_OP("GenSeqMask")
    .Input("splits: T")
    .Output("mask: T")
    .Attr("max_seq_length: int >= 0")
    .Attr("T: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      int64_t max_seq_length;
      TF_RETURN_IF_ERROR(c->GetAttr("max_seq_length", &max_seq_length));
      ShapeHandle splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &splits));
      DimensionHandle batch = c->UnknownDim();
      if (c->FullyDefined(splits)) {
        TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &batch));
      }
      SetOutputShape(c, 0, c->Matrix(batch, max_seq_length));
      return OkStatus();
    })
    .Doc(R"doc(
Masks the valid positions of padded sequences.

splits: [B + 1], row splits of the sequences; never decreasing.
mask: [B, max_seq_length]; row i starts with min(splits[i+1] - splits[i], max_seq_length) ones, the
  rest is 0.
max_seq_length: Width of the mask.
)doc");

REGISTER_GUARDED_KERNEL(Name("GenSeqMask").Device(DEVICE_CPU).TypeConstraint<int32_t>("T"),
                        GenSeqMaskOp<int32_t>);
REGISTER_GUARDED_KERNEL(Name("GenSeqMask").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
                        GenSeqMaskOp<int64_t>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
