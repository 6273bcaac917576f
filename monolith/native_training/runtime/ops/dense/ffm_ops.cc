// Field-aware factorization: every left feature meets every right feature of the same example.
#include <cstdint>
#include <string>

#include "monolith/native_training/runtime/ops/dense/ffm_sizes.h"
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

constexpr char kDot[] = "dot";

// Sets the number of features that make up a width; unknown if the width is.
Status NumFeatures(InferenceContext* c, const char* name, DimensionHandle width, int64_t dim_size,
                   DimensionHandle* num) {
  if (!c->ValueKnown(width)) {
    *num = c->UnknownDim();
    return OkStatus();
  }
  if (c->Value(width) % dim_size != 0) {
    return errors::InvalidArgument("the width of ", name, " is ", c->Value(width),
                                   ", want a multiple of dim_size = ", dim_size);
  }
  *num = c->MakeDim(c->Value(width) / dim_size);
  return OkStatus();
}

Status FfmShape(InferenceContext* c) {
  int64_t dim_size;
  std::string int_type;
  TF_RETURN_IF_ERROR(c->GetAttr("dim_size", &dim_size));
  TF_RETURN_IF_ERROR(c->GetAttr("int_type", &int_type));
  ShapeHandle left, right;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &left));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &right));
  DimensionHandle batch, num_left, num_right, width;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(left, 0), c->Dim(right, 0), &batch));
  TF_RETURN_IF_ERROR(NumFeatures(c, "left", c->Dim(left, 1), dim_size, &num_left));
  TF_RETURN_IF_ERROR(NumFeatures(c, "right", c->Dim(right, 1), dim_size, &num_right));
  TF_RETURN_IF_ERROR(c->Multiply(num_left, num_right, &width));
  if (int_type != kDot) TF_RETURN_IF_ERROR(c->Multiply(width, dim_size, &width));
  SetOutputShape(c, 0, c->Matrix(batch, width));
  return OkStatus();
}

Status FfmGradShape(InferenceContext* c) {
  ShapeHandle grad, left, right;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &grad));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &left));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &right));
  c->set_output(0, left);
  c->set_output(1, right);
  return OkStatus();
}

// Sums in four fixed lanes: the compiler can vectorise them, and the order never changes.
inline float Dot(const float* a, const float* b, int64_t n) {
  float lanes[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int lane = 0; lane < 4; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void Interact(const FfmSizes& s, bool dot, const float* left, const float* right, float* out) {
  for (int64_t l = 0; l < s.num_left; ++l) {
    const float* x = left + l * s.dim;
    for (int64_t r = 0; r < s.num_right; ++r) {
      const float* y = right + r * s.dim;
      if (dot) {
        *out++ = Dot(x, y, s.dim);
      } else {
        for (int64_t k = 0; k < s.dim; ++k) out[k] = x[k] * y[k];
        out += s.dim;
      }
    }
  }
}

// Adds to left_grad and right_grad, which are zero on entry.
void InteractGrad(const FfmSizes& s, bool dot, const float* grad, const float* left,
                  const float* right, float* left_grad, float* right_grad) {
  for (int64_t l = 0; l < s.num_left; ++l) {
    const float* x = left + l * s.dim;
    float* dx = left_grad + l * s.dim;
    for (int64_t r = 0; r < s.num_right; ++r) {
      const float* y = right + r * s.dim;
      float* dy = right_grad + r * s.dim;
      if (dot) {
        const float g = *grad++;
        for (int64_t k = 0; k < s.dim; ++k) {
          dx[k] += g * y[k];
          dy[k] += g * x[k];
        }
      } else {
        for (int64_t k = 0; k < s.dim; ++k) {
          dx[k] += grad[k] * y[k];
          dy[k] += grad[k] * x[k];
        }
        grad += s.dim;
      }
    }
  }
}

class FfmOpBase : public OpKernel {
 public:
  explicit FfmOpBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string int_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim_size", &dim_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("int_type", &int_type));
    dot_ = int_type == kDot;
  }

 protected:
  // Gives each row to one thread, which sums it in one order: examples are independent.
  template <typename Fn>
  void ForEachRow(OpKernelContext* ctx, const FfmSizes& s, int64_t cost_factor, Fn fn) {
    const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
    const int64_t cost = 1 + cost_factor * s.num_left * s.num_right * s.dim;
    Shard(workers.num_threads, workers.workers, s.batch, cost, [&fn](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) fn(b);
    });
  }

  int64_t dim_size_ = 1;
  bool dot_ = false;
};

class FfmOp : public FfmOpBase {
 public:
  using FfmOpBase::FfmOpBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& left = ctx->input(0);
    const Tensor& right = ctx->input(1);
    FfmSizes s;
    OP_REQUIRES_OK(ctx, GetFfmSizes(left, right, dim_size_, dot_, &s));
    TensorShape out_shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({s.batch, s.out_width}, &out_shape));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, out_shape, &out));
    if (out->NumElements() == 0) return;

    const float* x = left.flat<float>().data();
    const float* y = right.flat<float>().data();
    float* z = out->flat<float>().data();
    ForEachRow(ctx, s, 1, [&](int64_t b) {
      Interact(s, dot_, x + b * s.num_left * s.dim, y + b * s.num_right * s.dim,
               z + b * s.out_width);
    });
  }
};

class FfmGradOp : public FfmOpBase {
 public:
  using FfmOpBase::FfmOpBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& grad = ctx->input(0);
    const Tensor& left = ctx->input(1);
    const Tensor& right = ctx->input(2);
    FfmSizes s;
    OP_REQUIRES_OK(ctx, GetFfmSizes(left, right, dim_size_, dot_, &s));
    OP_REQUIRES(ctx,
                grad.dims() == 2 && grad.dim_size(0) == s.batch && grad.dim_size(1) == s.out_width,
                errors::InvalidArgument("the in/out shape not match: grad has shape ",
                                        grad.shape().DebugString(), ", want [", s.batch, ",",
                                        s.out_width, "]"));
    Tensor* left_grad = nullptr;
    Tensor* right_grad = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, left.shape(), &left_grad));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, right.shape(), &right_grad));
    left_grad->flat<float>().setZero();
    right_grad->flat<float>().setZero();
    if (grad.NumElements() == 0) return;

    const float* g = grad.flat<float>().data();
    const float* x = left.flat<float>().data();
    const float* y = right.flat<float>().data();
    float* dx = left_grad->flat<float>().data();
    float* dy = right_grad->flat<float>().data();
    ForEachRow(ctx, s, 4, [&](int64_t b) {
      const int64_t left_at = b * s.num_left * s.dim;
      const int64_t right_at = b * s.num_right * s.dim;
      InteractGrad(s, dot_, g + b * s.out_width, x + left_at, y + right_at, dx + left_at,
                   dy + right_at);
    });
  }
};

REGISTER_OP("FFM")
    .Input("left: float")
    .Input("right: float")
    .Output("output: float")
    .Attr("dim_size: int >= 1")
    .Attr("int_type: string")
    .SetShapeFn(FfmShape)
    .Doc(R"doc(
Multiplies every left with every right feature of an example.

left: [B, L * dim_size].
right: [B, R * dim_size].
output: `dot`: [B, L * R] inner products; otherwise [B, L * R * dim_size] products by element,
  left feature major.
dim_size: Floats per feature.
int_type: `dot`, or anything else for products by element.
)doc");

REGISTER_OP("FFMGrad")
    .Input("grad: float")
    .Input("left: float")
    .Input("right: float")
    .Output("left_grad: float")
    .Output("right_grad: float")
    .Attr("dim_size: int >= 1")
    .Attr("int_type: string")
    .SetShapeFn(FfmGradShape)
    .Doc(R"doc(
Computes the gradient of FFM with respect to both of its inputs.

grad: Gradient of FFM's output, with the same shape.
left: FFM's left input.
right: FFM's right input.
left_grad: Has the shape of left.
right_grad: Has the shape of right.
)doc");

REGISTER_GUARDED_KERNEL(Name("FFM").Device(DEVICE_CPU), FfmOp);
REGISTER_GUARDED_KERNEL(Name("FFMGrad").Device(DEVICE_CPU), FfmGradOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
