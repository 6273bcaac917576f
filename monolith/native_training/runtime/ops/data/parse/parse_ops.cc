// Registration of the ops that turn a batch of samples into tensors. Kernels:
// parse_example_kernels.cc and parse_instance_kernels.cc.
#include <cstdint>

#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

Status ParseShape(InferenceContext* c) {
  ParseSpec spec;
  TF_RETURN_IF_ERROR(spec.BuildFromAttrs(c));
  for (int64_t i = 0; i < spec.num_columns(); ++i) {
    const ParseSpec::Column& column = spec.columns[i];
    c->set_output(static_cast<int>(i), column.kind == ParseSpec::Kind::kSparse
                                           ? c->Vector(c->UnknownDim())
                                           : c->Matrix(c->UnknownDim(), column.width));
  }
  for (int64_t i = 0; i < spec.num_sparse; ++i) {
    c->set_output(static_cast<int>(spec.num_columns() + i), c->Vector(c->UnknownDim()));
  }
  // The protos of version 2.
  for (int64_t i = spec.num_columns() + spec.num_sparse; i < c->num_outputs(); ++i) {
    c->set_output(static_cast<int>(i), c->UnknownShape());
  }
  return OkStatus();
}

constexpr char kDoc[] = R"doc(
Turns samples into tensors.

pb_input: variants or serialized protos, a vector; one ExampleBatch may be a scalar.
tensors: output i: row splits of a sparse name, or the [batch, shape] tensor of a dense one;
  output len(names) + i: ids of sparse name i.
names: sparse features, dense features, fields of LineId, in this order.
shapes: -1 for a sparse name, else the number of columns.
dtypes: one per name, and int64 per sparse name.
extra_names: the names that are fields of LineId.
)doc";

#define PARSE_ATTRS()                    \
  Attr("names: list(string)")            \
      .Attr("shapes: list(int)")         \
      .Attr("dtypes: list(type) >= 1")   \
      .Attr("extra_names: list(string)") \
      .Attr("T: {variant, string}")

#define REGISTER_PARSE_OP(name)  \
  REGISTER_OP(name)              \
      .Input("pb_input: T")      \
      .Output("tensors: dtypes") \
      .PARSE_ATTRS()             \
      .SetShapeFn(ParseShape)    \
      .Doc(kDoc)

#define REGISTER_PARSE_V2_OP(name)        \
  REGISTER_OP(name)                       \
      .Input("pb_input: T")               \
      .Output("tensors: dtypes")          \
      .Output("sparse_features: variant") \
      .PARSE_ATTRS()                      \
      .SetShapeFn(ParseShape)             \
      .Doc(kDoc)

REGISTER_PARSE_OP("ParseExamples");
REGISTER_PARSE_OP("ParseExampleBatch");
REGISTER_PARSE_V2_OP("ParseExamplesV2");
REGISTER_PARSE_V2_OP("ParseExampleBatchV2");

REGISTER_OP("ParseInstances")
    .Input("pb_input: T")
    .Output("tensors: dtypes")
    .Attr("fidv1_features: list(int)")
    .Attr("fidv2_features: list(string)")
    .PARSE_ATTRS()
    .SetShapeFn(ParseShape)
    .Doc(kDoc);

REGISTER_OP("ParseInstancesV2")
    .Input("pb_input: T")
    .Output("tensors: dtypes")
    .Output("sparse_features: variant")
    .Attr("fidv1_features: list(int)")
    .Attr("fidv2_features: list(string)")
    .PARSE_ATTRS()
    .SetShapeFn(ParseShape)
    .Doc(kDoc);

REGISTER_OP("ParseExampleBatchList")
    .Input("inputs: N * variant")
    .Output("tensors: dtypes")
    .Attr("label_config: string")
    .Attr("names: list(string)")
    .Attr("shapes: list(int)")
    .Attr("dtypes: list(type) >= 1")
    .Attr("extra_names: list(string)")
    .Attr("positive_label: float")
    .Attr("negative_label: float")
    .Attr("N: int >= 1")
    .SetShapeFn(ParseShape)
    .Doc(R"doc(
Merges batches of the same rows column by column and turns the result into tensors.

inputs: ExampleBatch each, scalar or [1]. An id becomes (id of its column, signature).
label_config: serialized LabelConf: `label` is built from the actions of __LINE_ID__. Empty: from
  the __LABEL__ column.
)doc");

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
