// FeatureInsight multiplies each feature of a concatenated embedding with its part of a weight.
//
//   input [B, E]   | segment 0 | segment 1 |  ...  |      E = sum of segment_sizes
//   weight [E, K]    rows of 0   rows of 1
//   output [B, F*K]  input_f * weight_f, side by side
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "Eigen/Core"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/overflow.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstBlock = Eigen::Map<const RowMajor, Eigen::Unaligned, Eigen::OuterStride<>>;
using StridedBlock = Eigen::Map<RowMajor, Eigen::Unaligned, Eigen::OuterStride<>>;

// Sets offsets[f] to the first row of weight that belongs to feature f, and offsets[F] to E.
Status SegmentOffsets(const std::vector<int64_t>& segment_sizes, std::vector<int64_t>* offsets) {
  offsets->assign(1, 0);
  for (size_t f = 0; f < segment_sizes.size(); ++f) {
    const int64_t size = segment_sizes[f];
    if (size < 0) {
      return errors::InvalidArgument("segment_sizes[", f, "] is ", size, ", want at least 0");
    }
    if (size > std::numeric_limits<int64_t>::max() - offsets->back()) {
      return errors::InvalidArgument("the sum of segment_sizes overflows at segment_sizes[", f,
                                     "] = ", size);
    }
    offsets->push_back(offsets->back() + size);
  }
  return OkStatus();
}

Status MergeWidth(InferenceContext* c, const std::vector<int64_t>& offsets, ShapeHandle input,
                  ShapeHandle weight) {
  DimensionHandle width;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(input, 1), c->Dim(weight, 0), &width));
  if (c->ValueKnown(width) && c->Value(width) != offsets.back()) {
    return errors::InvalidArgument("the width of input is ", c->Value(width),
                                   ", want the sum of segment_sizes = ", offsets.back());
  }
  return OkStatus();
}

Status FeatureInsightShape(InferenceContext* c) {
  std::vector<int64_t> segment_sizes, offsets;
  TF_RETURN_IF_ERROR(c->GetAttr("segment_sizes", &segment_sizes));
  TF_RETURN_IF_ERROR(SegmentOffsets(segment_sizes, &offsets));
  ShapeHandle input, weight;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &input));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &weight));
  TF_RETURN_IF_ERROR(MergeWidth(c, offsets, input, weight));
  DimensionHandle width;
  TF_RETURN_IF_ERROR(
      c->Multiply(c->Dim(weight, 1), static_cast<int64_t>(segment_sizes.size()), &width));
  SetOutputShape(c, 0, c->Matrix(c->Dim(input, 0), width));
  return OkStatus();
}

Status FeatureInsightGradShape(InferenceContext* c) {
  std::vector<int64_t> segment_sizes, offsets;
  TF_RETURN_IF_ERROR(c->GetAttr("segment_sizes", &segment_sizes));
  TF_RETURN_IF_ERROR(SegmentOffsets(segment_sizes, &offsets));
  ShapeHandle grad, input, weight;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &grad));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &input));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &weight));
  TF_RETURN_IF_ERROR(MergeWidth(c, offsets, input, weight));
  c->set_output(0, input);
  c->set_output(1, weight);
  return OkStatus();
}

class FeatureInsightBase : public OpKernel {
 public:
  explicit FeatureInsightBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> segment_sizes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("segment_sizes", &segment_sizes));
    OP_REQUIRES_OK(ctx, SegmentOffsets(segment_sizes, &offsets_));
  }

 protected:
  Status Check(const Tensor& input, const Tensor& weight) const {
    TF_RETURN_IF_ERROR(CheckMatrix("input", input));
    TF_RETURN_IF_ERROR(CheckMatrix("weight", weight));
    TF_RETURN_IF_ERROR(
        CheckEqual("the width of input", input.dim_size(1), "rows of weight", weight.dim_size(0)));
    return CheckEqual("the width of input", input.dim_size(1), "the sum of segment_sizes",
                      offsets_.back());
  }

  int64_t num_features() const { return static_cast<int64_t>(offsets_.size()) - 1; }

  std::vector<int64_t> offsets_;
};

class FeatureInsightOp : public FeatureInsightBase {
 public:
  using FeatureInsightBase::FeatureInsightBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const Tensor& weight = ctx->input(1);
    OP_REQUIRES_OK(ctx, Check(input, weight));
    const int64_t batch = input.dim_size(0);
    const int64_t embedding = input.dim_size(1);
    const int64_t k = weight.dim_size(1);
    const int64_t out_width = MultiplyWithoutOverflow(num_features(), k);
    OP_REQUIRES(ctx, out_width >= 0,
                errors::InvalidArgument("weight with ", k, " columns and ", num_features(),
                                        " segments make an output row that is too wide"));
    TensorShape out_shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({batch, out_width}, &out_shape));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, out_shape, &out));
    if (out->NumElements() == 0) return;

    const float* x = input.flat<float>().data();
    const float* w = weight.flat<float>().data();
    float* y = out->flat<float>().data();
    const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
    Shard(workers.num_threads, workers.workers, batch, 1 + 2 * embedding * k,
          [&](int64_t begin, int64_t end) {
            const int64_t rows = end - begin;
            for (int64_t f = 0; f < num_features(); ++f) {
              const int64_t at = offsets_[f];
              const int64_t size = offsets_[f + 1] - at;
              ConstBlock x_f(x + begin * embedding + at, rows, size,
                             Eigen::OuterStride<>(embedding));
              ConstBlock w_f(w + at * k, size, k, Eigen::OuterStride<>(k));
              StridedBlock y_f(y + begin * out_width + f * k, rows, k,
                               Eigen::OuterStride<>(out_width));
              y_f.noalias() = x_f * w_f;
            }
          });
  }
};

class FeatureInsightGradOp : public FeatureInsightBase {
 public:
  explicit FeatureInsightGradOp(OpKernelConstruction* ctx) : FeatureInsightBase(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("K", &k_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& grad = ctx->input(0);
    const Tensor& input = ctx->input(1);
    const Tensor& weight = ctx->input(2);
    OP_REQUIRES_OK(ctx, Check(input, weight));
    const int64_t batch = input.dim_size(0);
    const int64_t embedding = input.dim_size(1);
    const int64_t k = weight.dim_size(1);
    if (k_ >= 0) OP_REQUIRES_OK(ctx, CheckEqual("K", k_, "columns of weight", k));
    OP_REQUIRES_OK(ctx, CheckMatrix("grad", grad));
    OP_REQUIRES_OK(ctx, CheckEqual("the batch of grad", grad.dim_size(0), "that of input", batch));
    const int64_t grad_width = MultiplyWithoutOverflow(num_features(), k);
    OP_REQUIRES_OK(ctx, CheckEqual("the width of grad", grad.dim_size(1),
                                   "segments * columns of weight", grad_width));
    Tensor* input_grad = nullptr;
    Tensor* weight_grad = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, input.shape(), &input_grad));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, weight.shape(), &weight_grad));
    if (grad.NumElements() == 0) {
      input_grad->flat<float>().setZero();
      weight_grad->flat<float>().setZero();
      return;
    }

    const float* g = grad.flat<float>().data();
    const float* x = input.flat<float>().data();
    const float* w = weight.flat<float>().data();
    float* dx = input_grad->flat<float>().data();
    float* dw = weight_grad->flat<float>().data();
    const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
    Shard(workers.num_threads, workers.workers, batch, 1 + 2 * embedding * k,
          [&](int64_t begin, int64_t end) {
            const int64_t rows = end - begin;
            for (int64_t f = 0; f < num_features(); ++f) {
              const int64_t at = offsets_[f];
              const int64_t size = offsets_[f + 1] - at;
              ConstBlock g_f(g + begin * grad_width + f * k, rows, k,
                             Eigen::OuterStride<>(grad_width));
              ConstBlock w_f(w + at * k, size, k, Eigen::OuterStride<>(k));
              StridedBlock dx_f(dx + begin * embedding + at, rows, size,
                                Eigen::OuterStride<>(embedding));
              dx_f.noalias() = g_f * w_f.transpose();
            }
          });
    // Divides rows of weight among the threads, so that one thread makes each sum over the batch.
    Shard(workers.num_threads, workers.workers, embedding, 1 + 2 * batch * k,
          [&](int64_t begin, int64_t end) {
            for (int64_t f = 0; f < num_features(); ++f) {
              const int64_t at = std::max(begin, offsets_[f]);
              const int64_t size = std::min(end, offsets_[f + 1]) - at;
              if (size <= 0) continue;
              ConstBlock g_f(g + f * k, batch, k, Eigen::OuterStride<>(grad_width));
              ConstBlock x_f(x + at, batch, size, Eigen::OuterStride<>(embedding));
              StridedBlock dw_f(dw + at * k, size, k, Eigen::OuterStride<>(k));
              dw_f.noalias() = x_f.transpose() * g_f;
            }
          });
  }

 private:
  int64_t k_ = -1;
};

REGISTER_OP("FeatureInsight")
    .Input("input: float")
    .Input("weight: float")
    .Output("output: float")
    .Attr("segment_sizes: list(int)")
    .SetShapeFn(FeatureInsightShape)
    .Doc(R"doc(
Returns what each feature of a concatenated embedding contributes to each unit of a dense layer.

input: [B, E], features side by side.
weight: [E, K], the kernel of the dense layer.
output: [B, F * K], for each of the F features its part of `input * weight`.
segment_sizes: Widths of the features; they add up to E.
)doc");

REGISTER_OP("FeatureInsightGrad")
    .Input("grad: float")
    .Input("input: float")
    .Input("weight: float")
    .Output("input_grad: float")
    .Output("weight_grad: float")
    .Attr("segment_sizes: list(int)")
    .Attr("K: int")
    .SetShapeFn(FeatureInsightGradShape)
    .Doc(R"doc(
Computes the gradient of FeatureInsight with respect to both of its inputs.

grad: [B, F * K].
input: FeatureInsight's input.
weight: FeatureInsight's weight.
input_grad: Has the shape of input.
weight_grad: Has the shape of weight.
K: Columns of weight; a negative number means as many as weight has.
)doc");

REGISTER_GUARDED_KERNEL(Name("FeatureInsight").Device(DEVICE_CPU), FeatureInsightOp);
REGISTER_GUARDED_KERNEL(Name("FeatureInsightGrad").Device(DEVICE_CPU), FeatureInsightGradOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
