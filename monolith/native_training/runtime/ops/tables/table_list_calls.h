// Lookup and update of several tables whose ids, vectors and gradients stay in one tensor each.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_LIST_CALLS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_LIST_CALLS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// What an update needs of one table.
struct ListedTable {
  engine::EmbeddingTable* table;
  engine::OccurrenceFilter* filter;
  const float* learning_rates;  // one per segment
};

// Allocates output i as [size of ids[i], dims[i]] and fills it. Fails with InvalidArgument if there
// is not one table and dimension per input, or a dimension is not the table's.
Status LookUpLists(OpKernelContext* ctx, const std::vector<engine::EmbeddingTable*>& tables,
                   const std::vector<int64_t>& dims, const OpInputList& ids);

// One optimizer step per table and distinct id, on the sum of the id's gradients; `options` has the
// times. No table may appear twice. Fails with InvalidArgument if a gradient's size does not fit.
Status OptimizeLists(OpKernelContext* ctx, const std::vector<ListedTable>& tables,
                     const OpInputList& ids, const OpInputList& grads,
                     const engine::OptimizeOptions& options);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_LIST_CALLS_H_
