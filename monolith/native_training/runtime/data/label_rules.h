// How labels follow from the actions of a sample, whatever its format. Rules are immutable once
// built, so several threads may use one.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_LABEL_RULES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_LABEL_RULES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/data/actions.h"

namespace monolith {
namespace data {

// The label of a sample that a task does not learn from.
constexpr float kInvalidLabel = -std::numeric_limits<float>::max();

// The label of one task, decided by actions.
struct TaskLabel {
  std::vector<int32_t> positive;  // any of them: 1
  std::vector<int32_t> negative;  // else any of them, or none given: the negative value
  float sample_rate = 1;          // of the negative ones; the others become invalid

  // uniform() is in [0, 1).
  template <typename Uniform>
  float Decide(Actions actions, float negative_value, const Uniform& uniform) const {
    if (HasAny(actions, positive)) return 1.0f;
    if (!negative.empty() && !HasAny(actions, negative)) return kInvalidLabel;
    return uniform() < sample_rate ? negative_value : kInvalidLabel;
  }

 private:
  static bool HasAny(Actions actions, const std::vector<int32_t>& wanted);
};

// InvalidArgument: a task has no positive action, or one that is negative too.
engine::Status CheckTasks(const std::vector<TaskLabel>& tasks);

// The label of the best action, or of the first one where none has a priority.
struct ActionLabels {
  std::vector<int64_t> priority;
  std::vector<int64_t> positive, negative;
  float positive_label = 1, negative_label = 0;

  // kInvalidLabel: no action, or one that is neither.
  float Of(Actions actions) const;
};

// How often a sample is emitted, by the weights of its actions now and before.
class ReweightRules {
 public:
  struct Rule {
    int64_t weight;
    float label;
  };

  ReweightRules(std::unordered_map<int64_t, Rule> rules, std::vector<int64_t> priorities)
      : rules_(std::move(rules)), priorities_(std::move(priorities)) {}

  // May change the label, the first one of the sample. 0 or less: not at all. Counts that are too
  // large for any use end at 2^40 or twice that.
  int64_t Apply(Actions actions, Actions before, float* label) const;

 private:
  // 1 for the best action; larger is worse.
  int64_t Priority(Actions actions) const;
  // The product of the weights of the best action and of those without a priority.
  int64_t Count(Actions actions) const;
  // The rule of the best action, else of the first one.
  const Rule* BestRule(Actions actions) const;

  std::unordered_map<int64_t, Rule> rules_;
  std::vector<int64_t> priorities_;
};

// Names the ways in which LabelNormalization treats a label x and a value v.
enum class Normalization {
  kLog,         // log(max(x + v, 0))
  kScale,       // x / v
  kScaleToInt,  // trunc(x / v)
  kPow,         // (x + 1)^v
  kRepow,       // x^v, and 0 unless x > 0
  kScaleLog,    // log(max(x / v + 1, 0))
};

// False: there is no such method.
bool ParseNormalization(std::string_view name, Normalization* method);
float Normalize(Normalization method, float x, float v);

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_LABEL_RULES_H_
