// Lookup and update of a group whose ids, vectors and gradients stay in one tensor per table: a
// training step without parameter servers needs them packed into one tensor nowhere.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_list_calls.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithMultiHashTableLookupList")
    .Input("mtable: resource")
    .Input("ids: num_inputs * int64")
    .Output("embeddings: num_inputs * float")
    .Attr("num_inputs: int >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      for (int i = 0; i < c->num_outputs(); ++i) {
        shape_inference::ShapeHandle ids;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(1 + i), 1, &ids));
        if (i >= static_cast<int>(dims.size())) {
          return errors::InvalidArgument("dims has ", dims.size(), " elements, want ",
                                         c->num_outputs(), ", one per input");
        }
        c->set_output(i, c->Matrix(c->Dim(ids, 0), dims[i]));
      }
      return OkStatus();
    })
    .Doc(R"doc(
The vectors of ids, a tensor per table; zeros for absent ones. Creates nothing.

ids: Vectors.
tables: For each input the place of its table in the order of the names.
dims: The dimensions of those tables.
embeddings: [n, dim] for each input.
)doc");

REGISTER_OP("MonolithMultiHashTableOptimizeList")
    .Input("mtable: resource")
    .Input("ids: num_inputs * int64")
    .Input("grads: num_inputs * float")
    .Input("learning_rate: float")
    .Input("update_time: int64")
    .Input("global_step: int64")
    .Output("updated_table: resource")
    .Attr("num_inputs: int >= 1")
    .Attr("tables: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
One optimizer step per table and distinct id, on the sum of the id's gradients.

ids: Vectors.
grads: n * dim floats for each of them.
tables: For each input the place of its table in the order of the names; no table twice.
learning_rate: One per segment of all tables, in order of the names.
update_time: Seconds; becomes the rows' time of last update.
)doc");

// The tables of the inputs, checked.
Status GetTables(const MultiHashTableResource& group, const std::vector<int64_t>& indices,
                 int num_inputs, std::vector<engine::EmbeddingTable*>* tables) {
  if (static_cast<int>(indices.size()) != num_inputs) {
    return errors::InvalidArgument("tables has ", indices.size(), " elements, want ", num_inputs,
                                   ", one per input");
  }
  for (const int64_t index : indices) {
    if (index < 0 || index >= group.size()) {
      return errors::InvalidArgument("tables has ", index, ", want a value in [0, ", group.size(),
                                     ")");
    }
    tables->push_back(group.table(index));
  }
  return OkStatus();
}

class LookupListOp : public OpKernel {
 public:
  explicit LookupListOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    std::vector<engine::EmbeddingTable*> tables;
    OP_REQUIRES_OK(ctx, GetTables(*group, tables_, ids.size(), &tables));
    OP_REQUIRES_OK(ctx, LookUpLists(ctx, tables, dims_, ids));
  }

 private:
  std::vector<int64_t> tables_;
  std::vector<int64_t> dims_;
};

class OptimizeListOp : public OpKernel {
 public:
  explicit OptimizeListOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    std::vector<int64_t> sorted = tables_;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    OP_REQUIRES(ctx, twice == sorted.end(),
                errors::InvalidArgument("tables has ", twice == sorted.end() ? 0 : *twice,
                                        " twice, want every table once"));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    OpInputList ids, grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    std::vector<engine::EmbeddingTable*> tables;
    OP_REQUIRES_OK(ctx, GetTables(*group, tables_, ids.size(), &tables));
    engine::OptimizeOptions options;
    const int rates = 1 + 2 * ids.size();
    OP_REQUIRES_OK(ctx, GetNumber(ctx, rates + 1, "update_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, rates + 2, "global_step", &options.global_step));
    std::vector<int64_t> first_rate(1, 0);
    for (int64_t t = 0; t < group->size(); ++t) {
      first_rate.push_back(first_rate.back() + group->table(t)->num_segments());
    }
    OP_REQUIRES(ctx, ctx->input(rates).NumElements() == first_rate.back(),
                errors::InvalidArgument("learning_rate has ", ctx->input(rates).NumElements(),
                                        " elements, want ", first_rate.back(),
                                        ", one per segment of all tables"));
    std::vector<ListedTable> listed;
    for (int i = 0; i < ids.size(); ++i) {
      listed.push_back({tables[i], group->filter(tables_[i]),
                        ctx->input(rates).flat<float>().data() + first_rate[tables_[i]]});
    }
    OP_REQUIRES_OK(ctx, OptimizeLists(ctx, listed, ids, grads, options));
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::vector<int64_t> tables_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupList").Device(DEVICE_CPU), LookupListOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimizeList").Device(DEVICE_CPU),
                        OptimizeListOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
