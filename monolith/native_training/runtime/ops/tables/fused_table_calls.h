// Serves several tables for several shards in one call, for the kernels on table lists and groups.
//
// Ids and floats lie shard by shard, table by table: segment i = shard * K + table.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

struct FilteredTable {
  ::monolith::engine::EmbeddingTable* table;
  ::monolith::engine::OccurrenceFilter* filter;
};

// Sets the outputs of a fused lookup that tell where things are: 1 to 3.
Status OutputFusedOffsets(OpKernelContext* ctx, const FusedOffsets& offsets, int64_t num_of_shards);

// Checks the inputs of a fused update against tables of these dimensions, and this many segments in
// all.
Status CheckFusedUpdate(OpKernelContext* ctx, int first_input, const std::vector<int64_t>& dims,
                        int64_t num_segments, int64_t num_of_shards, FusedOffsets* offsets);

// Reads ids, fused_slot_size and req_time from `first_input` on. Sets all five outputs.
Status FusedLookup(OpKernelContext* ctx, int first_input, const std::vector<FilteredTable>& tables,
                   int64_t num_of_shards);

// Reads ids, indices, fused_slot_size, id_grads, id_offsets, grad_offsets, learning_rate_tensors,
// req_time and global_step from `first_input` on. Sets no output.
Status FusedOptimize(OpKernelContext* ctx, int first_input,
                     const std::vector<FilteredTable>& tables, int64_t num_of_shards,
                     bool enable_grad_accumulation);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_
