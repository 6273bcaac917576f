// Lookup and update of single tables whose vectors lie side by side, as a model that concatenates
// them reads them: no copy of them is made on the way there, nor of their gradient on the way back.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithHashTableLookupConcat")
    .Input("table_handles: num_inputs * resource")
    .Input("ids: num_inputs * int64")
    .Output("embeddings: float")
    .Attr("num_inputs: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      int num_inputs;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->GetAttr("num_inputs", &num_inputs));
      if (static_cast<int>(dims.size()) != num_inputs) {
        return errors::InvalidArgument("dims has ", dims.size(), " elements, want ", num_inputs,
                                       ", one per input");
      }
      shape_inference::ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(num_inputs), 1, &rows));
      int64_t width = 0;
      for (int i = 0; i < num_inputs; ++i) {
        TF_RETURN_IF_ERROR(c->Merge(rows, c->input(num_inputs + i), &rows));
        if (dims[i] < 0) {
          return errors::InvalidArgument("dims[", i, "] is ", dims[i], ", want at least 0");
        }
        width += dims[i];
      }
      SetOutputShape(c, 0, c->Matrix(c->Dim(rows, 0), width));
      return OkStatus();
    })
    .Doc(R"doc(
The vectors of ids, those of one place side by side; zeros for absent ones. Creates nothing.

table_handles: A table may appear several times.
ids: Vectors of one length.
dims: The dimensions of the tables.
embeddings: [n, sum of dims].
)doc");

REGISTER_OP("MonolithHashTableOptimizeConcat")
    .Input("table_handles: num_inputs * resource")
    .Input("ids: num_inputs * int64")
    .Input("grads: num_grads * float")
    .Input("learning_rates: num_inputs * float")
    .Input("req_time: int64")
    .Input("global_step: int64")
    .Attr("num_inputs: int >= 1")
    .Attr("num_grads: int >= 1")
    .Attr("places: list(int) >= 1")
    .Attr("columns: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return OkStatus(); })
    .Doc(R"doc(
One optimizer step per table and distinct id, on the sum of the id's gradients.

table_handles: No table twice.
ids: Vectors.
grads: Matrices.
places: For each input which of `grads` has its gradients, a row for each id.
columns: And in which column they begin.
learning_rates: One per segment of each table.
req_time: Seconds; becomes the rows' time of last update.
)doc");

Status HandlesOf(OpKernelContext* ctx, int count,
                 std::vector<core::RefCountPtr<HashTableResource>>* resources) {
  resources->resize(count);
  for (int i = 0; i < count; ++i) {
    TF_RETURN_IF_ERROR(
        LookupHandleInput(ctx, i, strings::StrCat("table_handles[", i, "]"), &(*resources)[i]));
  }
  return OkStatus();
}

class HashTableLookupConcatOp : public OpKernel {
 public:
  explicit HashTableLookupConcatOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    OP_REQUIRES_OK(ctx, HandlesOf(ctx, ids.size(), &resources));
    OP_REQUIRES(ctx, static_cast<int>(dims_.size()) == ids.size(),
                errors::InvalidArgument("dims has ", dims_.size(), " elements, want ", ids.size(),
                                        ", one per input"));
    int64_t width = 0;
    for (int i = 0; i < ids.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
      OP_REQUIRES_OK(ctx, CheckEqual(strings::StrCat("size of ids[", i, "]"), ids[i].NumElements(),
                                     "size of ids[0]", ids[0].NumElements()));
      OP_REQUIRES_OK(ctx, CheckEqual(strings::StrCat("dims[", i, "]"), dims_[i],
                                     "dimension of its table", resources[i]->table()->dim()));
      width += dims_[i];
    }
    const int64_t n = ids[0].NumElements();
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {n, width}, &out));
    if (n == 0) return;
    float* at = out->flat<float>().data();
    std::vector<engine::LookupRequest> requests;
    for (int i = 0; i < ids.size(); ++i) {
      engine::LookupRequest request{resources[i]->table(), ids[i].vec<int64_t>().data(), n, at};
      request.stride = width;
      requests.push_back(request);
      at += dims_[i];
    }
    DeviceRunner runner(ctx);
    engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                       &runner);
  }

 private:
  std::vector<int64_t> dims_;
};

class HashTableOptimizeConcatOp : public OpKernel {
 public:
  explicit HashTableOptimizeConcatOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("places", &places_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("columns", &columns_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, grads, rates;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    OP_REQUIRES_OK(ctx, ctx->input_list("learning_rates", &rates));
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    OP_REQUIRES_OK(ctx, HandlesOf(ctx, ids.size(), &resources));
    const auto count = static_cast<size_t>(ids.size());
    OP_REQUIRES(
        ctx, places_.size() == count && columns_.size() == count,
        errors::InvalidArgument("places and columns have ", places_.size(), " and ",
                                columns_.size(), " elements, want ", count, ", one per input"));
    engine::OptimizeOptions options;
    const int times = ctx->num_inputs() - 2;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, times, "req_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, times + 1, "global_step", &options.global_step));
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.write.non_finite));
    options.dedup = true;
    options.count_once = true;
    std::vector<const engine::EmbeddingTable*> sorted;
    std::vector<engine::WriteSpan> spans(count);
    std::vector<engine::OptimizeRequest> requests;
    for (int i = 0; i < ids.size(); ++i) {
      engine::EmbeddingTable* const table = resources[i]->table();
      sorted.push_back(table);
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
      OP_REQUIRES_OK(
          ctx, CheckEqual(strings::StrCat("size of learning_rates[", i, "]"),
                          rates[i].NumElements(), "number of segments", table->num_segments()));
      const int64_t n = ids[i].NumElements(), column = columns_[i];
      OP_REQUIRES(ctx, places_[i] >= 0 && places_[i] < grads.size(),
                  errors::InvalidArgument("places[", i, "] is ", places_[i],
                                          ", want a value in [0, ", grads.size(), ")"));
      const Tensor& grad = grads[static_cast<int>(places_[i])];
      OP_REQUIRES_OK(ctx, CheckMatrix(strings::StrCat("grads[", places_[i], "]"), grad));
      OP_REQUIRES(ctx,
                  grad.dim_size(0) == n && column >= 0 && column <= grad.dim_size(1) &&
                      table->dim() <= grad.dim_size(1) - column,
                  errors::InvalidArgument("grads[", places_[i], "] has shape ",
                                          grad.shape().DebugString(), ", want ", n, " rows and ",
                                          table->dim(), " columns from ", column, " on"));
      if (n == 0) continue;
      spans[i].ids = ids[i].vec<int64_t>().data();
      spans[i].n = n;
      spans[i].values = grad.flat<float>().data() + column;
      spans[i].stride = grad.dim_size(1);
      engine::OptimizeOptions own = options;
      own.write.filter = resources[i]->filter();
      own.learning_rates = rates[i].flat<float>().data();
      own.num_learning_rates = table->num_segments();
      requests.push_back({table, &spans[i], 1, own});
    }
    std::sort(sorted.begin(), sorted.end());
    OP_REQUIRES(ctx, std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                errors::InvalidArgument("table_handles has a table twice, want every table once"));
    DeviceRunner runner(ctx);
    OP_REQUIRES_OK(ctx, FromEngine(engine::EmbeddingTable::OptimizeMany(
                            requests.data(), static_cast<int64_t>(requests.size()), &runner)));
  }

 private:
  std::vector<int64_t> places_;
  std::vector<int64_t> columns_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupConcat").Device(DEVICE_CPU),
                        HashTableLookupConcatOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimizeConcat").Device(DEVICE_CPU),
                        HashTableOptimizeConcatOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
