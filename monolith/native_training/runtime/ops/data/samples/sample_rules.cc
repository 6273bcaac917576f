#include "monolith/native_training/runtime/ops/data/samples/sample_rules.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "monolith/native_training/runtime/base/feature_id.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::Comparison;
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

FidFilter::FidFilter(const Config& config)
    : filter_fids_(config.filter_fids.begin(), config.filter_fids.end()),
      has_fids_(config.has_fids.begin(), config.has_fids.end()),
      select_fids_(config.select_fids.begin(), config.select_fids.end()),
      has_actions_(config.has_actions.begin(), config.has_actions.end()),
      select_slots_(config.select_slots.begin(), config.select_slots.end()),
      req_time_min_(config.req_time_min) {}

// visit_ids(f) calls f(fid, slot) for every id; fid is null for ids that only their slot counts.
template <typename Visit>
bool FidFilter::KeepsIds(const LineId& line_id, Visit visit_ids) const {
  if (line_id.req_time() < req_time_min_) return false;
  if (!has_actions_.empty()) {
    const auto& actions = line_id.actions();
    if (std::none_of(actions.begin(), actions.end(),
                     [this](int32_t action) { return has_actions_.contains(action); })) {
      return false;
    }
  }
  if (filter_fids_.empty() && has_fids_.empty() && select_fids_.empty() && select_slots_.empty()) {
    return true;
  }
  bool filtered = false;
  bool has = has_fids_.empty();
  absl::flat_hash_set<uint64_t> selected;
  absl::flat_hash_set<int64_t> slots;
  visit_ids([&](const uint64_t* fid, int64_t slot) {
    if (select_slots_.contains(slot)) slots.insert(slot);
    if (fid == nullptr) return;
    filtered = filtered || filter_fids_.contains(*fid);
    has = has || has_fids_.contains(*fid);
    if (select_fids_.contains(*fid)) selected.insert(*fid);
  });
  return !filtered && has && selected.size() == select_fids_.size() &&
         slots.size() == select_slots_.size();
}

bool FidFilter::Keeps(const Instance& instance) const {
  return KeepsIds(instance.line_id(), [&instance](const auto& visit) {
    for (const uint64_t& fid : instance.fid()) visit(&fid, SlotOfV1(fid));
    for (const InstanceFeature& feature : instance.feature()) {
      for (uint64_t fid : feature.fid()) visit(nullptr, SlotOfV2(fid));
      for (const auto& list : feature.fid_list()) {
        for (uint64_t fid : list.value()) visit(nullptr, SlotOfV2(fid));
      }
    }
  });
}

bool FidFilter::Keeps(const Example& example) const {
  return KeepsIds(example.line_id(), [&example](const auto& visit) {
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

bool KeepsByLabel(const LabelList& label, const std::vector<float>& thresholds, bool filter_equal) {
  if (label.size() < static_cast<int64_t>(thresholds.size())) return false;
  for (size_t i = 0; i < thresholds.size(); ++i) {
    const float value = label[static_cast<int>(i)];
    if (value > thresholds[i] || (value == thresholds[i] && !filter_equal)) return true;
  }
  return false;
}

namespace {

bool HasAny(const LineId& line_id, const ::google::protobuf::RepeatedField<int32_t>& wanted) {
  const auto& actions = line_id.actions();
  return std::any_of(wanted.begin(), wanted.end(), [&actions](int32_t action) {
    return std::find(actions.begin(), actions.end(), action) != actions.end();
  });
}

}  // namespace

Status LabelAdder::Build(const LabelConf& conf, float negative_value, float new_sample_rate) {
  if (!(new_sample_rate > 0 && new_sample_rate <= 1)) {
    return errors::InvalidArgument("new_sample_rate is ", new_sample_rate, ", want it in (0, 1]");
  }
  for (int i = 0; i < conf.conf_size(); ++i) {
    const TaskLabelConf& task = conf.conf(i);
    if (task.pos_actions_size() == 0) {
      return errors::InvalidArgument("config: task ", i, " has no positive action");
    }
    for (int32_t action : task.neg_actions()) {
      const auto& positive = task.pos_actions();
      if (std::find(positive.begin(), positive.end(), action) != positive.end()) {
        return errors::InvalidArgument("config: action ", action, " of task ", i,
                                       " is positive and negative");
      }
    }
  }
  conf_ = conf;
  negative_value_ = negative_value;
  new_sample_rate_ = new_sample_rate;
  return OkStatus();
}

void LabelAdder::Apply(LineId* line_id, LabelList* label) const {
  if (label->size() > 0 && label->Get(0) <= 0) label->Set(0, kInvalidLabel);
  for (const TaskLabelConf& task : conf_.conf()) {
    if (HasAny(*line_id, task.pos_actions())) {
      label->Add(1.0f);
    } else if (task.neg_actions_size() > 0 && !HasAny(*line_id, task.neg_actions())) {
      label->Add(kInvalidLabel);
    } else {
      label->Add(RandomUniform() < task.sample_rate() ? negative_value_ : kInvalidLabel);
    }
  }
  line_id->set_sample_rate(new_sample_rate_);
}

Status ParseInts(const char* what, const std::string& text, std::vector<int64_t>* numbers) {
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    int64_t number;
    if (!absl::SimpleAtoi(part, &number)) {
      return errors::InvalidArgument(what, " is '", text, "', in which '", std::string(part),
                                     "' is not an integer");
    }
    numbers->push_back(number);
  }
  return OkStatus();
}

Status ParseTuples(const char* what, const std::string& text, size_t min, size_t max,
                   std::vector<std::vector<std::string>>* tuples) {
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    std::vector<std::string> tuple = absl::StrSplit(part, ':');
    if (tuple.size() < min || tuple.size() > max) {
      return errors::InvalidArgument(what, " is '", text, "', in which '", std::string(part),
                                     "' has ", tuple.size(), " parts, want ", min, " to ", max);
    }
    tuples->push_back(std::move(tuple));
  }
  return OkStatus();
}

int64_t BestAction(const std::vector<int64_t>& priority,
                   const ::google::protobuf::RepeatedField<int32_t>& actions) {
  for (size_t i = 0; i < priority.size(); ++i) {
    if (std::find(actions.begin(), actions.end(), priority[i]) != actions.end()) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

}  // namespace monolith_tf
}  // namespace tensorflow
