// Definitions of the ops on a group of tables; kernels are in multi_hash_table_kernels.cc and
// multi_hash_table_checkpoint_kernels.cc.
//
// Ids come as one vector with row splits: row k belongs to the k-th table in order of the names.
// Values come as one vector with n * dim floats per table, in the same order.
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

REGISTER_OP("CreateMonolithMultiHashTable")
    .Input("config: string")
    .Input("filter_handle: resource")
    .Input("sync_client_handle: resource")
    .Output("multi_hash_table_handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a group of tables, or finds the one of that name.

config: A serialized MultiEmbeddingHashTableConfig, scalar.
filter_handle: Decides when an absent id may enter.
sync_client_handle: Is told of updated ids.
)doc");

REGISTER_OP("ReadMonolithMultiHashTable")
    .Output("multi_hash_table_handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Returns the handle of a group, whether the group exists yet or not.");

REGISTER_OP("IsHashTableInitialized")
    .Input("handle: resource")
    .Output("is_initialized: bool")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Returns whether a group or table exists.");

REGISTER_OP("MonolithMultiHashTableLookup")
    .Input("mtable: resource")
    .Input("id: int64")
    .Input("id_split: int64")
    .Output("embedding: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Returns the vectors of ids; zeros for absent ones. Creates nothing.

id: [n].
id_split: [requests * tables + 1]; several requests may lie end to end.
embedding: The rows, in the order of the ids.
)doc");

REGISTER_OP("MonolithMultiHashTableLookupEntry")
    .Input("mtable: resource")
    .Input("id: int64")
    .Input("id_split: int64")
    .Output("serialized_entries: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return OkStatus();
    })
    .Doc(R"doc(
Returns serialized EntryDumps of ids, without the id; empty for absent ones.

id: [n].
id_split: [tables + 1].
serialized_entries: [n].
)doc");

REGISTER_OP("MonolithMultiHashTableFusedLookup")
    .Input("mtable: resource")
    .Input("ids: int64")
    .Input("fused_slot_size: int32")
    .Input("req_time: int64")
    .Output("embeddings: float32")
    .Output("embedding_splits: int32")
    .Output("id_offsets: int32")
    .Output("embedding_offsets: int32")
    .Output("indices: int64")
    .Attr("num_of_shards: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t shards;
      TF_RETURN_IF_ERROR(c->GetAttr("num_of_shards", &shards));
      TF_RETURN_IF_ERROR(CheckShards("num_of_shards", shards));
      ShapeHandle sizes;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &sizes));
      shape_inference::DimensionHandle offsets;
      TF_RETURN_IF_ERROR(c->Add(c->Dim(sizes, 0), 1, &offsets));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(shards));
      c->set_output(2, c->Vector(offsets));
      c->set_output(3, c->Vector(offsets));
      c->set_output(4, c->input(1));
      return OkStatus();
    })
    .Doc(R"doc(
Looks up all tables for several shards, as MonolithHashTableFusedLookup does.

fused_slot_size: [tables * shards].
)doc");

REGISTER_OP("MonolithMultiHashTableAssign")
    .Input("mtable: resource")
    .Input("id: int64")
    .Input("id_split: int64")
    .Input("value: float")
    .Input("update_time: int64")
    .Output("updated_table: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Overwrites the vectors of ids; optimizer state stays.

update_time: Seconds; becomes the rows' time of last update.
)doc");

REGISTER_OP("MonolithMultiHashTableAssignAdd")
    .Input("mtable: resource")
    .Input("id: int64")
    .Input("id_split: int64")
    .Input("value: float")
    .Input("update_time: int64")
    .Output("updated_table: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Adds to the vectors of ids.

update_time: Seconds; becomes the rows' time of last update.
)doc");

REGISTER_OP("MonolithMultiHashTableReinitialize")
    .Input("mtable: resource")
    .Input("table_name: string")
    .Input("id: int64")
    .Output("updated_table: resource")
    .Output("id_status: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(c->NumElements(c->input(2))));
      return OkStatus();
    })
    .Doc(R"doc(
Resets rows of one table, creating absent ones.

table_name: Scalar.
id: n ids.
id_status: 1 existed, 0 was inserted, -1 the table is unknown and nothing was done.
)doc");

REGISTER_OP("MonolithMultiHashTableOptimize")
    .Input("mtable: resource")
    .Input("id: int64")
    .Input("id_split: int64")
    .Input("value: float")
    .Input("learning_rate: float")
    .Input("update_time: int64")
    .Input("global_step: int64")
    .Output("updated_table: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Runs the optimizers on the rows of ids, creating absent ones.

value: Gradients.
learning_rate: One per segment of each table, tables one after another.
update_time: Seconds; becomes the rows' time of last update.
)doc");

REGISTER_OP("MonolithMultiHashTableFusedOptimize")
    .Input("mtable: resource")
    .Input("ids: int64")
    .Input("indices: int64")
    .Input("fused_slot_size: int32")
    .Input("id_grads: float")
    .Input("id_offsets: int32")
    .Input("grad_offsets: int32")
    .Input("learning_rate_tensors: float")
    .Input("req_time: int64")
    .Input("global_step: int64")
    .Output("mtable_out: resource")
    .Attr("num_of_shards: int >= 1")
    .Attr("enable_grad_accumulation: bool = false")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Updates all tables for several shards, as MonolithHashTableFusedOptimize does.");

REGISTER_OP("MonolithMultiHashTableSave")
    .Input("mtable: resource")
    .Input("basename: string")
    .Output("output_mtable: resource")
    .Attr("nshards: int = -1")
    .Attr("slot_expire_time_config: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Writes the rows that have not expired to `<basename>-ddddd-of-ddddd` and their numbers to
`<basename>.meta-ddddd-of-ddddd`.

basename: Scalar.
nshards: Number of files; -1 lets the size decide.
slot_expire_time_config: A serialized SlotExpireTimeConfig for all tables; by default each has its
  own, that of its configuration.
)doc");

REGISTER_OP("MonolithMultiHashTableRestore")
    .Input("mtable: resource")
    .Input("basename: string")
    .Output("output_mtable: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the content of the tables that were saved; changes none when a file cannot be read.

basename: Scalar.
)doc");

REGISTER_OP("MonolithMultiHashTableFeatureStat")
    .Input("basename: string")
    .Output("features: string")
    .Output("counts: uint64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Returns how many rows of each table were saved.

basename: Scalar.
features: Names of the tables.
)doc");

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
