// Splitting a batch by server, and bringing the parts back together in the order of the batch.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "monolith/native_training/runtime/distribution/partition_plan.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::PartitionPlan;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// [?] + shape[1:]
Status AnyRows(InferenceContext* c, ShapeHandle shape, ShapeHandle* out) {
  if (!c->RankKnown(shape)) {
    *out = c->UnknownShape();
    return OkStatus();
  }
  ShapeHandle at_least_one;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &at_least_one));
  return c->ReplaceDim(at_least_one, 0, c->UnknownDim(), out);
}

Status BadIndex(const char* name, int64_t position, int64_t value, int64_t num_splits) {
  return errors::InvalidArgument(name, "[", position, "] is ", value, ", want a value in [0, ",
                                 num_splits, ")");
}

}  // namespace

REGISTER_OP("MonolithSplitByIndices")
    .Input("indices: int64")
    .Input("input: T")
    .Output("splitted: num_splits * T")
    .Attr("num_splits: int >= 1")
    .Attr("T: type")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle part;
      TF_RETURN_IF_ERROR(AnyRows(c, c->input(1), &part));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, part);
      return OkStatus();
    })
    .Doc(R"doc(
Output s holds the rows i of `input` with `indices[i] == s`, in input order.

indices: [n], each in [0, num_splits).
input: [n, ...].
)doc");

REGISTER_OP("MonolithSplitByIndicesGradient")
    .Input("indices: int64")
    .Input("input: float")
    .Input("grads: num_splits * float")
    .Output("input_grads: float")
    .Attr("num_splits: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      if (!c->RankKnown(c->input(0)) || !c->RankKnown(c->input(1))) {
        c->set_output(0, c->UnknownShape());
        return OkStatus();
      }
      ShapeHandle indices, input, out;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &indices));
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &input));
      TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->Dim(indices, 0), &out));
      c->set_output(0, out);
      return OkStatus();
    })
    .Doc(R"doc(
Inverse of MonolithSplitByIndices: row i is the next unused row of `grads[indices[i]]`.

input: the split tensor; only its shape is used.
)doc");

REGISTER_OP("MonolithRaggedSplitByIndices")
    .Input("indices: int64")
    .Input("num: int64")
    .Input("num_split: int64")
    .Output("splitted_nums: num_splits * int64")
    .Output("splitted_num_splits: num_splits * int64")
    .Output("splitted_pos: num_splits * int64")
    .Attr("num_splits: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_splits;
      TF_RETURN_IF_ERROR(c->GetAttr("num_splits", &num_splits));
      for (int64_t i = 0; i < num_splits; ++i) {
        c->set_output(i, c->Vector(c->UnknownDim()));
        c->set_output(num_splits + i, c->input(2));
        c->set_output(2 * num_splits + i, c->Vector(c->UnknownDim()));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Splits the values of a ragged tensor; every part keeps the number of rows.

indices: [n], each in [0, num_splits).
num: [n], the ragged values.
num_split: row splits of `num`.
splitted_pos: index in `num` of every value of `splitted_nums`.
)doc");

REGISTER_OP("MonolithNormalizeMergedSplit")
    .Input("row_split: int64")
    .Input("row_split_size: int32")
    .Output("normed_row_split: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc(R"doc(
Row splits of several requests, glued together, as one vector of row splits.

row_split: R row-split vectors, one after the other.
row_split_size: [R], their lengths.
normed_row_split: length `len(row_split) + 1 - R`.
)doc");

template <typename T>
class SplitByIndicesOp : public OpKernel {
 public:
  explicit SplitByIndicesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_splits", &num_splits_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& indices = ctx->input(0);
    const Tensor& input = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckVector("indices", indices));
    OP_REQUIRES(ctx, input.dims() >= 1,
                errors::InvalidArgument("input is a scalar, want at least a vector"));
    const int64_t n = indices.dim_size(0);
    OP_REQUIRES_OK(
        ctx, CheckEqual("number of rows of input", input.dim_size(0), "length of indices", n));
    const int64_t* index = indices.vec<int64_t>().data();
    DeviceRunner parallel(ctx);
    PartitionPlan<int64_t> plan;
    plan.Build(parallel, index, n, num_splits_);
    OP_REQUIRES(
        ctx, plan.bad() < 0,
        BadIndex("indices", plan.bad(), index[std::max<int64_t>(0, plan.bad())], num_splits_));

    std::vector<T*> parts(num_splits_);
    for (int s = 0; s < num_splits_; ++s) {
      TensorShape shape = input.shape();
      shape.set_dim(0, plan.counts()[s]);
      Tensor* part;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, s, shape, &part));
      parts[s] = part->flat<T>().data();
    }
    if (input.NumElements() == 0) return;
    plan.Split(parallel, input.flat<T>().data(), input.NumElements() / n, parts);
  }

 private:
  int num_splits_;
};

#define REGISTER_SPLIT(T)                                                       \
  REGISTER_GUARDED_KERNEL(                                                      \
      Name("MonolithSplitByIndices").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
      SplitByIndicesOp<T>)
REGISTER_SPLIT(float);
REGISTER_SPLIT(int64_t);
REGISTER_SPLIT(int32_t);
REGISTER_SPLIT(bool);
#undef REGISTER_SPLIT

class SplitByIndicesGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& indices = ctx->input(0);
    const Tensor& input = ctx->input(1);
    const int num_splits = ctx->num_inputs() - 2;
    OP_REQUIRES_OK(ctx, CheckVector("indices", indices));
    OP_REQUIRES(ctx, input.dims() >= 1,
                errors::InvalidArgument("input is a scalar, want at least a vector"));
    const int64_t n = indices.dim_size(0);
    const int64_t* index = indices.vec<int64_t>().data();
    DeviceRunner parallel(ctx);
    PartitionPlan<int64_t> plan;
    plan.Build(parallel, index, n, num_splits);
    OP_REQUIRES(
        ctx, plan.bad() < 0,
        BadIndex("indices", plan.bad(), index[std::max<int64_t>(0, plan.bad())], num_splits));

    TensorShape shape = input.shape();
    std::vector<const float*> parts(num_splits);
    for (int s = 0; s < num_splits; ++s) {
      const Tensor& grad = ctx->input(2 + s);
      OP_REQUIRES_OK(ctx, shape.SetDimWithStatus(0, plan.counts()[s]));
      OP_REQUIRES(ctx, grad.shape() == shape,
                  errors::InvalidArgument("grads[", s, "] has shape ", grad.shape().DebugString(),
                                          ", want ", shape.DebugString()));
      parts[s] = grad.flat<float>().data();
    }
    OP_REQUIRES_OK(ctx, shape.SetDimWithStatus(0, n));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    if (out->NumElements() == 0) return;
    plan.Merge(parallel, parts, out->NumElements() / n, out->flat<float>().data());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithSplitByIndicesGradient").Device(DEVICE_CPU),
                        SplitByIndicesGradientOp);

class RaggedSplitByIndicesOp : public OpKernel {
 public:
  explicit RaggedSplitByIndicesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_splits", &num_splits_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& indices = ctx->input(0);
    const Tensor& num = ctx->input(1);
    const Tensor& num_split = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckVector("indices", indices));
    OP_REQUIRES_OK(ctx, CheckVector("num", num));
    OP_REQUIRES_OK(ctx, CheckVector("num_split", num_split));
    const int64_t n = indices.dim_size(0);
    OP_REQUIRES(ctx, num.dim_size(0) == n,
                errors::InvalidArgument("Ragged tensor values size must match indices size. Got ",
                                        num.dim_size(0), " v.s. ", n));
    const auto splits = num_split.vec<int64_t>();
    const Status valid = CheckRowSplits("num_split", splits, n);
    OP_REQUIRES(ctx, valid.ok(),
                errors::InvalidArgument("The input ragged tensor is invalid. ", valid.message()));

    const int64_t* index = indices.vec<int64_t>().data();
    DeviceRunner parallel(ctx);
    PartitionPlan<int64_t> plan;
    plan.Build(parallel, index, n, num_splits_);
    OP_REQUIRES(
        ctx, plan.bad() < 0,
        BadIndex("indices", plan.bad(), index[std::max<int64_t>(0, plan.bad())], num_splits_));
    std::vector<int64_t*> values(num_splits_), part_splits(num_splits_), positions(num_splits_);
    for (int s = 0; s < num_splits_; ++s) {
      const TensorShape size({plan.counts()[s]});
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(s, size, &out));
      values[s] = out->vec<int64_t>().data();
      OP_REQUIRES_OK(ctx, ctx->allocate_output(num_splits_ + s, num_split.shape(), &out));
      part_splits[s] = out->vec<int64_t>().data();
      OP_REQUIRES_OK(ctx, ctx->allocate_output(2 * num_splits_ + s, size, &out));
      positions[s] = out->vec<int64_t>().data();
    }
    const int64_t* from = num.vec<int64_t>().data();
    plan.ForEach(parallel, [&](int64_t i, int64_t s, int64_t position) {
      values[s][position] = from[i];
      positions[s][position] = i;
    });
    std::vector<int64_t> counts(num_splits_, 0);
    for (int64_t row = 0, i = 0; row < splits.size(); ++row) {
      for (; i < splits(row); ++i) ++counts[index[i]];
      for (int s = 0; s < num_splits_; ++s) part_splits[s][row] = counts[s];
    }
  }

 private:
  int num_splits_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithRaggedSplitByIndices").Device(DEVICE_CPU),
                        RaggedSplitByIndicesOp);

class NormalizeMergedSplitOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& row_split = ctx->input(0);
    const Tensor& row_split_size = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckVector("row_split", row_split));
    OP_REQUIRES_OK(ctx, CheckVector("row_split_size", row_split_size));
    const auto splits = row_split.vec<int64_t>();
    const auto sizes = row_split_size.vec<int32_t>();
    int64_t total = 0;
    for (int64_t r = 0; r < sizes.size(); ++r) {
      OP_REQUIRES(
          ctx, sizes(r) >= 1,
          errors::InvalidArgument("row_split_size[", r, "] is ", sizes(r), ", want at least 1"));
      OP_REQUIRES(ctx, sizes(r) <= splits.size() - total,
                  errors::InvalidArgument("row_split_size[", r, "] is ", sizes(r), ", but only ",
                                          splits.size() - total, " of the ", splits.size(),
                                          " entries of row_split are left"));
      OP_REQUIRES_OK(ctx, CheckRowSplits("row_split", splits.data() + total, sizes(r), -1));
      total += sizes(r);
    }
    OP_REQUIRES_OK(
        ctx, CheckEqual("length of row_split", splits.size(), "sum of row_split_size", total));

    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {total + 1 - sizes.size()}, &out));
    int64_t* to = out->vec<int64_t>().data();
    *to = 0;
    const int64_t* part = splits.data();
    for (int64_t r = 0; r < sizes.size(); part += sizes(r), ++r) {
      const int64_t base = *to;
      OP_REQUIRES(ctx, part[sizes(r) - 1] <= std::numeric_limits<int64_t>::max() - base,
                  errors::InvalidArgument("the row splits add up to ", base, " + ",
                                          part[sizes(r) - 1], ", more than an int64 holds"));
      for (int64_t i = 1; i < sizes(r); ++i) *++to = base + part[i];
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithNormalizeMergedSplit").Device(DEVICE_CPU),
                        NormalizeMergedSplitOp);

}  // namespace monolith_tf
}  // namespace tensorflow
