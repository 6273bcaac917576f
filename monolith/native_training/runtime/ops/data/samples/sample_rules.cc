#include "monolith/native_training/runtime/ops/data/samples/sample_rules.h"

#include <random>
#include <utility>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::Comparison;
using ::monolith::data::FidFilter;
using ::monolith::data::TaskLabel;
using ::monolith::data::ValueFilter;
using ::monolith::engine::SlotOfV1;
using ::monolith::engine::SlotOfV2;
using ::monolith::io::proto::FilterValues;
using ::monolith::native_training::data::config::LabelConf;
using ::monolith::native_training::data::config::TaskLabelConf;

float RandomUniform() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return std::uniform_real_distribution<float>(0.0f, 1.0f)(generator);
}

bool Keeps(const FidFilter& filter, const Instance& instance) {
  const LineId& line_id = instance.line_id();
  return filter.Keeps(line_id.req_time(), SpanOf(line_id.actions()), [&](const auto& visit) {
    for (const uint64_t& fid : instance.fid()) visit(&fid, SlotOfV1(fid));
    for (const InstanceFeature& feature : instance.feature()) {
      for (uint64_t fid : feature.fid()) visit(nullptr, SlotOfV2(fid));
      for (const auto& list : feature.fid_list()) {
        for (uint64_t fid : list.value()) visit(nullptr, SlotOfV2(fid));
      }
    }
  });
}

bool Keeps(const FidFilter& filter, const Example& example) {
  const LineId& line_id = example.line_id();
  return filter.Keeps(line_id.req_time(), SpanOf(line_id.actions()), [&](const auto& visit) {
    for (const auto& named : example.named_feature()) {
      const ExampleFeature& feature = named.feature();
      for (const uint64_t& fid : feature.fid_v1_list().value()) visit(&fid, SlotOfV1(fid));
      for (const uint64_t& fid : feature.fid_v2_list().value()) visit(&fid, SlotOfV2(fid));
      for (const auto& list : feature.fid_v1_lists().list()) {
        for (const uint64_t& fid : list.value()) visit(&fid, SlotOfV1(fid));
      }
      for (const auto& list : feature.fid_v2_lists().list()) {
        for (const uint64_t& fid : list.value()) visit(&fid, SlotOfV2(fid));
      }
    }
  });
}

namespace {

// Reads operands from a file into the list of the type.
Status ReadOperandFile(Env* env, DataType dtype, Operands* operands) {
  std::string content;
  TF_RETURN_IF_ERROR(ReadFileToString(env, operands->file, &content));
  FilterValues values;
  if (!values.ParseFromString(content)) {
    return errors::InvalidArgument("operand_filepath ", operands->file,
                                   " is not a serialized FilterValues");
  }
  const bool fits = dtype == DT_INT64   ? values.has_int64_list()
                    : dtype == DT_FLOAT ? values.has_float_list()
                                        : values.has_bytes_list();
  if (!fits) {
    return errors::InvalidArgument("operand_filepath ", operands->file, " holds field ",
                                   static_cast<int>(values.type_case()),
                                   " of FilterValues, want a list of ", DataTypeString(dtype));
  }
  const auto& ints = values.int64_list().value();
  const auto& floats = values.float_list().value();
  const auto& strings = values.bytes_list().value();
  operands->ints.assign(ints.begin(), ints.end());
  operands->floats.assign(floats.begin(), floats.end());
  operands->strings.assign(strings.begin(), strings.end());
  return OkStatus();
}

}  // namespace

Status TypedFilter::Build(Env* env, const std::string& op, DataType dtype, const Operands& given) {
  Comparison comparison{};
  if (!::monolith::data::ParseComparison(op, &comparison)) {
    return errors::InvalidArgument(
        "op is '", op,
        "', want gt, ge, eq, lt, le, neq, between, in, not-in, startswith, endswith, any, all or "
        "diff");
  }
  Operands operands = given;
  if (!operands.file.empty()) {
    if (comparison != Comparison::kIn && comparison != Comparison::kNotIn) {
      return errors::InvalidArgument("operand_filepath is only for in and not-in, but op is '", op,
                                     "'");
    }
    TF_RETURN_IF_ERROR(ReadOperandFile(env, dtype, &operands));
  }
  std::string problem;
  if (dtype == DT_INT64) {
    problem = filter_.emplace<ValueFilter<int64_t>>().Build(comparison, operands.ints);
  } else if (dtype == DT_FLOAT) {
    problem = filter_.emplace<ValueFilter<double>>().Build(
        comparison, std::vector<double>(operands.floats.begin(), operands.floats.end()));
  } else {
    problem = filter_.emplace<ValueFilter<std::string>>().Build(comparison, operands.strings);
  }
  return problem.empty() ? OkStatus() : errors::InvalidArgument("op '", op, "': ", problem);
}

Status LineIdFilter::Build(Env* env, const std::string& field_name, const std::string& op,
                           const Operands& operands, bool keep_empty) {
  keep_empty_ = keep_empty;
  TF_RETURN_IF_ERROR(FindLineIdField(field_name, &field_, &dtype_));
  TF_RETURN_IF_ERROR(filter_.Build(env, op, dtype_, operands));
  Comparison comparison{};
  ::monolith::data::ParseComparison(op, &comparison);
  if (field_->is_repeated() != ::monolith::data::IsListComparison(comparison)) {
    return errors::InvalidArgument("field_name ", field_name, " is ",
                                   field_->is_repeated() ? "a list" : "not a list", ", which op '",
                                   op, "' cannot compare");
  }
  return OkStatus();
}

// T is the type of the filter, Value that of the copied field.
template <typename T, typename Value>
bool LineIdFilter::Compare(const LineId& line_id) const {
  const int64_t size =
      field_->is_repeated() ? LineId::GetReflection()->FieldSize(line_id, field_) : 1;
  if (size == 0) return keep_empty_;
  std::vector<Value> copied(static_cast<size_t>(size));
  CopyLineIdField(line_id, *field_, size, copied.data());
  if (!field_->is_repeated()) return filter_.get<T>().Matches(static_cast<T>(copied[0]));
  std::vector<T> values;
  for (const Value& value : copied) values.push_back(static_cast<T>(value));
  return filter_.get<T>().MatchesList(values);
}

bool LineIdFilter::Keeps(const LineId& line_id) const {
  switch (dtype_) {
    case DT_INT64:
      return Compare<int64_t, int64_t>(line_id);
    case DT_FLOAT:
      return Compare<double, float>(line_id);
    default:
      return Compare<std::string, tstring>(line_id);
  }
}

Status LabelAdder::Build(const LabelConf& conf, float negative_value, float new_sample_rate) {
  if (!(new_sample_rate > 0 && new_sample_rate <= 1)) {
    return errors::InvalidArgument("new_sample_rate is ", new_sample_rate, ", want it in (0, 1]");
  }
  std::vector<TaskLabel> tasks;
  for (const TaskLabelConf& task : conf.conf()) {
    tasks.push_back({{task.pos_actions().begin(), task.pos_actions().end()},
                     {task.neg_actions().begin(), task.neg_actions().end()},
                     task.sample_rate()});
  }
  TF_RETURN_IF_ERROR(FromEngine(::monolith::data::CheckTasks(tasks)));
  tasks_ = std::move(tasks);
  negative_value_ = negative_value;
  new_sample_rate_ = new_sample_rate;
  return OkStatus();
}

void LabelAdder::Apply(LineId* line_id, LabelList* label) const {
  if (label->size() > 0 && label->Get(0) <= 0) label->Set(0, kInvalidLabel);
  for (const TaskLabel& task : tasks_) {
    label->Add(task.Decide(SpanOf(line_id->actions()), negative_value_, RandomUniform));
  }
  line_id->set_sample_rate(new_sample_rate_);
}

}  // namespace monolith_tf
}  // namespace tensorflow
