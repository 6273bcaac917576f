// From one sample format to another.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_CONVERSIONS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_CONVERSIONS_H_

#include <cstdint>

#include "monolith/native_training/runtime/ops/data/samples/sample.h"

namespace tensorflow {
namespace monolith_tf {

// v1 ids are grouped by slot into features fc_slot_<slot>, in the order of their first id.
Example InstanceToExample(const Instance& instance);

// Reserved features fill line_id, label and weight; without them the fields of the Example do.
// Lists of doubles are dropped.
Status ExampleToInstance(const Example& example, Instance* instance);

// Row `row`; reserved columns fill the fields and are not kept. OutOfRange: a column has another
// number of rows.
Status ExampleBatchRow(const ExampleBatch& batch, int64_t row, Example* example);

// Names the parts that a reader leaves out. Numbers are those of FeaturePruningType.
enum class Pruning { kAsIs = 0, kFeature = 1, kRawFeature = 2 };

void Prune(Pruning pruning, Example* example);
void Prune(Pruning pruning, ExampleBatch* batch);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_CONVERSIONS_H_
