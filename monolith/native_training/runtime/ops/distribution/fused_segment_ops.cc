// Reductions of many tables in one op, and their CPU kernels; ops/gpu/ has those for GPUs.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/distribution/segment_reduce.h"
#include "monolith/native_training/runtime/ops/distribution/fused_segment_checks.h"
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

using ::monolith::distribution::CheckSegments;
using ::monolith::distribution::ColumnSink;
using ::monolith::distribution::ReduceSegments;
using ::monolith::distribution::Reduction;
using ::monolith::distribution::SegmentCheck;
using ::monolith::distribution::SumSplits;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// An input that is a shape has no more sizes than a tensor can have.
Status CheckShapeLength(InferenceContext* c, int input) {
  const ShapeHandle shape = c->input(input);
  if (!c->RankKnown(shape) || c->Rank(shape) != 1 || !c->ValueKnown(c->Dim(shape, 0))) {
    return OkStatus();
  }
  return CheckCount("length of shape", c->Value(c->Dim(shape, 0)), 0, TensorShape::MaxDimensions());
}

}  // namespace

REGISTER_OP("MonolithFusedSegmentSum")
    .Input("indices: N * Tindices")
    .Input("updates: N * T")
    .Input("shape: N * Tindices")
    .Output("outputs: N * T")
    .Attr("T: {float}")
    .Attr("Tindices: {int32, int64}")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_outputs();
      for (int i = 0; i < n; ++i) {
        ShapeHandle out;
        TF_RETURN_IF_ERROR(CheckShapeLength(c, 2 * n + i));
        TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(2 * n + i, &out));
        SetOutputShape(c, i, out);
      }
      return OkStatus();
    })
    .Doc(R"doc(
N independent segment sums: row r of outputs[i] is the sum of the rows of updates[i] with indices[i] == r.

indices: vectors, sorted for speed.
updates: [len(indices[i]), ...].
shape: of the output; its first dimension may exceed the largest index.
)doc");

Status ReducedShapes(InferenceContext* c, int num_tables) {
  std::vector<int64_t> slice_dims, row_split_splits;
  TF_RETURN_IF_ERROR(c->GetAttr("slice_dims", &slice_dims));
  TF_RETURN_IF_ERROR(c->GetAttr("row_split_splits", &row_split_splits));
  TF_RETURN_IF_ERROR(CheckSliceDims(slice_dims, c->num_outputs()));
  int64_t batch = 0;
  TF_RETURN_IF_ERROR(CheckStarts(row_split_splits, num_tables, &batch));
  for (int i = 0; i < c->num_outputs(); ++i) {
    SetOutputShape(c, i, c->Matrix(batch, slice_dims[i]));
  }
  return OkStatus();
}

REGISTER_OP("MonolithFusedReduceAndSplitGPU")
    .Input("splits: int32")
    .Input("updates: N * T")
    .Output("outputs: num_slices * T")
    .Attr("num_slices: int >= 1")
    .Attr("slice_dims: list(int)")
    .Attr("row_split_splits: list(int)")
    .Attr("T: {float}")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) { return ReducedShapes(c, c->num_inputs() - 1); })
    .Doc(R"doc(
Sums the rows of each table between its row splits and cuts the columns into slices.

splits: row splits of all tables, one after the other.
updates: [splits[-1] of the table, width] per table.
slice_dims: widths of the slices of all tables, one after the other.
row_split_splits: where the row splits of each table start, and the end.
)doc");

REGISTER_OP("MonolithFusedReduceAndSplitGPUGrad")
    .Input("splits: int32")
    .Input("updates: M * T")
    .Input("slices: N * T")
    .Output("outputs: M * T")
    .Attr("slice_dims: list(int)")
    .Attr("row_split_splits: list(int)")
    .Attr("T: {float}")
    .Attr("N: int >= 1")
    .Attr("M: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(1 + i));
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithFusedReduceAndSplitGPU: each row receives the gradient of its segment.

updates: the forward op's; only their shapes are used.
slices: gradients of the forward op's outputs.
)doc");

REGISTER_OP("MonolithPoolPackedIds")
    .Input("splits: int32")
    .Input("updates: N * float")
    .Input("has_one_each: bool")
    .Output("outputs: num_slices * float")
    .Attr("num_slices: int >= 1")
    .Attr("slice_dims: list(int)")
    .Attr("row_split_splits: list(int)")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 1, &unused));
      return ReducedShapes(c, c->num_inputs() - 2);
    })
    .Doc(R"doc(
MonolithFusedReduceAndSplitGPU for row splits that MonolithHasOneEach has checked on the host, so that
a GPU does not report what it finds in them, and no step waits for that.

has_one_each: [N], what MonolithHasOneEach returned. A table of one slice gives its rows as they are.
)doc");

REGISTER_OP("MonolithPoolPackedIdsGrad")
    .Input("splits: int32")
    .Input("updates: M * float")
    .Input("slices: N * float")
    .Input("has_one_each: bool")
    .Output("outputs: M * float")
    .Attr("slice_dims: list(int)")
    .Attr("row_split_splits: list(int)")
    .Attr("N: int >= 1")
    .Attr("M: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(1 + i));
      return OkStatus();
    })
    .Doc("Gradient of MonolithPoolPackedIds, as MonolithFusedReduceAndSplitGPUGrad.");

REGISTER_OP("MonolithSumRaggedRows")
    .Input("splits: N * int64")
    .Input("values: N * float")
    .Output("sums: N * float")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_outputs();
      for (int i = 0; i < n; ++i) {
        ShapeHandle splits, values;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &splits));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 2, &values));
        shape_inference::DimensionHandle rows;
        TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
        SetOutputShape(c, i, c->Matrix(rows, c->Dim(values, 1)));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Sums the rows of N matrices between row splits, as ScatterNd with the row of each value does, bit by bit.

splits: [rows + 1], from 0 to the number of values, never decreasing.
values: [splits[i][-1], width].
sums: [rows, width].
)doc");

template <typename Index>
class FusedSegmentSumOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList indices, updates, shapes;
    OP_REQUIRES_OK(ctx, ctx->input_list("indices", &indices));
    OP_REQUIRES_OK(ctx, ctx->input_list("updates", &updates));
    OP_REQUIRES_OK(ctx, ctx->input_list("shape", &shapes));
    const int n = indices.size();
    std::vector<TensorShape> out_shapes(n);
    const DeviceRunner parallel(ctx);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx,
                     CheckSegmentSum<Index>(i, indices[i], updates[i], shapes[i], &out_shapes[i]));
    }
    for (int i = 0; i < n; ++i) {
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, i, out_shapes[i], &out));
      const auto segments = indices[i].template flat<Index>();
      const int64_t rows = out->dim_size(0);
      SegmentCheck check;
      if (out->NumElements() > 0) {
        const int64_t dim = out->NumElements() / rows;
        check = ReduceSegments<Reduction::kSum>(parallel, segments.data(), segments.size(), rows,
                                                updates[i].flat<float>().data(), dim,
                                                {{out->flat<float>().data(), 0, dim}});
      } else {
        check = CheckSegments(parallel, segments.data(), segments.size(), rows);
      }
      OP_REQUIRES(
          ctx, check.bad < 0,
          errors::InvalidArgument("indices[", i, "][", check.bad, "] is ", segments(check.bad),
                                  ", want a value in [0, ", rows, ")"));
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedSegmentSum")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<float>("T")
                            .TypeConstraint<int32_t>("Tindices"),
                        FusedSegmentSumOp<int32_t>);
REGISTER_GUARDED_KERNEL(Name("MonolithFusedSegmentSum")
                            .Device(DEVICE_CPU)
                            .TypeConstraint<float>("T")
                            .TypeConstraint<int64_t>("Tindices"),
                        FusedSegmentSumOp<int64_t>);

class SumRaggedRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList splits, values;
    OP_REQUIRES_OK(ctx, ctx->input_list("splits", &splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &values));
    const DeviceRunner parallel(ctx);
    for (int i = 0; i < splits.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckVector("splits", splits[i]));
      OP_REQUIRES_OK(ctx, CheckMatrix("values", values[i]));
      const auto row_splits = splits[i].vec<int64_t>();
      OP_REQUIRES_OK(ctx, CheckRowSplits("splits", row_splits, values[i].dim_size(0)));
      const int64_t rows = row_splits.size() - 1, width = values[i].dim_size(1);
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, i, {rows, width}, &out));
      if (out->NumElements() == 0) continue;
      float* sums = out->flat<float>().data();
      SumSplits(parallel, row_splits.data(), rows, values[i].flat<float>().data(), width,
                {{sums, 0, width}});
      // A sum that begins with 0, as that of ScatterNd does, never is -0.
      for (int64_t j = 0; j < rows * width; ++j) sums[j] += 0.0f;
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithSumRaggedRows").Device(DEVICE_CPU), SumRaggedRowsOp);

class FusedReduceAndSplitOp : public OpKernel {
 public:
  explicit FusedReduceAndSplitOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slice_dims", &slice_dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_split_splits", &row_split_splits_));
    int num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &num_tables));
    OP_REQUIRES_OK(ctx, CheckSliceDims(slice_dims_, ctx->num_outputs()));
    OP_REQUIRES_OK(ctx, CheckStarts(row_split_splits_, num_tables, &batch_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList updates;
    OP_REQUIRES_OK(ctx, ctx->input_list("updates", &updates));
    std::vector<SplitTable> tables;
    OP_REQUIRES_OK(ctx,
                   ReadTables(ctx->input(0), row_split_splits_, slice_dims_, updates, &tables));
    OP_REQUIRES_OK(
        ctx, CheckTableSplits(ctx->input(0).vec<int32_t>().data(), row_split_splits_, updates));
    const DeviceRunner parallel(ctx);
    for (int i = 0; i < updates.size(); ++i) {
      std::vector<ColumnSink> sinks;
      int64_t column = 0;
      for (int64_t s = tables[i].first_slice; s < tables[i].first_slice + tables[i].num_slices;
           ++s) {
        TensorShape shape;
        OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({batch_, slice_dims_[s]}, &shape));
        Tensor* out;
        OP_REQUIRES_OK(ctx, AllocateOutput(ctx, s, shape, &out));
        sinks.push_back({out->flat<float>().data(), column, slice_dims_[s]});
        column += slice_dims_[s];
      }
      SumSplits(parallel, tables[i].splits, batch_, updates[i].flat<float>().data(), column, sinks);
    }
  }

 private:
  std::vector<int64_t> slice_dims_;
  std::vector<int64_t> row_split_splits_;
  int64_t batch_;
};

REGISTER_GUARDED_KERNEL(
    Name("MonolithFusedReduceAndSplitGPU").Device(DEVICE_CPU).TypeConstraint<float>("T"),
    FusedReduceAndSplitOp);
REGISTER_GUARDED_KERNEL(Name("MonolithPoolPackedIds").Device(DEVICE_CPU), FusedReduceAndSplitOp);

class FusedReduceAndSplitGradOp : public OpKernel {
 public:
  explicit FusedReduceAndSplitGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slice_dims", &slice_dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_split_splits", &row_split_splits_));
    int num_slices, num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &num_slices));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &num_tables));
    OP_REQUIRES_OK(ctx, CheckSliceDims(slice_dims_, num_slices));
    OP_REQUIRES_OK(ctx, CheckStarts(row_split_splits_, num_tables, &batch_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList updates, slices;
    OP_REQUIRES_OK(ctx, ctx->input_list("updates", &updates));
    OP_REQUIRES_OK(ctx, ctx->input_list("slices", &slices));
    std::vector<SplitTable> tables;
    OP_REQUIRES_OK(ctx,
                   ReadTables(ctx->input(0), row_split_splits_, slice_dims_, updates, &tables));
    OP_REQUIRES_OK(
        ctx, CheckTableSplits(ctx->input(0).vec<int32_t>().data(), row_split_splits_, updates));
    for (int s = 0; s < slices.size(); ++s) {
      OP_REQUIRES(
          ctx,
          slices[s].dims() == 2 && slices[s].dim_size(0) == batch_ &&
              slices[s].dim_size(1) == slice_dims_[s],
          errors::InvalidArgument("slices[", s, "] has shape ", slices[s].shape().DebugString(),
                                  ", want [", batch_, ",", slice_dims_[s], "]"));
    }
    std::vector<const float*> grads;
    for (const Tensor& slice : slices) grads.push_back(slice.flat<float>().data());
    const DeviceRunner parallel(ctx);
    for (int i = 0; i < updates.size(); ++i) {
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, updates[i].shape(), &out));
      const int64_t width = updates[i].dim_size(1);
      const SplitTable& table = tables[i];
      float* to = out->flat<float>().data();
      const int64_t rows_per_example = updates[i].dim_size(0) / std::max<int64_t>(1, batch_) + 1;
      parallel.For(batch_, rows_per_example * (width + 8), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          for (int64_t row = table.splits[b]; row < table.splits[b + 1]; ++row) {
            float* slice = to + row * width;
            for (int64_t s = table.first_slice; s < table.first_slice + table.num_slices; ++s) {
              slice = std::copy_n(grads[s] + b * slice_dims_[s], slice_dims_[s], slice);
            }
          }
        }
      });
    }
  }

 private:
  std::vector<int64_t> slice_dims_;
  std::vector<int64_t> row_split_splits_;
  int64_t batch_;
};

REGISTER_GUARDED_KERNEL(
    Name("MonolithFusedReduceAndSplitGPUGrad").Device(DEVICE_CPU).TypeConstraint<float>("T"),
    FusedReduceAndSplitGradOp);
REGISTER_GUARDED_KERNEL(Name("MonolithPoolPackedIdsGrad").Device(DEVICE_CPU),
                        FusedReduceAndSplitGradOp);

}  // namespace monolith_tf
}  // namespace tensorflow
