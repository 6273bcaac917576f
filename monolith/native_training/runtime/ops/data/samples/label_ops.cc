// Ops that change the labels or actions of a sample: scalar variant -> variant, for Dataset.map.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/data/label_rules.h"
#include "monolith/native_training/runtime/data/text_lists.h"
#include "monolith/native_training/runtime/ops/data/parse/line_id.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_rules.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

#define REGISTER_LABEL_OP(name)  \
  REGISTER_OP(name)              \
      .Input("input: variant")   \
      .Output("output: variant") \
      .SetShapeFn(shape_inference::ScalarShape)

REGISTER_LABEL_OP("AddAction")
    .Attr("field_name: string")
    .Attr("op: string")
    .Attr("float_operand: list(float) = []")
    .Attr("int_operand: list(int) = []")
    .Attr("string_operand: list(string) = []")
    .Attr("action: int")
    .Attr("variant_type: string = 'example'")
    .Doc("Appends an action when a field of LineId compares true.");

REGISTER_LABEL_OP("AddLabel")
    .SetIsStateful()  // draws random numbers
    .Attr("config: string")
    .Attr("negative_value: float")
    .Attr("sample_rate: float")
    .Attr("variant_type: string = 'example'")
    .Doc("Appends a label per task of the serialized LabelConf; sample_rate goes into LineId.");

REGISTER_LABEL_OP("ScatterLabel")
    .Attr("config: string")
    .Attr("variant_type: string = 'example'")
    .Doc("Moves the first label to the index that config, 'chnid:index,...', gives its channel.");

REGISTER_LABEL_OP("LabelUpperBound")
    .Attr("label_upper_bounds: list(float)")
    .Attr("variant_type: string = 'instance'")
    .Doc("Cuts labels; does nothing when there are fewer labels than bounds.");

REGISTER_LABEL_OP("LabelNormalization")
    .Attr("norm_methods: list(string)")
    .Attr("norm_values: list(float)")
    .Attr("variant_type: string = 'instance'")
    .Doc("Applies log, scale, scale2int, pow, repow or scalelog to every label, one by one.");

REGISTER_LABEL_OP("UseFieldAsLabel")
    .Attr("field_name: string")
    .Attr("overwrite_invalid_value: bool = false")
    .Attr("label_threshold: float = 7200")
    .Attr("variant_type: string = 'instance'")
    .Doc("Raises labels to a numeric field of LineId.");

REGISTER_LABEL_OP("MultiLabelGen")
    .Attr("head_to_index: string")
    .Attr("head_field: string = 'chnid'")
    .Attr("pos_actions: list(int) = []")
    .Attr("neg_actions: list(int) = []")
    .Attr("use_origin_label: bool = false")
    .Attr("pos_label: float = 1.0")
    .Attr("neg_label: float = 0.0")
    .Attr("action_priority: string = ''")
    .Attr("task_num: int")
    .Attr("variant_type: string = 'example'")
    .Doc("Puts the sample's label at the index of its head, 'head:index,...'.");

REGISTER_LABEL_OP("FillMultiRankOutput")
    .Attr("enable_draw_as_rank: bool = false")
    .Attr("enable_chnid_as_rank: bool = false")
    .Attr("enable_lineid_rank_as_rank: bool = false")
    .Attr("rank_num: int = 18")
    .Attr("variant_type: string = 'instance'")
    .Doc("Appends the rank of the sample to its labels.");

// Rule: Status Init(OpKernelConstruction*), void Apply(LineId*, LabelList*) const.
template <typename Rule>
class LabelOp : public OpKernel {
 public:
  explicit LabelOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetRowType(ctx, &type_));
    OP_REQUIRES_OK(ctx, rule_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx,
                   VisitRowType(type_, [&](auto tag) { return Run<ProtoOf<decltype(tag)>>(ctx); }));
  }

 private:
  template <typename Proto>
  Status Run(OpKernelContext* ctx) const {
    Tensor output;
    Proto* sample;
    TF_RETURN_IF_ERROR(MutableSample(ctx, &output, &sample));
    rule_.Apply(sample->mutable_line_id(), sample->mutable_label());
    ctx->set_output(0, output);
    return OkStatus();
  }

  SampleType type_;
  Rule rule_;
};

class AddActionRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string field_name, op;
    Operands operands;
    TF_RETURN_IF_ERROR(ctx->GetAttr("field_name", &field_name));
    TF_RETURN_IF_ERROR(ctx->GetAttr("op", &op));
    TF_RETURN_IF_ERROR(ctx->GetAttr("float_operand", &operands.floats));
    TF_RETURN_IF_ERROR(ctx->GetAttr("int_operand", &operands.ints));
    TF_RETURN_IF_ERROR(ctx->GetAttr("string_operand", &operands.strings));
    TF_RETURN_IF_ERROR(ctx->GetAttr("action", &action_));
    return filter_.Build(ctx->env(), field_name, op, operands, /*keep_empty=*/false);
  }

  void Apply(LineId* line_id, LabelList*) const {
    if (filter_.Keeps(*line_id)) line_id->add_actions(action_);
  }

 private:
  LineIdFilter filter_;
  int32_t action_;
};

class AddLabelRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string config;
    float negative_value, sample_rate;
    TF_RETURN_IF_ERROR(ctx->GetAttr("config", &config));
    TF_RETURN_IF_ERROR(ctx->GetAttr("negative_value", &negative_value));
    TF_RETURN_IF_ERROR(ctx->GetAttr("sample_rate", &sample_rate));
    ::monolith::native_training::data::config::LabelConf conf;
    if (!conf.ParseFromString(config)) {
      return errors::InvalidArgument("config is not a serialized LabelConf");
    }
    return adder_.Build(conf, negative_value, sample_rate);
  }

  void Apply(LineId* line_id, LabelList* label) const { adder_.Apply(line_id, label); }

 private:
  LabelAdder adder_;
};

// "key:index,..." -> key -> index, and one more than the largest index.
template <typename Key>
Status ParseIndices(const char* what, const std::string& text,
                    absl::flat_hash_map<Key, int64_t>* indices, int64_t* size) {
  std::vector<std::vector<std::string>> tuples;
  TF_RETURN_IF_ERROR(FromEngine(::monolith::data::ParseTuples(what, text, 2, 2, &tuples)));
  *size = 0;
  for (const std::vector<std::string>& tuple : tuples) {
    Key key;
    int64_t index;
    bool valid =
        ::monolith::data::ParseNumber(tuple[1], &index) && index >= 0 && index < kMaxLabels;
    if constexpr (std::is_same_v<Key, std::string>) {
      key = tuple[0];
    } else {
      valid = valid && ::monolith::data::ParseNumber(tuple[0], &key);
    }
    if (!valid) {
      return errors::InvalidArgument(what, " is '", text,
                                     "', want key:index numbers, indices less than ", kMaxLabels);
    }
    (*indices)[key] = index;
    *size = std::max(*size, index + 1);
  }
  if (!tuples.empty()) return OkStatus();
  return errors::InvalidArgument(what, " is empty");
}

class ScatterLabelRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string config;
    TF_RETURN_IF_ERROR(ctx->GetAttr("config", &config));
    return ParseIndices("config", config, &indices_, &size_);
  }

  void Apply(LineId* line_id, LabelList* label) const {
    const float first = label->empty() ? kInvalidLabel : label->Get(0);
    label->Clear();
    label->Resize(static_cast<int>(size_), kInvalidLabel);
    const auto it = indices_.find(line_id->chnid());
    if (it != indices_.end()) label->Set(static_cast<int>(it->second), first);
  }

 private:
  absl::flat_hash_map<int64_t, int64_t> indices_;
  int64_t size_;
};

class LabelUpperBoundRule {
 public:
  Status Init(OpKernelConstruction* ctx) { return ctx->GetAttr("label_upper_bounds", &bounds_); }

  void Apply(LineId*, LabelList* label) const {
    if (label->size() < static_cast<int64_t>(bounds_.size())) return;
    for (size_t i = 0; i < bounds_.size(); ++i) {
      label->Set(static_cast<int>(i), std::min(label->Get(static_cast<int>(i)), bounds_[i]));
    }
  }

 private:
  std::vector<float> bounds_;
};

class LabelNormalizationRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::vector<std::string> methods;
    TF_RETURN_IF_ERROR(ctx->GetAttr("norm_methods", &methods));
    TF_RETURN_IF_ERROR(ctx->GetAttr("norm_values", &values_));
    TF_RETURN_IF_ERROR(CheckEqual("length of norm_values", static_cast<int64_t>(values_.size()),
                                  "length of norm_methods", static_cast<int64_t>(methods.size())));
    for (const std::string& method : methods) {
      methods_.emplace_back();
      if (!::monolith::data::ParseNormalization(method, &methods_.back())) {
        return errors::InvalidArgument("norm_methods has '", method,
                                       "', want log, scale, scale2int, pow, repow or scalelog");
      }
    }
    return OkStatus();
  }

  void Apply(LineId*, LabelList* label) const {
    for (float& x : *label) {
      for (size_t i = 0; i < methods_.size(); ++i) {
        x = ::monolith::data::Normalize(methods_[i], x, values_[i]);
      }
    }
  }

 private:
  std::vector<::monolith::data::Normalization> methods_;
  std::vector<float> values_;
};

class UseFieldAsLabelRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string field_name;
    DataType dtype;
    TF_RETURN_IF_ERROR(ctx->GetAttr("field_name", &field_name));
    TF_RETURN_IF_ERROR(ctx->GetAttr("overwrite_invalid_value", &overwrite_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("label_threshold", &threshold_));
    TF_RETURN_IF_ERROR(FindLineIdField(field_name, &field_, &dtype));
    if (dtype == DT_STRING || field_->is_repeated()) {
      return errors::InvalidArgument("field_name ", field_name, " is no single number");
    }
    return OkStatus();
  }

  void Apply(LineId* line_id, LabelList* label) const {
    float value;
    CopyLineIdField(*line_id, *field_, 1, &value);
    if (overwrite_ && value >= threshold_) value = 0;
    for (float& x : *label) x = std::max(x, value);
  }

 private:
  const LineIdField* field_;
  bool overwrite_;
  float threshold_;
};

class MultiLabelGenRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string head_to_index, head_field, priority;
    TF_RETURN_IF_ERROR(ctx->GetAttr("head_to_index", &head_to_index));
    TF_RETURN_IF_ERROR(ctx->GetAttr("head_field", &head_field));
    TF_RETURN_IF_ERROR(ctx->GetAttr("pos_actions", &labels_.positive));
    TF_RETURN_IF_ERROR(ctx->GetAttr("neg_actions", &labels_.negative));
    TF_RETURN_IF_ERROR(ctx->GetAttr("use_origin_label", &use_origin_label_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("pos_label", &labels_.positive_label));
    TF_RETURN_IF_ERROR(ctx->GetAttr("neg_label", &labels_.negative_label));
    TF_RETURN_IF_ERROR(ctx->GetAttr("action_priority", &priority));
    TF_RETURN_IF_ERROR(ctx->GetAttr("task_num", &task_num_));
    TF_RETURN_IF_ERROR(CheckCount("task_num", task_num_, 0, kMaxLabels));
    int64_t size = 0;
    TF_RETURN_IF_ERROR(ParseIndices("head_to_index", head_to_index, &indices_, &size));
    if (task_num_ < size) {
      return errors::InvalidArgument("task_num is ", task_num_, ", want at least ", size,
                                     " for head_to_index '", head_to_index, "'");
    }
    TF_RETURN_IF_ERROR(
        FromEngine(::monolith::data::ParseInts("action_priority", priority, &labels_.priority)));
    TF_RETURN_IF_ERROR(FindLineIdField(head_field, &head_, &head_dtype_));
    if (head_->is_repeated() || head_dtype_ == DT_FLOAT) {
      return errors::InvalidArgument("head_field ", head_field, " is no single integer or string");
    }
    return OkStatus();
  }

  void Apply(LineId* line_id, LabelList* label) const {
    const float value = use_origin_label_ ? (label->empty() ? kInvalidLabel : label->Get(0))
                                          : labels_.Of(SpanOf(line_id->actions()));
    label->Clear();
    label->Resize(static_cast<int>(task_num_), kInvalidLabel);
    const auto it = indices_.find(Head(*line_id));
    if (it != indices_.end()) label->Set(static_cast<int>(it->second), value);
  }

 private:
  std::string Head(const LineId& line_id) const {
    if (head_dtype_ == DT_STRING) {
      tstring text;
      CopyLineIdField(line_id, *head_, 1, &text);
      return text;
    }
    int64_t number;
    CopyLineIdField(line_id, *head_, 1, &number);
    return std::to_string(number);
  }

  absl::flat_hash_map<std::string, int64_t> indices_;
  const LineIdField* head_;
  DataType head_dtype_;
  ::monolith::data::ActionLabels labels_;
  bool use_origin_label_;
  int64_t task_num_;
};

class FillMultiRankOutputRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("enable_draw_as_rank", &draw_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("enable_chnid_as_rank", &chnid_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("enable_lineid_rank_as_rank", &rank_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("rank_num", &rank_num_));
    return CheckCount("rank_num", rank_num_, 1, std::numeric_limits<int32_t>::max());
  }

  void Apply(LineId* line_id, LabelList* label) const {
    if (draw_) {
      label->Add(line_id->is_draw() ? 1.0f : 0.0f);
    } else if (chnid_) {
      const int64_t chnid = line_id->chnid();
      label->Add(chnid == 0 || chnid == 1 ? static_cast<float>(chnid) : 2.0f);
    } else if (rank_) {
      label->Add(static_cast<float>(std::min<int64_t>(line_id->rank(), rank_num_ - 1)));
    }
  }

 private:
  bool draw_, chnid_, rank_;
  int64_t rank_num_;
};

#define REGISTER_LABEL_KERNEL(name) \
  REGISTER_GUARDED_KERNEL(Name(#name).Device(DEVICE_CPU), LabelOp<name##Rule>)

REGISTER_LABEL_KERNEL(AddAction);
REGISTER_LABEL_KERNEL(AddLabel);
REGISTER_LABEL_KERNEL(ScatterLabel);
REGISTER_LABEL_KERNEL(LabelUpperBound);
REGISTER_LABEL_KERNEL(LabelNormalization);
REGISTER_LABEL_KERNEL(UseFieldAsLabel);
REGISTER_LABEL_KERNEL(MultiLabelGen);
REGISTER_LABEL_KERNEL(FillMultiRankOutput);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
