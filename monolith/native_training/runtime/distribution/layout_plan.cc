#include "monolith/native_training/runtime/distribution/layout_plan.h"

#include <utility>

namespace monolith {
namespace distribution {
namespace {

// Larger tensors cannot be allocated; the bound keeps products of sizes inside int64.
constexpr int64_t kMaxRowSize = int64_t{1} << 40;
constexpr size_t kMaxDimensions = 254;  // of TensorFlow's tensors

std::string Text(int64_t value) { return std::to_string(value); }

}  // namespace

std::string LayoutPlan::Build(const LayoutConfig& config) {
  std::map<std::string, int64_t> table_index;
  for (const auto& entry : config.features) table_index.emplace(entry.second.table, 0);
  for (auto& entry : table_index) {
    entry.second = static_cast<int64_t>(tables_.size());
    tables_.emplace_back();
  }
  for (const auto& [name, feature] : config.features) {
    if (feature.width <= 0 || feature.width > INT32_MAX) {
      return "slice_dims of feature '" + name + "' add up to " + Text(feature.width) +
             ", want a width in [1, 2147483647]";
    }
    const bool first_n = feature.pooling == Pooling::kFirstN;
    if (first_n && feature.max_sequence_length <= 0) {
      return "max_sequence_length of FIRSTN feature '" + name + "' is " +
             Text(feature.max_sequence_length) + ", want more than 0";
    }
    const int64_t index = static_cast<int64_t>(features_.size());
    const int64_t table = table_index[feature.table];
    tables_[table].push_back(index);
    feature_index_[name] = index;
    features_.push_back({name,
                         table,
                         feature.width,
                         feature.pooling,
                         first_n ? feature.max_sequence_length : 1,
                         {}});
  }
  for (const auto& [layout, out] : config.outs) {
    std::string error = AddOut(layout, out);
    if (!error.empty()) return "layout '" + layout + "': " + error;
  }
  return "";
}

std::string LayoutPlan::AddOut(const std::string& layout, const LayoutOutConfig& out) {
  const int64_t num_slices = static_cast<int64_t>(out.slices.size());
  const int64_t want_shapes = out.type == OutType::kNone ? num_slices : 1;
  if (num_slices == 0) return "no slice_configs";
  if (static_cast<int64_t>(out.shapes.size()) != want_shapes) {
    return Text(out.shapes.size()) + " shapes, want " + Text(want_shapes);
  }

  const int64_t output = static_cast<int64_t>(outputs_.size());
  const bool add = out.type == OutType::kAddN;
  std::vector<std::pair<Feature*, Target>> targets;
  int64_t total_width = 0;
  for (int64_t s = 0; s < num_slices; ++s) {
    const LayoutSliceConfig& slice = out.slices[s];
    const auto found = feature_index_.find(slice.feature);
    if (found == feature_index_.end()) return "unknown feature '" + slice.feature + "'";
    Feature& feature = features_[found->second];
    if (slice.start < 0 || slice.start >= slice.end || slice.end > feature.width) {
      return "slice [" + Text(slice.start) + ", " + Text(slice.end) + ") of feature '" +
             slice.feature + "' is not inside its width " + Text(feature.width);
    }
    const int64_t width = slice.end - slice.start;
    const Feature& first = targets.empty() ? feature : *targets[0].first;
    if (add && feature.pooling == Pooling::kFirstN) {
      return "ADDN cannot hold FIRSTN feature '" + slice.feature + "'";
    }
    if (out.type != OutType::kNone) {
      const bool first_n = feature.pooling == Pooling::kFirstN;
      if (first_n != (first.pooling == Pooling::kFirstN) || feature.positions != first.positions) {
        return "feature '" + slice.feature + "' has " + Text(first_n ? feature.positions : 0) +
               " FIRSTN positions, '" + first.name + "' has " +
               Text(first.pooling == Pooling::kFirstN ? first.positions : 0);
      }
    }
    if ((add || out.type == OutType::kStack) && !targets.empty() &&
        width != targets[0].second.width) {
      return "slice of feature '" + slice.feature + "' has width " + Text(width) + ", want " +
             Text(targets[0].second.width) + " like the first slice";
    }

    Target target{output, 0, width, slice.start, width, add};
    if (out.type == OutType::kConcat) target.column = total_width;
    if (out.type == OutType::kStack) target.column = s * feature.positions * width;
    if (out.type == OutType::kNone) target.output = output + s;
    targets.emplace_back(&feature, target);
    total_width += width;
    if (total_width > kMaxRowSize / feature.positions) return "a batch row is too large";
  }

  const int64_t positions = targets[0].first->positions;
  if (out.type == OutType::kConcat) {
    for (auto& entry : targets) entry.second.step = total_width;
  }
  for (const auto& [feature, target] : targets) feature->targets.push_back(target);

  if (out.type == OutType::kNone) {
    for (int64_t s = 0; s < num_slices; ++s) {
      const auto& [feature, target] = targets[s];
      std::string error =
          AddOutput(layout, out.shapes[s], feature->positions * target.width, false);
      if (!error.empty()) return error;
    }
    return "";
  }
  return AddOutput(layout, out.shapes[0], add ? targets[0].second.width : positions * total_width,
                   add);
}

std::string LayoutPlan::AddOutput(const std::string& layout, const std::vector<int64_t>& shape,
                                  int64_t row_size, bool add) {
  if (shape.empty()) return "a shape has no dimensions, want the batch first";
  if (shape.size() > kMaxDimensions) {
    return "a shape has " + Text(shape.size()) + " dimensions, want at most " +
           Text(kMaxDimensions);
  }
  if (shape[0] != -1 && shape[0] <= 0) {
    return "the first dimension of a shape is " + Text(shape[0]) + ", want -1 or more than 0";
  }
  int64_t size = 1;
  for (size_t d = 1; d < shape.size(); ++d) {
    if (shape[d] <= 0) {
      return "dimension " + Text(d) + " of a shape is " + Text(shape[d]) + ", want more than 0";
    }
    if (shape[d] > kMaxRowSize / size) return "a shape is too large";
    size *= shape[d];
  }
  if (size != row_size) {
    return "a shape has " + Text(size) + " elements per example, its slices have " + Text(row_size);
  }
  outputs_.push_back({layout, shape, row_size, add});
  return "";
}

}  // namespace distribution
}  // namespace monolith
