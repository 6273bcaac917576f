// Pooling of a ragged feature: the embeddings of an example's ids become one row, with gradients.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/distribution/segment_reduce.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::BroadcastSegments;
using ::monolith::distribution::CheckSegments;
using ::monolith::distribution::ColumnSink;
using ::monolith::distribution::CountSegments;
using ::monolith::distribution::ReduceSegments;
using ::monolith::distribution::Reduction;
using ::monolith::distribution::SegmentCheck;
using ::monolith::distribution::SquareNormGradient;
using ::monolith::engine::ParallelRunner;
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// id_dense_shape[0] if it is a constant.
Status BatchDim(InferenceContext* c, int input, DimensionHandle* batch) {
  *batch = c->UnknownDim();
  const Tensor* shape = c->input_tensor(input);
  if (shape != nullptr && shape->dims() == 1 && shape->NumElements() >= 1 &&
      shape->vec<int64_t>()(0) >= 0) {
    *batch = c->MakeDim(shape->vec<int64_t>()(0));
  }
  return OkStatus();
}

DimensionHandle DimOrUnknown(InferenceContext* c, ShapeHandle shape, int dim) {
  return c->RankKnown(shape) && c->Rank(shape) > dim ? c->Dim(shape, dim) : c->UnknownDim();
}

Status ReduceShape(InferenceContext* c) {
  DimensionHandle batch;
  TF_RETURN_IF_ERROR(BatchDim(c, 2, &batch));
  SetOutputShape(c, 0, c->Matrix(batch, DimOrUnknown(c, c->input(1), 1)));
  return OkStatus();
}

// [rows of id_indices, dim 1 of the last input]
Status ReduceGradientShape(InferenceContext* c) {
  SetOutputShape(c, 0,
                 c->Matrix(DimOrUnknown(c, c->input(0), 0),
                           DimOrUnknown(c, c->input(c->num_inputs() - 1), 1)));
  return OkStatus();
}

// id_indices is [k, 1]; a plain vector is the same thing.
Status CheckIndices(const Tensor& id_indices) {
  if (id_indices.dims() == 1 || (id_indices.dims() == 2 && id_indices.dim_size(1) == 1)) {
    return OkStatus();
  }
  return errors::InvalidArgument("id_indices has shape ", id_indices.shape().DebugString(),
                                 ", want [k,1]");
}

Status RangeStatus(const SegmentCheck& check, const Tensor& id_indices, int64_t rows) {
  if (check.bad < 0) return OkStatus();
  return errors::InvalidArgument("id_indices[", check.bad, "] is ",
                                 id_indices.flat<int64_t>()(check.bad), ", want a value in [0, ",
                                 rows, ")");
}

Status CheckRange(const ParallelRunner& parallel, const Tensor& id_indices, int64_t rows) {
  const auto segments = id_indices.flat<int64_t>();
  return RangeStatus(CheckSegments(parallel, segments.data(), segments.size(), rows), id_indices,
                     rows);
}

// The inputs of a reduction, checked except for the range of id_indices, which is found out while
// reducing.
struct ReduceInputs {
  const int64_t* segments = nullptr;
  const float* values = nullptr;
  int64_t k = 0;
  int64_t dim = 0;
  int64_t rows = 0;

  Status Read(OpKernelContext* ctx) {
    const Tensor& id_indices = ctx->input(0);
    const Tensor& id_values = ctx->input(1);
    const Tensor& id_dense_shape = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckIndices(id_indices));
    TF_RETURN_IF_ERROR(CheckMatrix("id_values", id_values));
    TF_RETURN_IF_ERROR(CheckEqual("number of rows of id_values", id_values.dim_size(0),
                                  "number of rows of id_indices", id_indices.dim_size(0)));
    if (id_dense_shape.dims() != 1 || id_dense_shape.NumElements() < 1) {
      return errors::InvalidArgument("id_dense_shape has shape ",
                                     id_dense_shape.shape().DebugString(),
                                     ", want a vector with the number of rows");
    }
    rows = id_dense_shape.vec<int64_t>()(0);
    if (rows < 0) {
      return errors::InvalidArgument("id_dense_shape[0] is ", rows, ", want at least 0");
    }
    segments = id_indices.flat<int64_t>().data();
    values = id_values.flat<float>().data();
    k = id_values.dim_size(0);
    dim = id_values.dim_size(1);
    return OkStatus();
  }

  template <Reduction kReduction>
  Status ReduceTo(OpKernelContext* ctx, const std::vector<ColumnSink>& sinks) const {
    return RangeStatus(
        ReduceSegments<kReduction>(DeviceRunner(ctx), segments, k, rows, values, dim, sinks),
        ctx->input(0), rows);
  }
};

// Whether every row has one value, in order: sums and their gradients are then what they are made
// of, and need no copy. Features with one id per example are like this.
bool IsIdentity(const int64_t* segments, int64_t k, int64_t rows) {
  if (k != rows) return false;
  for (int64_t i = 0; i < k; ++i) {
    if (segments[i] != i) return false;
  }
  return true;
}

// Width of each split, and that there are as many as outputs.
Status CheckSplitDims(const std::vector<int64_t>& split_dims, int64_t num_outputs) {
  TF_RETURN_IF_ERROR(CheckEqual("length of split_dims", static_cast<int64_t>(split_dims.size()),
                                "number of tensors", num_outputs));
  for (size_t i = 0; i < split_dims.size(); ++i) {
    if (split_dims[i] <= 0 || split_dims[i] > INT32_MAX) {
      return errors::InvalidArgument("split_dims[", i, "] is ", split_dims[i],
                                     ", want a value in [1, ", INT32_MAX, "]");
    }
  }
  return OkStatus();
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

constexpr char kReduceDoc[] = R"doc(
Reduces the embeddings of each example, column by column. Examples without ids give zeros.

id_indices: [k, 1], example of every id, in any order.
id_values: [k, dim].
id_dense_shape: [1], number of examples.
reduced: [number of examples, dim].
)doc";

constexpr char kReduceGradientDoc[] = R"doc(
Gradient of the reduction with respect to `id_values`.

grads: [number of examples, dim].
)doc";

}  // namespace

#define REGISTER_REDUCE(NAME)         \
  REGISTER_OP(NAME)                   \
      .Input("id_indices: int64")     \
      .Input("id_values: float")      \
      .Input("id_dense_shape: int64") \
      .Output("reduced: float")       \
      .SetShapeFn(ReduceShape)        \
      .Doc(kReduceDoc)
REGISTER_REDUCE("MonolithReduceSum");
REGISTER_REDUCE("MonolithReduceMean");
REGISTER_REDUCE("MonolithReduceSquareNorm");
#undef REGISTER_REDUCE

#define REGISTER_REDUCE_GRADIENT(NAME)  \
  REGISTER_OP(NAME)                     \
      .Input("id_indices: int64")       \
      .Input("grads: float")            \
      .Output("id_values_grads: float") \
      .SetShapeFn(ReduceGradientShape)  \
      .Doc(kReduceGradientDoc)
REGISTER_REDUCE_GRADIENT("MonolithReduceSumGradient");
REGISTER_REDUCE_GRADIENT("MonolithReduceMeanGradient");
#undef REGISTER_REDUCE_GRADIENT

REGISTER_OP("MonolithReduceSquareNormGradient")
    .Input("id_indices: int64")
    .Input("id_values: float")
    .Input("grads: float")
    .Output("id_values_grads: float")
    .SetShapeFn(ReduceGradientShape)
    .Doc(kReduceGradientDoc);

REGISTER_OP("MonolithFusedReduceSumAndSplit")
    .Input("id_indices: int64")
    .Input("id_values: float")
    .Input("id_dense_shape: int64")
    .Output("reduced: M * float")
    .Attr("M: int >= 1")
    .Attr("split_dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> split_dims;
      TF_RETURN_IF_ERROR(c->GetAttr("split_dims", &split_dims));
      TF_RETURN_IF_ERROR(CheckSplitDims(split_dims, c->num_outputs()));
      DimensionHandle batch;
      TF_RETURN_IF_ERROR(BatchDim(c, 2, &batch));
      for (int m = 0; m < c->num_outputs(); ++m) {
        SetOutputShape(c, m, c->Matrix(batch, split_dims[m]));
      }
      return OkStatus();
    })
    .Doc(R"doc(
MonolithReduceSum, its columns split by `split_dims`.
)doc");

REGISTER_OP("MonolithFusedReduceSumAndSplitGradient")
    .Input("id_indices: int64")
    .Input("grads: M * float")
    .Output("output_grad: float")
    .Attr("M: int >= 1")
    .Attr("split_dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> split_dims;
      TF_RETURN_IF_ERROR(c->GetAttr("split_dims", &split_dims));
      TF_RETURN_IF_ERROR(CheckSplitDims(split_dims, c->num_inputs() - 1));
      SetOutputShape(c, 0, c->Matrix(DimOrUnknown(c, c->input(0), 0), Sum(split_dims)));
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithFusedReduceSumAndSplit with respect to `id_values`.
)doc");

template <Reduction kReduction>
class ReduceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    ReduceInputs in;
    OP_REQUIRES_OK(ctx, in.Read(ctx));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {in.rows, in.dim}, &out));
    OP_REQUIRES_OK(ctx, in.ReduceTo<kReduction>(ctx, {{out->flat<float>().data(), 0, in.dim}}));
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithReduceSum").Device(DEVICE_CPU), ReduceOp<Reduction::kSum>);
REGISTER_GUARDED_KERNEL(Name("MonolithReduceMean").Device(DEVICE_CPU), ReduceOp<Reduction::kMean>);
REGISTER_GUARDED_KERNEL(Name("MonolithReduceSquareNorm").Device(DEVICE_CPU),
                        ReduceOp<Reduction::kSquareNorm>);

template <bool kMean>
class ReduceGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& id_indices = ctx->input(0);
    const Tensor& grads = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckIndices(id_indices));
    OP_REQUIRES_OK(ctx, CheckMatrix("grads", grads));
    const int64_t rows = grads.dim_size(0), dim = grads.dim_size(1);
    const int64_t k = id_indices.dim_size(0);
    const DeviceRunner parallel(ctx);
    OP_REQUIRES_OK(ctx, CheckRange(parallel, id_indices, rows));
    const int64_t* segments = id_indices.flat<int64_t>().data();
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({k, dim}, &shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    std::vector<int64_t> counts;
    // Without columns nothing takes memory but counts, and rows may be as many as an int64 holds.
    if (kMean && dim > 0) counts = CountSegments(segments, k, rows);
    // The sink is only read from.
    const ColumnSink source{const_cast<float*>(grads.flat<float>().data()), 0, dim};
    BroadcastSegments(parallel, segments, k, {source}, counts.empty() ? nullptr : counts.data(),
                      dim, out->flat<float>().data());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithReduceSumGradient").Device(DEVICE_CPU),
                        ReduceGradientOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithReduceMeanGradient").Device(DEVICE_CPU),
                        ReduceGradientOp<true>);

class ReduceSquareNormGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& id_indices = ctx->input(0);
    const Tensor& id_values = ctx->input(1);
    const Tensor& grads = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckIndices(id_indices));
    OP_REQUIRES_OK(ctx, CheckMatrix("id_values", id_values));
    OP_REQUIRES_OK(ctx, CheckMatrix("grads", grads));
    const int64_t rows = grads.dim_size(0), dim = grads.dim_size(1);
    const int64_t k = id_indices.dim_size(0);
    OP_REQUIRES_OK(ctx, CheckEqual("number of rows of id_values", id_values.dim_size(0),
                                   "number of rows of id_indices", k));
    OP_REQUIRES_OK(ctx,
                   CheckEqual("width of id_values", id_values.dim_size(1), "width of grads", dim));
    const int64_t* segments = id_indices.flat<int64_t>().data();
    const float* values = id_values.flat<float>().data();

    const DeviceRunner parallel(ctx);
    Tensor norms;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(DT_FLOAT, grads.shape(), &norms));
    OP_REQUIRES_OK(ctx, RangeStatus(ReduceSegments<Reduction::kSquareNorm>(
                                        parallel, segments, k, rows, values, dim,
                                        {{norms.flat<float>().data(), 0, dim}}),
                                    id_indices, rows));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, id_values.shape(), &out));
    SquareNormGradient(parallel, segments, k, values, norms.flat<float>().data(),
                       grads.flat<float>().data(), dim, out->flat<float>().data());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithReduceSquareNormGradient").Device(DEVICE_CPU),
                        ReduceSquareNormGradientOp);

class FusedReduceSumAndSplitOp : public OpKernel {
 public:
  explicit FusedReduceSumAndSplitOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("split_dims", &split_dims_));
    OP_REQUIRES_OK(ctx, CheckSplitDims(split_dims_, ctx->num_outputs()));
  }

  void Compute(OpKernelContext* ctx) override {
    ReduceInputs in;
    OP_REQUIRES_OK(ctx, in.Read(ctx));
    OP_REQUIRES_OK(ctx,
                   CheckEqual("width of id_values", in.dim, "sum of split_dims", Sum(split_dims_)));
    if (split_dims_.size() == 1 && IsIdentity(in.segments, in.k, in.rows)) {
      ctx->set_output(0, ctx->input(1));
      return;
    }
    std::vector<ColumnSink> sinks;
    int64_t column = 0;
    for (size_t m = 0; m < split_dims_.size(); ++m) {
      TensorShape shape;
      OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({in.rows, split_dims_[m]}, &shape));
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, m, shape, &out));
      sinks.push_back({out->flat<float>().data(), column, split_dims_[m]});
      column += split_dims_[m];
    }
    OP_REQUIRES_OK(ctx, in.ReduceTo<Reduction::kSum>(ctx, sinks));
  }

 private:
  std::vector<int64_t> split_dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedReduceSumAndSplit").Device(DEVICE_CPU),
                        FusedReduceSumAndSplitOp);

class FusedReduceSumAndSplitGradientOp : public OpKernel {
 public:
  explicit FusedReduceSumAndSplitGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("split_dims", &split_dims_));
    OP_REQUIRES_OK(ctx, CheckSplitDims(split_dims_, ctx->num_inputs() - 1));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& id_indices = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckIndices(id_indices));
    std::vector<ColumnSink> sources;
    int64_t column = 0;
    for (size_t m = 0; m < split_dims_.size(); ++m) {
      const Tensor& grad = ctx->input(1 + m);
      OP_REQUIRES(ctx,
                  grad.dims() == 2 && grad.dim_size(0) == ctx->input(1).dim_size(0) &&
                      grad.dim_size(1) == split_dims_[m],
                  errors::InvalidArgument("grads[", m, "] has shape ", grad.shape().DebugString(),
                                          ", want the rows of grads[0], which has shape ",
                                          ctx->input(1).shape().DebugString(), ", and width ",
                                          split_dims_[m]));
      sources.push_back({const_cast<float*>(grad.flat<float>().data()), column, split_dims_[m]});
      column += split_dims_[m];
    }
    const int64_t k = id_indices.dim_size(0);
    if (split_dims_.size() == 1 &&
        IsIdentity(id_indices.flat<int64_t>().data(), k, ctx->input(1).dim_size(0))) {
      ctx->set_output(0, ctx->input(1));
      return;
    }
    const DeviceRunner parallel(ctx);
    OP_REQUIRES_OK(ctx, CheckRange(parallel, id_indices, ctx->input(1).dim_size(0)));
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({k, column}, &shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    BroadcastSegments(parallel, id_indices.flat<int64_t>().data(), k, sources, nullptr, column,
                      out->flat<float>().data());
  }

 private:
  std::vector<int64_t> split_dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedReduceSumAndSplitGradient").Device(DEVICE_CPU),
                        FusedReduceSumAndSplitGradientOp);

}  // namespace monolith_tf
}  // namespace tensorflow
