// Maps every slice of every feature to its columns of an output tensor: the configuration of the
// fused layout ops, checked and resolved once per op.
//
// A feature's ids have an embedding of `width` columns. A slice takes columns [start, end) of it,
// pooled over the ids of an example, and an output joins slices (B = batch, N =
// max_sequence_length):
//
//              SUM, MEAN            FIRSTN
//   kConcat    [B, sum of widths]   [B, N, sum of widths]     slices side by side
//   kStack     [B, slices, width]   [B, slices, N, width]
//   kAddN      [B, width]           not allowed               sum of the slices
//   kNone      [B, width]           [B, N, width]             one output per slice
//
// Features, tables and layouts are indexed in the byte order of their names.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_LAYOUT_PLAN_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_LAYOUT_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace monolith {
namespace distribution {

enum class Pooling { kSum, kMean, kFirstN };
enum class OutType { kConcat, kStack, kAddN, kNone };

struct LayoutFeatureConfig {
  std::string table;
  Pooling pooling = Pooling::kSum;
  int64_t width = 0;
  int64_t max_sequence_length = 0;
};

struct LayoutSliceConfig {
  std::string feature;
  int64_t start = 0;
  int64_t end = 0;
};

struct LayoutOutConfig {
  OutType type = OutType::kConcat;
  std::vector<LayoutSliceConfig> slices;
  std::vector<std::vector<int64_t>> shapes;  // the first dimension is the batch, -1 for any
};

struct LayoutConfig {
  std::map<std::string, LayoutFeatureConfig> features;
  std::map<std::string, LayoutOutConfig> outs;
};

class LayoutPlan {
 public:
  // One slice of a feature in one output.
  struct Target {
    int64_t output;
    int64_t column;  // first float inside the output's row
    int64_t step;    // floats from one FIRSTN position to the next
    int64_t start;   // first column of the embedding
    int64_t width;
    bool add;  // several slices share the place
  };

  struct Feature {
    std::string name;
    int64_t table;
    int64_t width;
    Pooling pooling;
    int64_t positions;  // N of FIRSTN, else 1
    std::vector<Target> targets;
  };

  struct Output {
    std::string layout;
    std::vector<int64_t> dims;
    int64_t row_size;  // floats of one batch row
    bool add;
  };

  // Returns an empty string, or what is wrong with the configuration.
  std::string Build(const LayoutConfig& config);

  const std::vector<Feature>& features() const { return features_; }
  const std::vector<Output>& outputs() const { return outputs_; }

  // Features of each table, ascending.
  const std::vector<std::vector<int64_t>>& tables() const { return tables_; }

 private:
  std::string AddOut(const std::string& layout, const LayoutOutConfig& out);
  std::string AddOutput(const std::string& layout, const std::vector<int64_t>& shape,
                        int64_t row_size, bool add);

  std::vector<Feature> features_;
  std::vector<Output> outputs_;
  std::vector<std::vector<int64_t>> tables_;
  std::map<std::string, int64_t> feature_index_;
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_LAYOUT_PLAN_H_
