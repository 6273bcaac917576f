// Converts configuration protos to the engine's plain structs.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CONFIG_PROTO_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CONFIG_PROTO_H_

#include <string>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/hash_table/expiry.h"
#include "monolith/native_training/runtime/hash_table/table_config.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Converts a table's configuration. InvalidArgument: a value is out of range.
Status TableConfigFromProto(const ::monolith::hash_table::EmbeddingHashTableConfig& proto,
                            ::monolith::engine::TableConfig* config);

// Parses a serialized SlotExpireTimeConfig; empty bytes mean its defaults.
Status ExpiryPolicyFromBytes(const std::string& bytes, ::monolith::engine::ExpiryPolicy* policy);

// Parses a serialized SlotOccurrenceThresholdConfig; empty bytes mean its defaults.
Status ThresholdsFromBytes(const std::string& bytes,
                           ::monolith::engine::OccurrenceThresholdConfig* config);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_CONFIG_PROTO_H_
