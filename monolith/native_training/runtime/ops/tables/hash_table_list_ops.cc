// Lookup and update of several single tables in one op; nothing is packed into one tensor. A step
// of a Keras model needs one of each, however many features it has.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_list_calls.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithHashTableLookupList")
    .Input("table_handles: num_inputs * resource")
    .Input("ids: num_inputs * int64")
    .Output("embeddings: num_inputs * float")
    .Attr("num_inputs: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int>(dims.size()) != c->num_outputs()) {
        return errors::InvalidArgument("dims has ", dims.size(), " elements, want ",
                                       c->num_outputs(), ", one per input");
      }
      for (int i = 0; i < c->num_outputs(); ++i) {
        shape_inference::ShapeHandle ids;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_outputs() + i), 1, &ids));
        if (dims[i] < 0) {
          return errors::InvalidArgument("dims[", i, "] is ", dims[i], ", want at least 0");
        }
        c->set_output(i, c->Matrix(c->Dim(ids, 0), dims[i]));
      }
      return OkStatus();
    })
    .Doc(R"doc(
The vectors of ids, a tensor per input; zeros for absent ones. Creates nothing.

table_handles: A table may appear several times.
ids: Vectors.
dims: The dimensions of the tables.
embeddings: [n, dim] for each input.
)doc");

REGISTER_OP("MonolithHashTableOptimizeList")
    .Input("table_handles: num_inputs * resource")
    .Input("ids: num_inputs * int64")
    .Input("grads: num_inputs * float")
    .Input("learning_rates: num_inputs * float")
    .Input("req_time: int64")
    .Input("global_step: int64")
    .Attr("num_inputs: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return OkStatus(); })
    .Doc(R"doc(
One optimizer step per table and distinct id, on the sum of the id's gradients.

table_handles: No table twice.
ids: Vectors.
grads: n * dim floats for each of them.
learning_rates: One per segment of each table.
req_time: Seconds; becomes the rows' time of last update.
)doc");

// Finds the resources behind the first `count` inputs.
Status LookUpHandles(OpKernelContext* ctx, int count,
                     std::vector<core::RefCountPtr<HashTableResource>>* resources) {
  resources->resize(count);
  for (int i = 0; i < count; ++i) {
    TF_RETURN_IF_ERROR(
        LookupHandleInput(ctx, i, strings::StrCat("table_handles[", i, "]"), &(*resources)[i]));
  }
  return OkStatus();
}

class HashTableLookupListOp : public OpKernel {
 public:
  explicit HashTableLookupListOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    OP_REQUIRES_OK(ctx, LookUpHandles(ctx, ids.size(), &resources));
    std::vector<engine::EmbeddingTable*> tables;
    for (const auto& resource : resources) tables.push_back(resource->table());
    OP_REQUIRES_OK(ctx, LookUpLists(ctx, tables, dims_, ids));
  }

 private:
  std::vector<int64_t> dims_;
};

class HashTableOptimizeListOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, grads, rates;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    OP_REQUIRES_OK(ctx, ctx->input_list("learning_rates", &rates));
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    OP_REQUIRES_OK(ctx, LookUpHandles(ctx, ids.size(), &resources));
    engine::OptimizeOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4 * ids.size(), "req_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4 * ids.size() + 1, "global_step", &options.global_step));
    std::vector<ListedTable> tables;
    std::vector<const engine::EmbeddingTable*> sorted;
    for (int i = 0; i < ids.size(); ++i) {
      engine::EmbeddingTable* const table = resources[i]->table();
      OP_REQUIRES_OK(
          ctx, CheckEqual(strings::StrCat("size of learning_rates[", i, "]"),
                          rates[i].NumElements(), "number of segments", table->num_segments()));
      tables.push_back({table, resources[i]->filter(), rates[i].flat<float>().data()});
      sorted.push_back(table);
    }
    std::sort(sorted.begin(), sorted.end());
    OP_REQUIRES(ctx, std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                errors::InvalidArgument("table_handles has a table twice, want every table once"));
    OP_REQUIRES_OK(ctx, OptimizeLists(ctx, tables, ids, grads, options));
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupList").Device(DEVICE_CPU),
                        HashTableLookupListOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimizeList").Device(DEVICE_CPU),
                        HashTableOptimizeListOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
