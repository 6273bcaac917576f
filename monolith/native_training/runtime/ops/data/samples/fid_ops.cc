// Small ops on ids: SwitchSlot, FeatureCombine, ExtractFid, MapId, MonolithGenFidMask.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/fid_hash.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::MakeFidV1;
using ::monolith::engine::MakeFidV2;
using shape_inference::InferenceContext;

REGISTER_OP("SwitchSlot")
    .Input("rt_nested_splits: RAGGED_RANK * int64")
    .Input("rt_dense_values: int64")
    .Output("nested_splits_out: RAGGED_RANK * int64")
    .Output("dense_values_out: int64")
    .Attr("RAGGED_RANK: int >= 1")
    .Attr("slot: int >= 1")
    .Attr("fid_version: int = 2")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    })
    .Doc("Replaces the slot of every id.");

REGISTER_OP("FeatureCombine")
    .Input("rt_nested_splits_src1: RAGGED_RANK * int64")
    .Input("rt_dense_values_src1: int64")
    .Input("rt_nested_splits_src2: RAGGED_RANK * int64")
    .Input("rt_dense_values_src2: int64")
    .Output("nested_splits_out: RAGGED_RANK * int64")
    .Output("dense_values_out: int64")
    .Attr("RAGGED_RANK: int >= 1")
    .Attr("slot: int >= 1")
    .Attr("fid_version: int = 2")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i + 1 < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      c->set_output(c->num_outputs() - 1, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc("Crosses the ids of each row, those of the first feature outer.");

REGISTER_OP("ExtractFid")
    .Input("input: int64")
    .Output("output: int64")
    .Attr("slot: int")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("Hashes numbers to v2 ids of a slot.");

REGISTER_OP("MapId")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: {int32, int64}")
    .Attr("from_value: list(int)")
    .Attr("to_value: list(int)")
    .Attr("default_value: int = -1")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("Maps from_value[i] to to_value[i], everything else to default_value.");

REGISTER_OP("MonolithGenFidMask")
    .Input("splits: T")
    .Input("values: int64")
    .Output("mask: float")
    .Attr("T: {int32, int64} = DT_INT64")
    .Attr("fid: int")
    .SetShapeFn([](InferenceContext* c) {
      shape_inference::ShapeHandle splits;
      shape_inference::DimensionHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &splits));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
      c->set_output(0, c->Vector(rows));
      return OkStatus();
    })
    .Doc("1 for every row that has the id, else 0.");

Status GetSlotAttrs(OpKernelConstruction* ctx, int64_t* slot, int64_t* version) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("slot", slot));
  TF_RETURN_IF_ERROR(ctx->GetAttr("fid_version", version));
  if (*version != 1 && *version != 2) {
    return errors::InvalidArgument("fid_version is ", *version, ", want 1 or 2");
  }
  const int64_t limit =
      *version == 1 ? ::monolith::engine::kMaxSlotsV1 : ::monolith::engine::kMaxSlotsV2;
  if (*slot < limit) return OkStatus();
  return errors::InvalidArgument("slot is ", *slot, ", want less than ", limit);
}

int64_t WithSlot(int64_t version, int64_t slot, uint64_t bits) {
  return static_cast<int64_t>(version == 1 ? MakeFidV1(slot, bits) : MakeFidV2(slot, bits));
}

class SwitchSlotOp : public OpKernel {
 public:
  explicit SwitchSlotOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetSlotAttrs(ctx, &slot_, &version_));
  }

  void Compute(OpKernelContext* ctx) override {
    const int last = ctx->num_inputs() - 1;
    for (int i = 0; i < last; ++i) ctx->set_output(i, ctx->input(i));
    const auto values = ctx->input(last).flat<int64_t>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(last, ctx->input(last).shape(), &output));
    auto out = output->flat<int64_t>();
    for (int64_t i = 0; i < values.size(); ++i) {
      out(i) = WithSlot(version_, slot_, static_cast<uint64_t>(values(i)));
    }
  }

 private:
  int64_t slot_;
  int64_t version_;
};

class FeatureCombineOp : public OpKernel {
 public:
  explicit FeatureCombineOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t ragged_rank;
    OP_REQUIRES_OK(ctx, GetSlotAttrs(ctx, &slot_, &version_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("RAGGED_RANK", &ragged_rank));
    OP_REQUIRES(ctx, ragged_rank == 1,
                errors::InvalidArgument("RAGGED_RANK is ", ragged_rank, ", want 1"));
  }

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < 4; ++i) OP_REQUIRES_OK(ctx, CheckVector("input", ctx->input(i)));
    const auto splits1 = ctx->input(0).vec<int64_t>();
    const auto values1 = ctx->input(1).vec<int64_t>();
    const auto splits2 = ctx->input(2).vec<int64_t>();
    const auto values2 = ctx->input(3).vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits of src1", splits1, values1.size()));
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits of src2", splits2, values2.size()));
    OP_REQUIRES_OK(ctx, CheckEqual("size of the splits of src1", splits1.size(), "that of src2",
                                   splits2.size()));
    const int64_t rows = splits1.size() - 1;
    Tensor* splits_tensor;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &splits_tensor));
    auto splits = splits_tensor->vec<int64_t>();
    splits(0) = 0;
    for (int64_t row = 0; row < rows; ++row) {
      splits(row + 1) =
          splits(row) + (splits1(row + 1) - splits1(row)) * (splits2(row + 1) - splits2(row));
    }
    Tensor* values_tensor;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {splits(rows)}, &values_tensor));
    int64_t* out = values_tensor->flat<int64_t>().data();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = splits1(row); i < splits1(row + 1); ++i) {
        for (int64_t j = splits2(row); j < splits2(row + 1); ++j) {
          *out++ = WithSlot(version_, slot_, ::monolith::data::CombineFids(values1(i), values2(j)));
        }
      }
    }
  }

 private:
  int64_t slot_;
  int64_t version_;
};

class ExtractFidOp : public OpKernel {
 public:
  explicit ExtractFidOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot", &slot_));
    OP_REQUIRES(ctx, slot_ >= 0 && slot_ < ::monolith::engine::kMaxSlotsV2,
                errors::InvalidArgument("slot is ", slot_, ", want 0 to ",
                                        ::monolith::engine::kMaxSlotsV2 - 1));
  }

  void Compute(OpKernelContext* ctx) override {
    const auto input = ctx->input(0).flat<int64_t>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<int64_t>();
    for (int64_t i = 0; i < input.size(); ++i) {
      const uint64_t hash = ::monolith::data::HashNumber(static_cast<uint64_t>(input(i)));
      out(i) = static_cast<int64_t>(MakeFidV2(slot_, hash));
    }
  }

 private:
  int64_t slot_;
};

template <typename T>
class MapIdOp : public OpKernel {
 public:
  explicit MapIdOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> from, to;
    int64_t default_value;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("from_value", &from));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("to_value", &to));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("default_value", &default_value));
    OP_REQUIRES_OK(ctx, CheckEqual("length of to_value", static_cast<int64_t>(to.size()),
                                   "length of from_value", static_cast<int64_t>(from.size())));
    for (size_t i = 0; i < from.size(); ++i) {
      map_[static_cast<T>(from[i])] = static_cast<T>(to[i]);
    }
    default_ = static_cast<T>(default_value);
  }

  void Compute(OpKernelContext* ctx) override {
    const auto input = ctx->input(0).flat<T>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<T>();
    for (int64_t i = 0; i < input.size(); ++i) {
      const auto it = map_.find(input(i));
      out(i) = it == map_.end() ? default_ : it->second;
    }
  }

 private:
  absl::flat_hash_map<T, T> map_;
  T default_;
};

template <typename T>
class GenFidMaskOp : public OpKernel {
 public:
  explicit GenFidMaskOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fid", &fid_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckVector("splits", ctx->input(0)));
    OP_REQUIRES_OK(ctx, CheckVector("values", ctx->input(1)));
    const auto splits = ctx->input(0).vec<T>();
    const auto values = ctx->input(1).vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits", splits, values.size()));
    Tensor* output;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {splits.size() - 1}, &output));
    auto out = output->vec<float>();
    for (int64_t row = 0; row + 1 < splits.size(); ++row) {
      const int64_t* end = values.data() + splits(row + 1);
      out(row) = std::find(values.data() + splits(row), end, fid_) == end ? 0.0f : 1.0f;
    }
  }

 private:
  int64_t fid_;
};

REGISTER_GUARDED_KERNEL(Name("SwitchSlot").Device(DEVICE_CPU), SwitchSlotOp);
REGISTER_GUARDED_KERNEL(Name("FeatureCombine").Device(DEVICE_CPU), FeatureCombineOp);
REGISTER_GUARDED_KERNEL(Name("ExtractFid").Device(DEVICE_CPU), ExtractFidOp);
REGISTER_GUARDED_KERNEL(Name("MapId").Device(DEVICE_CPU).TypeConstraint<int32_t>("T"),
                        MapIdOp<int32_t>);
REGISTER_GUARDED_KERNEL(Name("MapId").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
                        MapIdOp<int64_t>);
REGISTER_GUARDED_KERNEL(Name("MonolithGenFidMask").Device(DEVICE_CPU).TypeConstraint<int32_t>("T"),
                        GenFidMaskOp<int32_t>);
REGISTER_GUARDED_KERNEL(Name("MonolithGenFidMask").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
                        GenFidMaskOp<int64_t>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
