// MonolithParseInstances and MonolithRawParseInstance: serialized Instances to tensors, with the
// features listed by type.
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/data/parse/instance_table.h"
#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::FeatureRows;
using shape_inference::InferenceContext;

// The features of both ops: sparse ones, then features and misc columns in the order of the
// outputs.
struct InstanceSpec {
  template <typename Context>
  Status BuildFromAttrs(Context* ctx) {
    std::vector<std::string> fidv2_features;
    TF_RETURN_IF_ERROR(ctx->GetAttr("fidv1_features", &wanted.fidv1_slots));
    TF_RETURN_IF_ERROR(ctx->GetAttr("fidv2_features", &fidv2_features));
    TF_RETURN_IF_ERROR(CheckSlots(wanted.fidv1_slots));
    num_v2 = static_cast<int64_t>(fidv2_features.size());
    wanted.names = fidv2_features;
    TF_RETURN_IF_ERROR(AddColumns(ctx, "float_features", "float_feature_dims", DT_FLOAT, false));
    TF_RETURN_IF_ERROR(AddColumns(ctx, "int64_features", "int64_feature_dims", DT_INT64, false));
    TF_RETURN_IF_ERROR(AddColumns(ctx, "string_features", "string_feature_dims", DT_STRING, false));
    TF_RETURN_IF_ERROR(AddColumns(ctx, "misc_float_features", "misc_float_dims", DT_FLOAT, true));
    TF_RETURN_IF_ERROR(AddColumns(ctx, "misc_int64_features", "misc_int64_dims", DT_INT64, true));
    return AddColumns(ctx, "misc_string_features", "misc_string_dims", DT_STRING, true);
  }

  template <typename Context>
  Status AddColumns(Context* ctx, const char* names_attr, const char* dims_attr, DataType dtype,
                    bool misc) {
    std::vector<std::string> names;
    std::vector<int64_t> dims;
    TF_RETURN_IF_ERROR(ctx->GetAttr(names_attr, &names));
    TF_RETURN_IF_ERROR(ctx->GetAttr(dims_attr, &dims));
    if (names.size() != dims.size()) {
      return errors::InvalidArgument("length of ", dims_attr, " is ", dims.size(),
                                     ", want that of ", names_attr, ": ", names.size());
    }
    for (size_t i = 0; i < names.size(); ++i) {
      if (dims[i] <= 0) {
        return errors::InvalidArgument(dims_attr, "[", i, "] is ", dims[i], ", want more than 0");
      }
      if (dims[i] > kMaxColumnWidth) {
        return errors::InvalidArgument(dims_attr, "[", i, "] is ", dims[i], ", want at most ",
                                       kMaxColumnWidth);
      }
      ParseSpec::Column column;
      column.name = names[i];
      column.width = dims[i];
      column.dtype = dtype;
      if (misc) {
        TF_RETURN_IF_ERROR(ResolveMiscColumn(&column));
      } else {
        wanted.names.push_back(names[i]);
        ++num_features;
      }
      columns.push_back(column);
    }
    return OkStatus();
  }

  int64_t num_v1() const { return static_cast<int64_t>(wanted.fidv1_slots.size()); }
  int64_t num_sparse() const { return num_v1() + num_v2; }

  InstanceColumns wanted;
  int64_t num_v2 = 0;
  int64_t num_features = 0;  // of columns; misc ones follow
  std::vector<ParseSpec::Column> columns;
};

Status CheckNumOutputs(int64_t got, int64_t want) {
  return CheckEqual("number of outputs", got, "that of the requested features", want);
}

// MonolithParseInstances counts its outputs kind by kind: their sum alone does not tell which
// output has which type.
template <typename Context>
Status CheckCounts(Context* ctx, const InstanceSpec& spec) {
  struct Kind {
    const char* attr;
    DataType dtype;
    bool misc;
  };
  int64_t count;
  TF_RETURN_IF_ERROR(ctx->GetAttr("N", &count));
  TF_RETURN_IF_ERROR(CheckEqual("N", count, "number of sparse features", spec.num_sparse()));
  for (const Kind& kind :
       {Kind{"M", DT_FLOAT, false}, Kind{"O", DT_INT64, false}, Kind{"P", DT_STRING, false},
        Kind{"Q", DT_FLOAT, true}, Kind{"R", DT_INT64, true}, Kind{"S", DT_STRING, true}}) {
    int64_t want = 0;
    for (size_t i = 0; i < spec.columns.size(); ++i) {
      const bool misc = static_cast<int64_t>(i) >= spec.num_features;
      want += misc == kind.misc && spec.columns[i].dtype == kind.dtype ? 1 : 0;
    }
    TF_RETURN_IF_ERROR(ctx->GetAttr(kind.attr, &count));
    TF_RETURN_IF_ERROR(CheckEqual(kind.attr, count, "number of its features", want));
  }
  return OkStatus();
}

void SetDenseShapes(InferenceContext* c, const InstanceSpec& spec, int first, bool collapse) {
  for (const ParseSpec::Column& column : spec.columns) {
    c->set_output(first++,
                  collapse ? c->Vector(column.width) : c->Matrix(c->UnknownDim(), column.width));
  }
}

Status ParseInstancesShape(InferenceContext* c) {
  InstanceSpec spec;
  TF_RETURN_IF_ERROR(spec.BuildFromAttrs(c));
  TF_RETURN_IF_ERROR(CheckCounts(c, spec));
  const int num_sparse = static_cast<int>(spec.num_sparse());
  for (int i = 0; i < 2 * num_sparse; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
  SetDenseShapes(c, spec, 2 * num_sparse, /*collapse=*/false);
  return OkStatus();
}

Status RawParseInstancesShape(InferenceContext* c) {
  InstanceSpec spec;
  std::string fid_output_type;
  bool collapse;
  TF_RETURN_IF_ERROR(spec.BuildFromAttrs(c));
  TF_RETURN_IF_ERROR(c->GetAttr("fid_output_type", &fid_output_type));
  TF_RETURN_IF_ERROR(c->GetAttr("collapse_batch_dim", &collapse));
  const int num_sparse = fid_output_type == "CONCAT" ? 1 : static_cast<int>(spec.num_sparse());
  TF_RETURN_IF_ERROR(CheckNumOutputs(c->num_outputs(),
                                     2 * num_sparse + static_cast<int64_t>(spec.columns.size())));
  for (int i = 0; i < 2 * num_sparse; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
  SetDenseShapes(c, spec, 2 * num_sparse, collapse);
  return OkStatus();
}

#define INSTANCE_ATTRS()                               \
  Attr("fidv1_features: list(int) = []")               \
      .Attr("fidv2_features: list(string) = []")       \
      .Attr("float_features: list(string) = []")       \
      .Attr("float_feature_dims: list(int) = []")      \
      .Attr("int64_features: list(string) = []")       \
      .Attr("int64_feature_dims: list(int) = []")      \
      .Attr("string_features: list(string) = []")      \
      .Attr("string_feature_dims: list(int) = []")     \
      .Attr("misc_float_features: list(string) = []")  \
      .Attr("misc_float_dims: list(int) = []")         \
      .Attr("misc_int64_features: list(string) = []")  \
      .Attr("misc_int64_dims: list(int) = []")         \
      .Attr("misc_string_features: list(string) = []") \
      .Attr("misc_string_dims: list(int) = []")

REGISTER_OP("MonolithParseInstances")
    .Input("serialized: string")
    .Output("fid_splits: N * int64")
    .Output("fid_values: N * int64")
    .Output("float_values: M * float")
    .Output("int64_values: O * int64")
    .Output("string_values: P * string")
    .Output("misc_float_values: Q * float")
    .Output("misc_int64_values: R * int64")
    .Output("misc_string_values: S * string")
    .Attr("N: int >= 0")
    .Attr("M: int >= 0")
    .Attr("O: int >= 0")
    .Attr("P: int >= 0")
    .Attr("Q: int >= 0")
    .Attr("R: int >= 0")
    .Attr("S: int >= 0")
    .INSTANCE_ATTRS()
    .SetShapeFn(ParseInstancesShape)
    .Doc(R"doc(
Parses serialized Instances.

serialized: a vector.
fid_splits: row splits of the slots of fidv1_features, then of fidv2_features.
fid_values: their ids; v1 ids become v2 when fidv2_features is not empty.
float_values: [batch, dim] of each feature, zeros when it has another number of values.
misc_float_values: [batch, dim] of label, instance_weight and fields of LineId, cut or padded.
)doc");

REGISTER_OP("MonolithRawParseInstance")
    .Input("serialized: string")
    .Output("tensors: T")
    .Attr("T: list(type) >= 1")
    .INSTANCE_ATTRS()
    .Attr("collapse_batch_dim: bool = false")
    .Attr("fid_output_type: {'REGULAR', 'CONCAT'} = 'REGULAR'")
    .SetShapeFn(RawParseInstancesShape)
    .Doc(R"doc(
MonolithParseInstances with all outputs in one list.

collapse_batch_dim: dense outputs lose the batch dimension, which must be 1.
fid_output_type: CONCAT: one row-splits and one ids output for all sparse features of the single
  Instance.
)doc");

class InstanceOpBase : public OpKernel {
 public:
  explicit InstanceOpBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, spec_.BuildFromAttrs(ctx));
  }

 protected:
  FeatureRows SparseRows(const InstanceTable& table, int64_t i) const {
    return i < spec_.num_v1() ? table.FidV1Rows(i) : table.FidV2Rows(i - spec_.num_v1());
  }

  bool converts_v1() const { return spec_.num_v2 > 0; }

  Status WriteSparse(OpKernelContext* ctx, const InstanceTable& table) const {
    for (int64_t i = 0; i < spec_.num_sparse(); ++i) {
      TF_RETURN_IF_ERROR(WriteSparseColumn(ctx, i, spec_.num_sparse() + i, SparseRows(table, i),
                                           /*repeat=*/0, converts_v1()));
    }
    return OkStatus();
  }

  Status WriteDense(OpKernelContext* ctx, const SampleBatch<Instance>& batch,
                    const InstanceTable& table, int64_t first_output,
                    const DeviceRunner& parallel) const {
    for (size_t i = 0; i < spec_.columns.size(); ++i) {
      const ParseSpec::Column& column = spec_.columns[i];
      const int64_t output = first_output + static_cast<int64_t>(i);
      if (static_cast<int64_t>(i) < spec_.num_features) {
        const DenseRow rows =
            InstanceDenseRow(table, spec_.num_v2 + static_cast<int64_t>(i), column.width);
        TF_RETURN_IF_ERROR(WriteDenseColumn(ctx, column, output, batch.size(), rows, parallel));
      } else {
        TF_RETURN_IF_ERROR(WriteMiscColumn(ctx, column, output, batch, parallel));
      }
    }
    return OkStatus();
  }

  InstanceSpec spec_;
};

class MonolithParseInstancesOp : public InstanceOpBase {
 public:
  explicit MonolithParseInstancesOp(OpKernelConstruction* ctx) : InstanceOpBase(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, CheckCounts(ctx, spec_));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    SampleBatch<Instance> batch;
    OP_REQUIRES_OK(ctx, batch.Load("serialized", ctx->input(0), parallel));
    const InstanceTable table(batch, spec_.wanted, parallel);
    OP_REQUIRES_OK(ctx, WriteSparse(ctx, table));
    OP_REQUIRES_OK(ctx, WriteDense(ctx, batch, table, 2 * spec_.num_sparse(), parallel));
  }
};

class MonolithRawParseInstanceOp : public InstanceOpBase {
 public:
  explicit MonolithRawParseInstanceOp(OpKernelConstruction* ctx) : InstanceOpBase(ctx) {
    if (!ctx->status().ok()) return;
    std::string fid_output_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("collapse_batch_dim", &collapse_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fid_output_type", &fid_output_type));
    concat_ = fid_output_type == "CONCAT";
    num_fid_outputs_ = concat_ ? 2 : 2 * spec_.num_sparse();
    OP_REQUIRES_OK(ctx,
                   CheckNumOutputs(ctx->num_outputs(),
                                   num_fid_outputs_ + static_cast<int64_t>(spec_.columns.size())));
    for (int64_t i = 0; i < ctx->num_outputs(); ++i) {
      const DataType want =
          i < num_fid_outputs_ ? DT_INT64 : spec_.columns[i - num_fid_outputs_].dtype;
      OP_REQUIRES(ctx, ctx->output_type(static_cast<int>(i)) == want,
                  errors::InvalidArgument("T[", i, "] is ",
                                          DataTypeString(ctx->output_type(static_cast<int>(i))),
                                          ", want ", DataTypeString(want)));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    SampleBatch<Instance> batch;
    OP_REQUIRES_OK(ctx, batch.Load("serialized", ctx->input(0), parallel));
    OP_REQUIRES(ctx, batch.size() == 1 || !(concat_ || collapse_),
                errors::InvalidArgument("serialized has ", batch.size(), " Instances, want 1 with ",
                                        concat_ ? "fid_output_type CONCAT" : "collapse_batch_dim"));
    const InstanceTable table(batch, spec_.wanted, parallel);
    if (concat_) {
      FeatureRows all;
      for (int64_t i = 0; i < spec_.num_sparse(); ++i) {
        const FeatureRows rows = SparseRows(table, i);
        all.spans.insert(all.spans.end(), rows.spans.begin(), rows.spans.end());
        all.AddRow();
      }
      OP_REQUIRES_OK(ctx, WriteSparseColumn(ctx, 0, 1, all, /*repeat=*/0, converts_v1()));
    } else {
      OP_REQUIRES_OK(ctx, WriteSparse(ctx, table));
    }
    OP_REQUIRES_OK(ctx, WriteDense(ctx, batch, table, num_fid_outputs_, parallel));
    if (!collapse_) return;
    for (int i = static_cast<int>(num_fid_outputs_); i < ctx->num_outputs(); ++i) {
      const Tensor matrix = *ctx->mutable_output(i);
      Tensor vector;
      OP_REQUIRES(ctx, vector.CopyFrom(matrix, TensorShape({matrix.NumElements()})),
                  errors::Internal("output ", i, " cannot be reshaped"));
      *ctx->mutable_output(i) = vector;
    }
  }

 private:
  bool collapse_;
  bool concat_;
  int64_t num_fid_outputs_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithParseInstances").Device(DEVICE_CPU),
                        MonolithParseInstancesOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRawParseInstance").Device(DEVICE_CPU),
                        MonolithRawParseInstanceOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
