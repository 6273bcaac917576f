// Splits the ids of a batch by hash table and parameter server, for the fused embedding layout.
//
// Features and tables are numbered in the order of their names. With P servers, list j = t * P + p
// holds the ids of table t that live on server p, feature after feature:
//
//   fid_list[j]     | ids of feature 0 of t | ids of feature 1 of t | ...
//   row_splits[j]   0                       n0                      n0 + n1 ...
//
// Every occurrence of an id gets one 64-bit offset, high half and low half as OffsetKind says, that
// tells where its embedding is going to be. Occurrences lie feature after feature, row after row:
//
//   feature_offset   start of every (feature, row) in fid_offset, and the total
//   nfl_offset       start of every feature in feature_offset; bit 31: one row for the whole batch
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_SHARDING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_SHARDING_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

namespace monolith {
namespace data {

// Names the two halves of a fid_offset.
enum class OffsetKind {
  kListPosition,     // list j, position in fid_list[j]
  kFeaturePosition,  // (table, server, feature) block, position in the feature's own ids
  kFloatOffset,      // list j, floats before its embedding in the answer to fid_list[j]
};

struct ShardedFeatureConfig {
  std::string table;
  int64_t width = 0;  // floats of one embedding; only kFloatOffset needs them
};

// The order of features and tables, resolved once per op.
class ShardingPlan {
 public:
  struct Feature {
    std::string name;
    int64_t table = 0;
    int64_t index_in_table = 0;
    int64_t width = 0;
  };

  // Returns an empty string, or what is wrong with the configuration.
  std::string Build(const std::map<std::string, ShardedFeatureConfig>& features, OffsetKind kind);

  const std::vector<Feature>& features() const { return features_; }
  int64_t num_tables() const { return static_cast<int64_t>(tables_.size()); }
  const std::vector<std::string>& table_names() const { return table_names_; }
  // Features of each table, ascending.
  const std::vector<std::vector<int64_t>>& tables() const { return tables_; }

 private:
  std::vector<Feature> features_;
  std::vector<std::string> table_names_;
  std::vector<std::vector<int64_t>> tables_;
};

// The ids of one feature in one row. Points into the sample.
struct FidSpan {
  const uint64_t* fids = nullptr;
  int64_t size = 0;
  bool is_v1 = false;  // converted to v2 before sharding
};

// Rows of one feature: one span, or several for a sequence feature, per row.
struct FeatureRows {
  bool shared = false;                 // a single row for the whole batch
  std::vector<FidSpan> spans;          // of all rows, in order
  std::vector<int64_t> row_splits{0};  // rows + 1 positions in spans

  int64_t num_rows() const { return static_cast<int64_t>(row_splits.size()) - 1; }
  void AddRow() { row_splits.push_back(static_cast<int64_t>(spans.size())); }
};

struct ShardedFids {
  std::vector<std::vector<int64_t>> fid_lists;   // [tables * servers]
  std::vector<std::vector<int64_t>> row_splits;  // [tables * servers][features of the table + 1]
  std::vector<int64_t> embedding_sizes;          // [tables * servers], floats
  std::vector<uint64_t> fid_offset;
  std::vector<int32_t> feature_offset;
  std::vector<uint32_t> nfl_offset;
};

// Shards `rows`, one entry per feature of the plan. With `unique` an id is listed once per feature.
// The result does not depend on `parallel`. Returns an empty string, or why offsets overflow.
std::string ShardFids(const ShardingPlan& plan, const std::vector<FeatureRows>& rows,
                      int64_t num_servers, bool unique, OffsetKind kind,
                      const engine::ParallelRunner& parallel, ShardedFids* out);

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FID_SHARDING_H_
