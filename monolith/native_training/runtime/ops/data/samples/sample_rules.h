// The rules of runtime/data on samples, and those that need LineId's fields by name: kernels and
// TransformDataset share them. Rules are immutable once built, so several threads may use one.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "monolith/native_training/data/data_op_config.pb.h"
#include "monolith/native_training/runtime/data/actions.h"
#include "monolith/native_training/runtime/data/label_rules.h"
#include "monolith/native_training/runtime/data/sample_filters.h"
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

// Borrowed, as the rules of runtime/data take them.
template <typename T>
::monolith::data::Span<T> SpanOf(const ::google::protobuf::RepeatedField<T>& values) {
  return {values.data(), values.size()};
}

// Returns the filter's verdict on the ids of a sample.
bool Keeps(const ::monolith::data::FidFilter& filter, const Instance& instance);
bool Keeps(const ::monolith::data::FidFilter& filter, const Example& example);

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

// Appends one label per task, decided by actions.
class LabelAdder {
 public:
  // InvalidArgument: a rate is not in (0, 1], or a task has no or contradicting actions.
  Status Build(const ::monolith::native_training::data::config::LabelConf& conf,
               float negative_value, float new_sample_rate);

  void Apply(LineId* line_id, LabelList* label) const;

 private:
  std::vector<::monolith::data::TaskLabel> tasks_;
  float negative_value_ = 0;
  float new_sample_rate_ = 1;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_RULES_H_
