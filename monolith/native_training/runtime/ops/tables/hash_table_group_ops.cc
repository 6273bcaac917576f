// Single tables in the files of a group: what graph mode trains as one resource, others hold as
// tables of their own.
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_group_kernels.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithHashTableSaveGroup")
    .Input("handle: resource")
    .Input("basename: string")
    .Input("others: num_others * resource")
    .Output("output_handle: resource")
    .Attr("num_others: int >= 0")
    .Attr("names: list(string) >= 1")
    .Attr("nshards: int = -1")
    .Attr("slot_expire_time_config: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Writes tables to the files of a group, as MonolithMultiHashTableSave does.

handle: The first table.
basename: Scalar.
others: The other tables.
names: The names of the tables in the group.
nshards: Number of files; -1 lets the size decide.
slot_expire_time_config: A serialized SlotExpireTimeConfig.
)doc");

REGISTER_OP("MonolithHashTableRestoreGroup")
    .Input("handle: resource")
    .Input("basename: string")
    .Input("others: num_others * resource")
    .Output("output_handle: resource")
    .Attr("num_others: int >= 0")
    .Attr("names: list(string) >= 1")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the content of tables by that of the tables of these names in the files of a group.

handle: The first table.
basename: Scalar.
others: The other tables.
names: The names of the tables in the group. Fails if one is not there; nothing changes then.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSaveGroup").Device(DEVICE_CPU),
                        HashTableSaveGroupOp<HashTableResource, NamedTable>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestoreGroup").Device(DEVICE_CPU),
                        HashTableRestoreGroupOp<HashTableResource, NamedTable>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
