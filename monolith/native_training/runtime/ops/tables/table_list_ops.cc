// Lookup and update of several tables whose ids, vectors and gradients stay in one tensor each. A
// training step without parameter servers needs them packed nowhere; a step of a Keras model needs
// one op of each kind, however many features it has.
//
//   MonolithMultiHashTable...   tables of one group
//   MonolithHashTable...        single tables
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
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "monolith/native_training/runtime/ops/tables/table_places.h"
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

// Output i is [size of the i-th vector of ids, dims[i]]; `first` is the first input with ids.
Status ShapeOfLists(InferenceContext* c, int first) {
  std::vector<int64_t> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  if (static_cast<int>(dims.size()) != c->num_outputs()) {
    return errors::InvalidArgument("dims has ", dims.size(), " elements, want ", c->num_outputs(),
                                   ", one per input");
  }
  for (int i = 0; i < c->num_outputs(); ++i) {
    shape_inference::ShapeHandle ids;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(first + i), 1, &ids));
    if (dims[i] < 0) {
      return errors::InvalidArgument("dims[", i, "] is ", dims[i], ", want at least 0");
    }
    SetOutputShape(c, i, c->Matrix(c->Dim(ids, 0), dims[i]));
  }
  return OkStatus();
}

REGISTER_OP("MonolithMultiHashTableLookupList")
    .Input("mtable: resource")
    .Input("ids: num_inputs * int64")
    .Output("embeddings: num_inputs * float")
    .Attr("num_inputs: int >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ShapeOfLists(c, 1); })
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

REGISTER_OP("MonolithHashTableLookupList")
    .Input("table_handles: num_inputs * resource")
    .Input("ids: num_inputs * int64")
    .Output("embeddings: num_inputs * float")
    .Attr("num_inputs: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ShapeOfLists(c, c->num_outputs()); })
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

// Holds the parts of one table that an update needs.
struct ListedTable {
  engine::EmbeddingTable* table;
  engine::OccurrenceFilter* filter;
  const float* learning_rates;  // one per segment
};

// Allocates output i as [size of ids[i], dims[i]] and fills it. Fails with InvalidArgument if there
// is not one table and dimension per input, or a dimension is not the table's.
Status LookUpLists(OpKernelContext* ctx, const std::vector<engine::EmbeddingTable*>& tables,
                   const std::vector<int64_t>& dims, const OpInputList& ids) {
  if (static_cast<int>(dims.size()) != ids.size()) {
    return errors::InvalidArgument("dims has ", dims.size(), " elements, want ", ids.size(),
                                   ", one per input");
  }
  std::vector<engine::LookupRequest> requests;
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    if (dims[i] != tables[i]->dim()) {
      return errors::InvalidArgument("dims[", i, "] is ", dims[i],
                                     ", but the table of that input has dimension ",
                                     tables[i]->dim());
    }
    const int64_t n = ids[i].NumElements();
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, i, {n, dims[i]}, &out));
    if (n == 0) continue;
    requests.push_back({tables[i], ids[i].vec<int64_t>().data(), n, out->flat<float>().data()});
  }
  DeviceRunner runner(ctx);
  engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                     &runner);
  return OkStatus();
}

// One optimizer step per table and distinct id, on the sum of the id's gradients; `options` has the
// times. No table may appear twice. Fails with InvalidArgument if a gradient's size does not fit.
Status OptimizeLists(OpKernelContext* ctx, const std::vector<ListedTable>& tables,
                     const OpInputList& ids, const OpInputList& grads,
                     const engine::OptimizeOptions& options) {
  std::vector<engine::WriteSpan> spans;
  for (int i = 0; i < ids.size(); ++i) {
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    const int64_t n = ids[i].NumElements(), dim = tables[i].table->dim();
    int64_t want = 0;
    TF_RETURN_IF_ERROR(MultiplySizes("size of ids * dimension", n, dim, &want));
    if (grads[i].NumElements() != want) {
      return errors::InvalidArgument("grads[", i, "] has ", grads[i].NumElements(),
                                     " elements, want ", n, " ids times dimension ", dim);
    }
    spans.push_back({ids[i].vec<int64_t>().data(), n, grads[i].flat<float>().data()});
  }
  std::vector<engine::OptimizeRequest> requests;
  for (int i = 0; i < ids.size(); ++i) {
    if (spans[i].n == 0) continue;
    engine::OptimizeOptions own = options;
    own.dedup = true;
    own.count_once = true;
    own.write.filter = tables[i].filter;
    TF_RETURN_IF_ERROR(GetNonFinite(&own.write.non_finite));
    own.learning_rates = tables[i].learning_rates;
    own.num_learning_rates = tables[i].table->num_segments();
    requests.push_back({tables[i].table, &spans[i], 1, own});
  }
  DeviceRunner runner(ctx);
  return FromEngine(engine::EmbeddingTable::OptimizeMany(
      requests.data(), static_cast<int64_t>(requests.size()), &runner));
}

// The tables of the inputs, checked.
Status GetTables(const MultiHashTableResource& group, const std::vector<int64_t>& indices,
                 int num_inputs, std::vector<engine::EmbeddingTable*>* tables) {
  TF_RETURN_IF_ERROR(CheckTablePlaces(indices, num_inputs, group.size()));
  for (const int64_t index : indices) tables->push_back(group.table(index));
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
    OP_REQUIRES_OK(ctx, CheckEachOnce("tables", "table", tables_));
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

REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupList").Device(DEVICE_CPU), LookupListOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimizeList").Device(DEVICE_CPU),
                        OptimizeListOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupList").Device(DEVICE_CPU),
                        HashTableLookupListOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimizeList").Device(DEVICE_CPU),
                        HashTableOptimizeListOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
