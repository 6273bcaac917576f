// Ops that decide whether a sample is kept: scalar variant -> bool, for Dataset.filter.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/data/sample_filters.h"
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

#define REGISTER_FILTER_OP(name) \
  REGISTER_OP(name)              \
      .Input("input: variant")   \
      .Output("valid: bool")     \
      .SetShapeFn(shape_inference::ScalarShape)

#define OPERAND_ATTRS()                        \
  Attr("op: string")                           \
      .Attr("float_operand: list(float) = []") \
      .Attr("int_operand: list(int) = []")     \
      .Attr("string_operand: list(string) = []")

REGISTER_FILTER_OP("SetFilter")
    .Attr("filter_fids: list(int) = []")
    .Attr("has_fids: list(int) = []")
    .Attr("select_fids: list(int) = []")
    .Attr("has_actions: list(int) = []")
    .Attr("req_time_min: int = 0")
    .Attr("select_slots: list(int) = []")
    .Attr("variant_type: string = 'instance'")
    .Doc("Keeps samples by ids, slots, actions and request time.");

REGISTER_FILTER_OP("ValueFilter")
    .Attr("field_name: string")
    .OPERAND_ATTRS()
    .Attr("operand_filepath: string = ''")
    .Attr("keep_empty: bool = false")
    .Attr("variant_type: string = 'instance'")
    .Doc("Keeps samples by a field of LineId.");

REGISTER_FILTER_OP("FeatureValueFilter")
    .Attr("field_name: string")
    .OPERAND_ATTRS()
    .Attr("operand_filepath: string = ''")
    .Attr("field_type: string")
    .Attr("keep_empty: bool = false")
    .Doc("Keeps Examples by a named feature; field_type is int64, float, double or bytes.");

REGISTER_FILTER_OP("FilterByLabel")
    .Attr("label_threshold: list(float)")
    .Attr("filter_equal: bool = false")
    .Attr("variant_type: string = 'example'")
    .Doc("Keeps samples with a label above its threshold.");

REGISTER_FILTER_OP("SpecialStrategy")
    .SetIsStateful()  // draws random numbers
    .Attr("special_strategies: list(int) = []")
    .Attr("strategy_conf: string = ''")
    .Attr("variant_type: string = 'instance'")
    .Attr("keep_empty_strategy: bool = true")
    .Doc(R"doc(
Keeps samples by their special strategies.

special_strategies: in order of priority; the first one a sample has decides.
strategy_conf: "strategy:rate[:label],...": the share to keep, and the new first label, which is
  written into the sample itself.
)doc");

REGISTER_FILTER_OP("NegativeSample")
    .SetIsStateful()  // draws random numbers
    .Attr("drop_rate: float")
    .Attr("label_index: int = 0")
    .Attr("threshold: float = 0.0")
    .Attr("variant_type: string = 'instance'")
    .Attr("action_priority: string = ''")
    .Attr("per_action_drop_rate: string = ''")
    .Doc("Drops a share of the samples whose label is below the threshold.");

// Rule: Status Init(OpKernelConstruction*), Status Keeps(const Proto&, bool*) const.
template <typename Rule>
class FilterOp : public OpKernel {
 public:
  explicit FilterOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetRowType(ctx, &type_));
    OP_REQUIRES_OK(ctx, rule_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("input", ctx->input(0)));
    const auto variant_scalar = ctx->input(0).scalar<Variant>();
    const Variant& variant = variant_scalar();
    bool keeps = false;
    OP_REQUIRES_OK(ctx, VisitRowType(type_, [&](auto tag) {
                     return Run<ProtoOf<decltype(tag)>>(variant, &keeps);
                   }));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<bool>()() = keeps;
  }

 private:
  template <typename Proto>
  Status Run(const Variant& variant, bool* keeps) const {
    const Proto* sample;
    TF_RETURN_IF_ERROR(GetSample<Proto>(variant, &sample));
    *keeps = rule_.Keeps(*sample);
    return OkStatus();
  }

  SampleType type_;
  Rule rule_;
};

class SetRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    ::monolith::data::FidFilter::Config config;
    TF_RETURN_IF_ERROR(ctx->GetAttr("filter_fids", &config.filter_fids));
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_fids", &config.has_fids));
    TF_RETURN_IF_ERROR(ctx->GetAttr("select_fids", &config.select_fids));
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_actions", &config.has_actions));
    TF_RETURN_IF_ERROR(ctx->GetAttr("req_time_min", &config.req_time_min));
    TF_RETURN_IF_ERROR(ctx->GetAttr("select_slots", &config.select_slots));
    filter_ = std::make_unique<::monolith::data::FidFilter>(config);
    return OkStatus();
  }

  template <typename Proto>
  bool Keeps(const Proto& sample) const {
    return monolith_tf::Keeps(*filter_, sample);
  }

 private:
  std::unique_ptr<const ::monolith::data::FidFilter> filter_;
};

Status GetOperands(OpKernelConstruction* ctx, Operands* operands) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("float_operand", &operands->floats));
  TF_RETURN_IF_ERROR(ctx->GetAttr("int_operand", &operands->ints));
  TF_RETURN_IF_ERROR(ctx->GetAttr("string_operand", &operands->strings));
  return ctx->GetAttr("operand_filepath", &operands->file);
}

class ValueRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::string field_name, op;
    Operands operands;
    bool keep_empty;
    TF_RETURN_IF_ERROR(ctx->GetAttr("field_name", &field_name));
    TF_RETURN_IF_ERROR(ctx->GetAttr("op", &op));
    TF_RETURN_IF_ERROR(GetOperands(ctx, &operands));
    TF_RETURN_IF_ERROR(ctx->GetAttr("keep_empty", &keep_empty));
    return filter_.Build(ctx->env(), field_name, op, operands, keep_empty);
  }

  template <typename Proto>
  bool Keeps(const Proto& sample) const {
    return filter_.Keeps(sample.line_id());
  }

 private:
  LineIdFilter filter_;
};

class LabelRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("label_threshold", &thresholds_));
    return ctx->GetAttr("filter_equal", &filter_equal_);
  }

  template <typename Proto>
  bool Keeps(const Proto& sample) const {
    return ::monolith::data::KeepsByLabel(SpanOf(sample.label()), thresholds_, filter_equal_);
  }

 private:
  std::vector<float> thresholds_;
  bool filter_equal_;
};

class StrategyRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    std::vector<int64_t> priority;
    std::string conf;
    bool keep_empty;
    TF_RETURN_IF_ERROR(ctx->GetAttr("special_strategies", &priority));
    TF_RETURN_IF_ERROR(ctx->GetAttr("strategy_conf", &conf));
    TF_RETURN_IF_ERROR(ctx->GetAttr("keep_empty_strategy", &keep_empty));
    return FromEngine(filter_.Build(priority, conf, keep_empty));
  }

  template <typename Proto>
  bool Keeps(const Proto& sample) const {
    const auto decision =
        filter_.Decide(SpanOf(sample.line_id().special_strategies()), RandomUniform);
    if (decision.has_label && sample.label_size() > 0) {
      // A filter has no output for the sample, so the element it keeps is changed itself.
      const_cast<Proto&>(sample).set_label(0, decision.label);
    }
    return decision.keeps;
  }

 private:
  ::monolith::data::StrategyFilter filter_;
};

class NegativeRule {
 public:
  Status Init(OpKernelConstruction* ctx) {
    ::monolith::data::NegativeFilter::Config config;
    TF_RETURN_IF_ERROR(ctx->GetAttr("drop_rate", &config.drop_rate));
    TF_RETURN_IF_ERROR(ctx->GetAttr("label_index", &config.label_index));
    TF_RETURN_IF_ERROR(ctx->GetAttr("threshold", &config.threshold));
    TF_RETURN_IF_ERROR(ctx->GetAttr("action_priority", &config.action_priority));
    TF_RETURN_IF_ERROR(ctx->GetAttr("per_action_drop_rate", &config.per_action_drop_rate));
    return FromEngine(filter_.Build(config));
  }

  template <typename Proto>
  bool Keeps(const Proto& sample) const {
    return filter_.Keeps(SpanOf(sample.label()), SpanOf(sample.line_id().actions()), RandomUniform);
  }

 private:
  ::monolith::data::NegativeFilter filter_;
};

REGISTER_GUARDED_KERNEL(Name("SetFilter").Device(DEVICE_CPU), FilterOp<SetRule>);
REGISTER_GUARDED_KERNEL(Name("ValueFilter").Device(DEVICE_CPU), FilterOp<ValueRule>);
REGISTER_GUARDED_KERNEL(Name("FilterByLabel").Device(DEVICE_CPU), FilterOp<LabelRule>);
REGISTER_GUARDED_KERNEL(Name("SpecialStrategy").Device(DEVICE_CPU), FilterOp<StrategyRule>);
REGISTER_GUARDED_KERNEL(Name("NegativeSample").Device(DEVICE_CPU), FilterOp<NegativeRule>);

class FeatureValueFilterOp : public OpKernel {
 public:
  explicit FeatureValueFilterOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string op;
    Operands operands;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("field_name", &field_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("op", &op));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("field_type", &field_type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep_empty", &keep_empty_));
    OP_REQUIRES_OK(ctx, GetOperands(ctx, &operands));
    const bool is_float = field_type_ == "float" || field_type_ == "double";
    OP_REQUIRES(ctx, is_float || field_type_ == "int64" || field_type_ == "bytes",
                errors::InvalidArgument("field_type is '", field_type_,
                                        "', want int64, float, double or bytes"));
    const DataType dtype = is_float ? DT_FLOAT : field_type_ == "int64" ? DT_INT64 : DT_STRING;
    OP_REQUIRES_OK(ctx, filter_.Build(ctx->env(), op, dtype, operands));
    ::monolith::data::Comparison comparison{};
    ::monolith::data::ParseComparison(op, &comparison);
    compares_lists_ = ::monolith::data::IsListComparison(comparison);
    OP_REQUIRES(ctx, !compares_lists_ || dtype == DT_INT64,
                errors::InvalidArgument("op '", op, "' needs field_type int64, but it is '",
                                        field_type_, "'"));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("input", ctx->input(0)));
    const Example* example;
    OP_REQUIRES(ctx, GetSample<Example>(ctx->input(0).scalar<Variant>()(), &example).ok(),
                errors::InvalidArgument("input must be Example proto"));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<bool>()() = Keeps(*example);
  }

 private:
  bool Keeps(const Example& example) const {
    const ExampleFeature* feature = nullptr;
    for (const auto& named : example.named_feature()) {
      if (named.name() == field_name_) feature = &named.feature();
    }
    if (feature == nullptr) return keep_empty_;
    if (field_type_ == "int64") return Compare<int64_t>(feature->int64_list().value());
    if (field_type_ == "float") return Compare<double>(feature->float_list().value());
    if (field_type_ == "double") {
      // Operands are floats, so that is what a double is compared as.
      const auto& doubles = feature->double_list().value();
      return Compare<double>(std::vector<float>(doubles.begin(), doubles.end()));
    }
    return Compare<std::string>(feature->bytes_list().value());
  }

  // A feature of another type has an empty list here.
  template <typename T, typename List>
  bool Compare(const List& values) const {
    if (values.size() == 0) return keep_empty_;
    if (compares_lists_) return filter_.get<T>().MatchesList(values);
    return values.size() == 1 ? filter_.get<T>().Matches(static_cast<T>(*values.begin()))
                              : keep_empty_;
  }

  std::string field_name_;
  std::string field_type_;
  bool keep_empty_;
  bool compares_lists_;
  TypedFilter filter_;
};

REGISTER_GUARDED_KERNEL(Name("FeatureValueFilter").Device(DEVICE_CPU), FeatureValueFilterOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
