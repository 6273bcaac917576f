// Registration of the fused layout ops; their kernels are in embedding_to_layout_kernels.cc.
//
// The versions differ in how an id's embedding is found in `embeddings_list`. The high and the low
// 32 bits of `fid_offset` are
//   V1       (tensor, row)                               tensors [n, dim]
//   V2       (table -> ps -> feature index, row in its block)
//   V3, V5   (table * ps_num + ps, float offset)         flat vectors, table-major
//   V4       (table * ps_num + ps, float offset)         one vector, blocks ps-major
// Tables, features and layouts are numbered in the order of their names. parallel_flag is kept for
// compatibility: large batches always use the thread pool, and the result is the same.
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/distribution/layout_plan.h"
#include "monolith/native_training/runtime/ops/distribution/layout_config.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::LayoutPlan;
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;

// First dimension unknown, the others as configured.
Status LayoutShape(InferenceContext* c) {
  std::string feature_cfgs;
  TF_RETURN_IF_ERROR(c->GetAttr("feature_cfgs", &feature_cfgs));
  LayoutPlan plan;
  TF_RETURN_IF_ERROR(ParseLayoutPlan(feature_cfgs, &plan));
  const int num_outputs = static_cast<int>(plan.outputs().size());
  if (c->num_outputs() != num_outputs) {
    return errors::InvalidArgument("num_out is ", c->num_outputs(), ", want ", num_outputs,
                                   " shapes in feature_cfgs");
  }
  for (int i = 0; i < num_outputs; ++i) {
    std::vector<DimensionHandle> dims = {c->UnknownDim()};
    const std::vector<int64_t>& configured = plan.outputs()[i].dims;
    for (size_t d = 1; d < configured.size(); ++d) dims.push_back(c->MakeDim(configured[d]));
    SetOutputShape(c, i, c->MakeShape(dims));
  }
  return OkStatus();
}

// Like embeddings_list.
Status LayoutGradShape(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return OkStatus();
}

constexpr char kDoc[] = R"doc(
Pools the embeddings of each example's ids into the layout tensors of `feature_cfgs`.

fid_offset: one entry per id occurrence: where its embedding is.
feature_offset: start in `fid_offset` of every (feature, example).
nfl_offset: start in `feature_offset` of every feature; bit 31: one row for the whole batch.
batch_size: one element; V5: one per request.
variant_type: kind of example the ids were parsed from; does not change the result.
feature_cfgs: serialized FeatureConfigs.
)doc";

constexpr char kGradDoc[] = R"doc(
Gradient of the fused layout op: zeros like `embeddings_list` plus, for every id, its layout gradients.

tensors_grad: one per layout tensor.
)doc";

}  // namespace

#define LAYOUT_INPUTS                 \
  Input("fid_offset: uint64")         \
      .Input("feature_offset: int32") \
      .Input("nfl_offset: uint32")    \
      .Input("batch_size: int32")
#define LAYOUT_SIZES                \
  Input("nfl_size: int32")          \
      .Input("feature_size: int32") \
      .Input("fid_size: int32")     \
      .Input("emb_size: int32")
#define LAYOUT_OUTPUTS               \
  Output("tensors: num_out * float") \
      .Attr("M: int >= 1")           \
      .Attr("num_out: int >= 1")     \
      .Attr("variant_type: string")  \
      .Attr("feature_cfgs: string")  \
      .SetDoNotOptimize()            \
      .SetShapeFn(LayoutShape)       \
      .Doc(kDoc)
#define LAYOUT_GRAD_OUTPUTS                      \
  Input("tensors_grad: num_input * float")       \
      .Output("embeddings_grad_list: M * float") \
      .Attr("M: int >= 1")                       \
      .Attr("num_input: int >= 1")               \
      .Attr("variant_type: string")              \
      .Attr("feature_cfgs: string")              \
      .SetDoNotOptimize()                        \
      .SetShapeFn(LayoutGradShape)               \
      .Doc(kGradDoc)
#define PS_ATTRS Attr("ps_num: int").Attr("parallel_flag: int = 0")

REGISTER_OP("MonolithEmbeddingToLayout")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_OUTPUTS;
REGISTER_OP("MonolithEmbeddingToLayoutV2")
    .Input("embeddings_list: M * float")
    .Input("fid_list_row_split: M * int64")
    .LAYOUT_INPUTS.LAYOUT_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutV3")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutV4")
    .Input("embeddings_list: M * float")
    .Input("fid_list_emb_row_lenth: int32")
    .LAYOUT_INPUTS.LAYOUT_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutV5")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_SIZES.LAYOUT_OUTPUTS.PS_ATTRS;

REGISTER_OP("MonolithEmbeddingToLayoutGrad")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_GRAD_OUTPUTS;
REGISTER_OP("MonolithEmbeddingToLayoutGradV2")
    .Input("embeddings_list: M * float")
    .Input("fid_list_row_split: M * int64")
    .LAYOUT_INPUTS.LAYOUT_GRAD_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutGradV3")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_GRAD_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutGradV4")
    .Input("embeddings_list: M * float")
    .Input("fid_list_emb_row_lenth: int32")
    .LAYOUT_INPUTS.LAYOUT_GRAD_OUTPUTS.PS_ATTRS;
REGISTER_OP("MonolithEmbeddingToLayoutGradV5")
    .Input("embeddings_list: M * float")
    .LAYOUT_INPUTS.LAYOUT_GRAD_OUTPUTS.PS_ATTRS;

}  // namespace monolith_tf
}  // namespace tensorflow
