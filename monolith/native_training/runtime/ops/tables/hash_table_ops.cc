// Definitions of the ops on one table; kernels are in hash_table_kernels.cc,
// hash_table_checkpoint_kernels.cc and hash_table_fused_kernels.cc. All but the two pure ones are
// stateful: merging two lookups around a write would change what they see.
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

REGISTER_OP("MonolithHashTable")
    .Input("filter_handle: resource")
    .Input("sync_client_handle: resource")
    .Output("handle: resource")
    .Attr("config: string")
    .Attr("label: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a map from int64 ids to rows of floats on first use.

filter_handle: Decides when an absent id may enter.
sync_client_handle: Is told of updated ids.
config: A serialized EmbeddingHashTableConfig.
label: What messages call the table; by default its shared name.
)doc");

REGISTER_OP("MonolithHashTableConfigure")
    .Input("table_handle: resource")
    .Attr("config: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return OkStatus(); })
    .Doc(R"doc(
Gives a table another configuration, of the same dimension. Rows keep their values and times, and
the state of an optimizer of the same kind. Nothing else may write to the table meanwhile.

config: A serialized EmbeddingHashTableConfig.
)doc");

REGISTER_OP("MonolithHashTableLookup")
    .Input("table_handle: resource")
    .Input("ids: int64")
    .Output("embeddings: float")
    .Attr("dim_size: int")
    .Attr("use_multi_threads: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim_size;
      TF_RETURN_IF_ERROR(c->GetAttr("dim_size", &dim_size));
      if (dim_size < 0) {
        return errors::InvalidArgument("dim_size is ", dim_size, ", want at least 0");
      }
      SetOutputShape(c, 0, c->Matrix(c->NumElements(c->input(1)), c->MakeDim(dim_size)));
      return OkStatus();
    })
    .Doc(R"doc(
Returns the vectors of ids; zeros for absent ones. Creates nothing.

ids: n ids.
embeddings: [n, dim_size].
dim_size: The table's dimension.
use_multi_threads: Use all threads of the device.
)doc");

REGISTER_OP("MonolithHashTableLookupEntry")
    .Input("table_handle: resource")
    .Input("ids: int64")
    .Output("entry_str: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->NumElements(c->input(1))));
      return OkStatus();
    })
    .Doc(R"doc(
Returns serialized EntryDumps of ids, without the id; empty for absent ones.

ids: n ids.
entry_str: [n].
)doc");

REGISTER_OP("MonolithHashTableLookupGradient")
    .Input("id_indices: int64")
    .Input("id_values: int64")
    .Input("input_grads: float")
    .Output("ids: int64")
    .Output("output_grads: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle indices, values, grads;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &indices));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &values));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &grads));
      c->set_output(0, values);
      SetOutputShape(c, 1, c->Matrix(c->Dim(values, 0), c->Dim(grads, 1)));
      return OkStatus();
    })
    .Doc(R"doc(
Gives each id the gradient of the row it was pooled into.

id_indices: [n, k], the row in the first column.
id_values: [n].
input_grads: [rows, dim].
ids: id_values.
output_grads: [n, dim].
)doc");

REGISTER_OP("MonolithHashTableAssign")
    .Input("table_handle: resource")
    .Input("id_values: int64")
    .Input("id_updates: float")
    .Input("req_time: int64")
    .Output("table_handle_output: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Overwrites the vectors of ids; optimizer state stays.

id_values: n ids.
id_updates: At least n * dim floats.
req_time: Seconds; becomes the rows' time of last update.
)doc");

REGISTER_OP("MonolithHashTableAssignAdd")
    .Input("table_handle: resource")
    .Input("id_values: int64")
    .Input("id_updates: float")
    .Input("req_time: int64")
    .Output("table_handle_output: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Adds to the vectors of ids.

id_values: n ids.
id_updates: At least n * dim floats.
req_time: Seconds; becomes the rows' time of last update.
)doc");

REGISTER_OP("MonolithHashTableOptimize")
    .Input("table_handle: resource")
    .Input("id_values: int64")
    .Input("id_updates: float")
    .Input("learning_rate_tensor: float")
    .Input("req_time: int64")
    .Input("global_step: int64")
    .Output("table_handle_output: resource")
    .Attr("use_multi_threads: bool = false")
    .Attr("queue_size: int = 0")
    .Attr("enable_dedup: bool = false")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Runs the optimizers on the rows of ids, creating absent ones.

id_values: n ids.
id_updates: n * dim gradients.
learning_rate_tensor: One per segment.
req_time: Seconds; becomes the rows' time of last update.
use_multi_threads: Use all threads of the device.
queue_size: Unused.
enable_dedup: Sum the gradients of equal ids first.
)doc");

REGISTER_OP("MonolithHashTableErase")
    .Input("table_handle: resource")
    .Input("ids: int64")
    .Output("table_handle_output: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Removes the rows of ids with the state of their optimizers; absent ids are ignored.

ids: n ids.
)doc");

REGISTER_OP("MonolithHashTableSave")
    .Input("handle: resource")
    .Input("basename: string")
    .Output("output_handle: resource")
    .Attr("nshards: int = -1")
    .Attr("random_sleep_ms: int = 0")
    .Attr("slot_expire_time_config: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Writes the rows that have not expired to `<basename>-ddddd-of-ddddd`.

basename: Scalar.
nshards: Number of files; -1 lets the size decide.
random_sleep_ms: Waits a random time below this first.
slot_expire_time_config: A serialized SlotExpireTimeConfig.
)doc");

REGISTER_OP("MonolithHashTableRestore")
    .Input("handle: resource")
    .Input("basename: string")
    .Output("output_handle: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the content by what was saved; it stays when a file cannot be read.

basename: Scalar.
)doc");

REGISTER_OP("MonolithHashTableSize")
    .Input("table_handle: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Returns the number of rows.");

REGISTER_OP("MonolithHashTableSaveAsTensor")
    .Input("table_handle: resource")
    .Input("shard_idx: int32")
    .Input("num_shards: int32")
    .Input("limit: int64")
    .Input("offset: int64")
    .Output("new_offset: int64")
    .Output("entry: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Returns a page of serialized EntryDumps from one partition.

shard_idx: Which partition.
num_shards: How many partitions there are.
limit: At most this many entries.
offset: 0, or what the previous page returned.
entry: Fewer than limit entries: the partition is finished.
)doc");

REGISTER_OP("MonolithExtractSlotFromEntry")
    .Input("entry: string")
    .Output("slot: int32")
    .Attr("fid_v2: bool")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc(R"doc(
Returns the slot bits of the ids in serialized EntryDumps.

fid_v2: Whether the slot is the 15 bits from bit 48; otherwise the 10 bits from bit 54.
)doc");

Status FusedSlotSizeShape(InferenceContext* c, int input, int64_t num_tables, int64_t num_shards) {
  ShapeHandle sizes;
  TF_RETURN_IF_ERROR(CheckShards("num_of_shards", num_shards));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(input), 1, &sizes));
  DimensionHandle unused;
  return c->WithValue(c->Dim(sizes, 0), num_tables * num_shards, &unused);
}

REGISTER_OP("MonolithHashTableFusedLookup")
    .Input("table_handles: N * resource")
    .Input("ids: int64")
    .Input("fused_slot_size: int32")
    .Input("req_time: int64")
    .Output("embeddings: float32")
    .Output("embedding_splits: int32")
    .Output("id_offsets: int32")
    .Output("embedding_offsets: int32")
    .Output("indices: int64")
    .Attr("N: int >= 1")
    .Attr("num_of_shards: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables, shards;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("num_of_shards", &shards));
      TF_RETURN_IF_ERROR(FusedSlotSizeShape(c, static_cast<int>(tables) + 1, tables, shards));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(shards));
      c->set_output(2, c->Vector(tables * shards + 1));
      c->set_output(3, c->Vector(tables * shards + 1));
      c->set_output(4, c->input(static_cast<int>(tables)));
      return OkStatus();
    })
    .Doc(R"doc(
Looks up several tables for several shards; ids lie shard by shard, table by table.

ids: [M].
fused_slot_size: [tables * shards].
req_time: Unused.
embeddings: All rows, in the order of the ids.
embedding_splits: Floats per shard.
id_offsets: Where the ids of each shard and table begin.
embedding_offsets: Where its floats begin.
indices: ids.
)doc");

REGISTER_OP("MonolithHashTableFusedOptimize")
    .Input("table_handles: N * resource")
    .Input("ids: int64")
    .Input("indices: int64")
    .Input("fused_slot_size: int32")
    .Input("id_grads: float")
    .Input("id_offsets: int32")
    .Input("grad_offsets: int32")
    .Input("learning_rate_tensors: float")
    .Input("req_time: int64")
    .Input("global_step: int64")
    .Output("table_handles_output: N * resource")
    .Attr("N: int >= 1")
    .Attr("num_of_shards: int >= 1")
    .Attr("enable_grad_accumulation: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables, shards;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("num_of_shards", &shards));
      TF_RETURN_IF_ERROR(FusedSlotSizeShape(c, static_cast<int>(tables) + 2, tables, shards));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Updates several tables for several shards; inputs lie as MonolithHashTableFusedLookup returns them.

id_grads: As many floats as the lookup returned.
learning_rate_tensors: One per segment of each table, tables one after another.
enable_grad_accumulation: Sum the gradients of equal ids of a table first, shards in order.
)doc");

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
