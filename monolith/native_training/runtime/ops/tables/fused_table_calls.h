// One call on several tables for several shards, for the kernels on table lists and on groups.
//
// ids and floats lie shard by shard, table by table: segment i = shard * K + table.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

struct FilteredTable {
  ::monolith::engine::EmbeddingTable* table;
  ::monolith::engine::OccurrenceFilter* filter;
};

// Inputs from `first_input` on: ids, fused_slot_size, req_time. Sets all five outputs.
Status FusedLookup(OpKernelContext* ctx, int first_input, const std::vector<FilteredTable>& tables,
                   int64_t num_of_shards);

// Inputs from `first_input` on: ids, indices, fused_slot_size, id_grads, id_offsets, grad_offsets,
// learning_rate_tensors, req_time, global_step. Sets no output.
Status FusedOptimize(OpKernelContext* ctx, int first_input,
                     const std::vector<FilteredTable>& tables, int64_t num_of_shards,
                     bool enable_grad_accumulation);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_FUSED_TABLE_CALLS_H_
