// What filters and label ops decide about one sample, without tensors: kernels and TransformDataset
// share it. Rules are immutable once built, so several threads may use one.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "monolith/native_training/data/data_op_config.pb.h"
#include "monolith/native_training/runtime/data/value_filter.h"
#include "monolith/native_training/runtime/ops/data/parse/line_id.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/platform/env.h"

namespace tensorflow {
namespace monolith_tf {

// Labels of one sample, copies made of one, and negatives drawn for one: each takes memory, and
// none is wanted in such numbers.
inline constexpr int64_t kMaxLabels = 1 << 16;
inline constexpr int64_t kMaxCopies = 1 << 20;
inline constexpr int64_t kMaxNegatives = 1 << 16;

using LabelList = ::google::protobuf::RepeatedField<float>;

// Uniform in [0, 1), from a generator of the calling thread.
float RandomUniform();

// Keeps samples by their ids, slots, actions and request time. Empty lists ask for nothing.
class FidFilter {
 public:
  struct Config {
    std::vector<int64_t> filter_fids;   // none of them
    std::vector<int64_t> has_fids;      // at least one
    std::vector<int64_t> select_fids;   // all
    std::vector<int64_t> has_actions;   // at least one
    std::vector<int64_t> select_slots;  // all
    int64_t req_time_min = 0;
  };

  explicit FidFilter(const Config& config);

  bool Keeps(const Instance& instance) const;
  bool Keeps(const Example& example) const;

 private:
  template <typename Visit>
  bool KeepsIds(const LineId& line_id, Visit visit_ids) const;

  absl::flat_hash_set<uint64_t> filter_fids_, has_fids_, select_fids_;
  absl::flat_hash_set<int64_t> has_actions_, select_slots_;
  int64_t req_time_min_;
};

// Operands of a comparison as op attributes carry them: the list that fits the type is used.
struct Operands {
  std::vector<float> floats;
  std::vector<int64_t> ints;
  std::vector<std::string> strings;
  std::string file;  // a serialized FilterValues instead, for in and not-in only
};

// A comparison with operands of one type.
class TypedFilter {
 public:
  // InvalidArgument: the comparison is unknown or has bad operands.
  Status Build(Env* env, const std::string& op, DataType dtype, const Operands& operands);

  template <typename T>
  const ::monolith::data::ValueFilter<T>& get() const {
    return std::get<::monolith::data::ValueFilter<T>>(filter_);
  }

 private:
  std::variant<::monolith::data::ValueFilter<int64_t>, ::monolith::data::ValueFilter<double>,
               ::monolith::data::ValueFilter<std::string>>
      filter_;
};

// Compares a field of LineId.
class LineIdFilter {
 public:
  Status Build(Env* env, const std::string& field_name, const std::string& op,
               const Operands& operands, bool keep_empty);

  bool Keeps(const LineId& line_id) const;

  bool is_repeated() const { return field_->is_repeated(); }

 private:
  template <typename T, typename Tensor>
  bool Compare(const LineId& line_id) const;

  const LineIdField* field_ = nullptr;
  DataType dtype_ = DT_INT64;
  TypedFilter filter_;
  bool keep_empty_ = false;
};

// True if some label is above its threshold, or equal to it unless `filter_equal`.
bool KeepsByLabel(const LabelList& label, const std::vector<float>& thresholds, bool filter_equal);

// Appends one label per task, decided by actions.
class LabelAdder {
 public:
  // InvalidArgument: a rate is not in (0, 1], or a task has no or contradicting actions.
  Status Build(const ::monolith::native_training::data::config::LabelConf& conf,
               float negative_value, float new_sample_rate);

  void Apply(LineId* line_id, LabelList* label) const;

 private:
  ::monolith::native_training::data::config::LabelConf conf_;
  float negative_value_ = 0;
  float new_sample_rate_ = 1;
};

// "2,3,4" -> numbers. InvalidArgument names `what`.
Status ParseInts(const char* what, const std::string& text, std::vector<int64_t>* numbers);

// "a:b,c:d" -> {{a, b}, {c, d}}, with at least `min` and at most `max` parts each.
Status ParseTuples(const char* what, const std::string& text, size_t min, size_t max,
                   std::vector<std::vector<std::string>>* tuples);

// Index of the first of `priority` that is among the actions, or -1.
int64_t BestAction(const std::vector<int64_t>& priority,
                   const ::google::protobuf::RepeatedField<int32_t>& actions);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_
