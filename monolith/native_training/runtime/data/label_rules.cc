#include "monolith/native_training/runtime/data/label_rules.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <utility>

namespace monolith {
namespace data {
namespace {

constexpr int64_t kTooMany = int64_t{1} << 40;
constexpr int64_t kUnlisted = 1000;
constexpr int64_t kNoAction = 2000;

}  // namespace

bool TaskLabel::HasAny(Actions actions, const std::vector<int32_t>& wanted) {
  return std::any_of(wanted.begin(), wanted.end(),
                     [actions](int32_t action) { return Contains(actions, action); });
}

engine::Status CheckTasks(const std::vector<TaskLabel>& tasks) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].positive.empty()) {
      return engine::Status::InvalidArgument("config: task " + std::to_string(i) +
                                             " has no positive action");
    }
    for (const int32_t action : tasks[i].negative) {
      if (!Contains(tasks[i].positive, action)) continue;
      return engine::Status::InvalidArgument("config: action " + std::to_string(action) +
                                             " of task " + std::to_string(i) +
                                             " is positive and negative");
    }
  }
  return engine::Status::Ok();
}

float ActionLabels::Of(Actions actions) const {
  if (actions.empty()) return kInvalidLabel;
  const int64_t action = BestOrFirst(priority, actions);
  return Contains(positive, action)   ? positive_label
         : Contains(negative, action) ? negative_label
                                      : kInvalidLabel;
}

int64_t ReweightRules::Priority(Actions actions) const {
  if (actions.empty()) return kNoAction;
  const int64_t best = BestAction(priorities_, actions);
  return best < 0 ? kUnlisted : best + 1;
}

int64_t ReweightRules::Count(Actions actions) const {
  if (actions.empty()) return 0;
  const int64_t best = BestAction(priorities_, actions);
  int64_t count = 1;
  for (const int32_t action : actions) {
    if (Contains(priorities_, action) && (best < 0 || action != priorities_[best])) continue;
    const auto it = rules_.find(action);
    if (it == rules_.end()) continue;
    // A count that is too large stays so, whatever comes after it.
    if (__builtin_mul_overflow(count, it->second.weight, &count)) return kTooMany;
  }
  return std::clamp(count, -kTooMany, kTooMany);
}

const ReweightRules::Rule* ReweightRules::BestRule(Actions actions) const {
  if (actions.empty()) return nullptr;
  const auto it = rules_.find(BestOrFirst(priorities_, actions));
  return it == rules_.end() ? nullptr : &it->second;
}

int64_t ReweightRules::Apply(Actions actions, Actions before, float* label) const {
  if (Priority(before) <= Priority(actions)) return actions.empty() && before.empty() ? 1 : 0;
  const int64_t count = Count(actions);
  if (const Rule* rule = BestRule(actions)) *label = rule->label;
  const Rule* const rule_before = BestRule(before);
  if (rule_before == nullptr) return count;
  const int64_t count_before = Count(before);
  if (*label != rule_before->label) return count_before + count;
  if (count_before > count) *label = -*label;
  return std::abs(count - count_before);
}

bool ParseNormalization(std::string_view name, Normalization* method) {
  static constexpr std::pair<std::string_view, Normalization> kNames[] = {
      {"log", Normalization::kLog},
      {"scale", Normalization::kScale},
      {"scale2int", Normalization::kScaleToInt},
      {"pow", Normalization::kPow},
      {"repow", Normalization::kRepow},
      {"scalelog", Normalization::kScaleLog},
  };
  for (const auto& [known, value] : kNames) {
    if (known != name) continue;
    *method = value;
    return true;
  }
  return false;
}

float Normalize(Normalization method, float x, float v) {
  switch (method) {
    case Normalization::kLog:
      return std::log(std::max(x + v, 0.0f));
    case Normalization::kScale:
      return x / v;
    case Normalization::kScaleToInt:
      return std::trunc(x / v);
    case Normalization::kPow:
      return std::pow(x + 1, v);
    case Normalization::kRepow:
      return x > 0 ? std::pow(x, v) : 0.0f;
    case Normalization::kScaleLog:
      break;
  }
  return std::log(std::max(x / v + 1, 0.0f));
}

}  // namespace data
}  // namespace monolith
