#include "monolith/native_training/runtime/data/sample_filters.h"

#include "monolith/native_training/runtime/data/text_lists.h"

namespace monolith {
namespace data {

using engine::Status;

bool KeepsByLabel(Span<float> labels, const std::vector<float>& thresholds, bool filter_equal) {
  if (labels.size < static_cast<int64_t>(thresholds.size())) return false;
  for (size_t i = 0; i < thresholds.size(); ++i) {
    const float label = labels.data[i];
    if (label > thresholds[i] || (label == thresholds[i] && !filter_equal)) return true;
  }
  return false;
}

Status StrategyFilter::Build(const std::vector<int64_t>& priority, const std::string& conf,
                             bool keep_empty) {
  std::vector<std::vector<std::string>> tuples;
  Status status = ParseTuples("strategy_conf", conf, 2, 3, &tuples);
  if (!status.ok()) return status;
  for (const std::vector<std::string>& tuple : tuples) {
    int64_t strategy = 0;
    Treatment treatment;
    treatment.has_label = tuple.size() == 3;
    if (!ParseNumber(tuple[0], &strategy) || !ParseNumber(tuple[1], &treatment.rate) ||
        (treatment.has_label && !ParseNumber(tuple[2], &treatment.label))) {
      return Status::InvalidArgument("strategy_conf is '" + conf +
                                     "', want strategy:rate[:label] numbers");
    }
    treatments_[strategy] = treatment;
  }
  priority_ = priority;
  keep_empty_ = keep_empty;
  return Status::Ok();
}

Status NegativeFilter::Build(const Config& config) {
  drop_rate_ = config.drop_rate;
  label_index_ = config.label_index;
  threshold_ = config.threshold;
  if (label_index_ < 0) {
    return Status::InvalidArgument("label_index is " + std::to_string(label_index_) +
                                   ", want 0 or more");
  }
  if (config.action_priority.empty() || config.per_action_drop_rate.empty()) return Status::Ok();
  Status status = ParseInts("action_priority", config.action_priority, &priority_);
  if (!status.ok()) return status;
  std::vector<std::vector<std::string>> tuples;
  status = ParseTuples("per_action_drop_rate", config.per_action_drop_rate, 2, 2, &tuples);
  if (!status.ok()) return status;
  for (const std::vector<std::string>& tuple : tuples) {
    int64_t action = 0;
    float rate = 0;
    if (!ParseNumber(tuple[0], &action) || !ParseNumber(tuple[1], &rate)) {
      return Status::InvalidArgument("per_action_drop_rate is '" + config.per_action_drop_rate +
                                     "', want action:rate numbers");
    }
    rates_[action] = rate;
  }
  return Status::Ok();
}

float NegativeFilter::DropRate(Actions actions) const {
  const int64_t best = BestAction(priority_, actions);
  if (best < 0 || priority_[best] <= 0) return drop_rate_;
  const auto it = rates_.find(priority_[best]);
  return it == rates_.end() ? drop_rate_ : it->second;
}

}  // namespace data
}  // namespace monolith
