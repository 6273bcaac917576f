// InstanceReweightDataset and TransformDataset.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monolith/native_training/data/transform/transform_config.pb.h"
#include "monolith/native_training/runtime/data/label_rules.h"
#include "monolith/native_training/runtime/data/sample_filters.h"
#include "monolith/native_training/runtime/ops/data/datasets/sample_dataset.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_rules.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace config = ::monolith::native_training::data;
using ::monolith::data::FidFilter;
using ::monolith::data::KeepsByLabel;
using ::monolith::data::ReweightRules;

REGISTER_OP("InstanceReweightDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("method: int")
    .Attr("actions: list(int)")
    .Attr("weights: list(int)")
    .Attr("labels: list(int)")
    .Attr("priorities: list(int)")
    .Attr("variant_type: string")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Repeats every sample as often as its actions weigh.

method: 0.
actions: actions[i] weighs weights[i] and has label labels[i].
priorities: actions, the best one first.
)doc");

REGISTER_OP("TransformDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("config: string")
    .Attr("variant_type: string")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Filters and changes samples as the serialized TransformConfig says.");

template <typename Proto>
class ReweightExpander final : public SampleExpander {
 public:
  explicit ReweightExpander(std::shared_ptr<const ReweightRules> rules)
      : rules_(std::move(rules)) {}

  Status Expand(const Tensor &sample, std::deque<Tensor> *out) override {
    const Proto *proto;
    TF_RETURN_IF_ERROR(GetSample<Proto>(sample.scalar<Variant>()(), &proto));
    Proto changed = *proto;
    if (changed.label_size() == 0) return OkStatus();
    const LineId &line_id = changed.line_id();
    const int64_t count = rules_->Apply(SpanOf(line_id.actions()), SpanOf(line_id.pre_actions()),
                                        changed.mutable_label()->Mutable(0));
    if (count <= 0) return OkStatus();
    if (count > kMaxCopies) {
      return errors::InvalidArgument("the actions of a sample weigh ", count, ", want at most ",
                                     kMaxCopies, ": so often it would be repeated");
    }
    const Tensor tensor = MakeSampleTensor(std::move(changed));
    for (int64_t i = 0; i < count; ++i) {
      // An own variant for each: an op may forward and change the tensor of one
      // of them.
      Tensor copy(DT_VARIANT, TensorShape({}));
      copy.scalar<Variant>()() = tensor.scalar<Variant>()();
      out->push_back(std::move(copy));
    }
    return OkStatus();
  }

 private:
  std::shared_ptr<const ReweightRules> rules_;
};

class InstanceReweightDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  explicit InstanceReweightDatasetOp(OpKernelConstruction *ctx) : UnaryDatasetOpKernel(ctx) {
    std::unordered_map<int64_t, ReweightRules::Rule> rules;
    std::vector<int64_t> actions, weights, labels, priorities;
    int64_t method;
    OP_REQUIRES_OK(ctx, GetRowType(ctx, &type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("method", &method));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("actions", &actions));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weights", &weights));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("labels", &labels));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("priorities", &priorities));
    OP_REQUIRES(ctx, method == 0, errors::InvalidArgument("method is ", method, ", want 0"));
    OP_REQUIRES(ctx, actions.size() == weights.size() && actions.size() == labels.size(),
                errors::InvalidArgument("actions, weights and labels have ", actions.size(), ", ",
                                        weights.size(), " and ", labels.size(), " elements"));
    for (size_t i = 0; i < actions.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckCount("a weight", weights[i], -kMaxCopies, kMaxCopies));
      rules[actions[i]] = {weights[i], static_cast<float>(labels[i])};
    }
    rules_ = std::make_shared<ReweightRules>(std::move(rules), std::move(priorities));
  }

 protected:
  void MakeDataset(OpKernelContext *ctx, data::DatasetBase *input,
                   data::DatasetBase **output) override {
    SampleDatasetOptions options;
    options.name = "InstanceReweightDataset";
    options.attrs = AttrsOf(def());
    options.factory = [rules = rules_, type = type_]() -> std::unique_ptr<SampleExpander> {
      return VisitRowType(type, [&](auto tag) -> std::unique_ptr<SampleExpander> {
        return std::make_unique<ReweightExpander<ProtoOf<decltype(tag)>>>(rules);
      });
    };
    OP_REQUIRES_OK(ctx, MakeSampleDataset(ctx, input, std::move(options), output));
  }

 private:
  SampleType type_;
  std::shared_ptr<const ReweightRules> rules_;
};

REGISTER_GUARDED_KERNEL(Name("InstanceReweightDataset").Device(DEVICE_CPU),
                        InstanceReweightDatasetOp);

// One filter or change.
class BasicTransform {
 public:
  Status Build(Env *env, const config::BasicTransformConfig &proto) {
    kind_ = proto.type_case();
    switch (kind_) {
      case config::BasicTransformConfig::kFilterByFid: {
        FidFilter::Config fids;
        const auto &from = proto.filter_by_fid();
        fids.has_fids.assign(from.has_fids().begin(), from.has_fids().end());
        fids.filter_fids.assign(from.filter_fids().begin(), from.filter_fids().end());
        fids.select_fids.assign(from.select_fids().begin(), from.select_fids().end());
        return UseFids(fids);
      }
      case config::BasicTransformConfig::kFilterByAction: {
        FidFilter::Config actions;
        const auto &from = proto.filter_by_action().has_actions();
        actions.has_actions.assign(from.begin(), from.end());
        return UseFids(actions);
      }
      case config::BasicTransformConfig::kFilterByLabel:
        thresholds_.assign(proto.filter_by_label().thresholds().begin(),
                           proto.filter_by_label().thresholds().end());
        return OkStatus();
      case config::BasicTransformConfig::kFilterByValue: {
        const auto &from = proto.filter_by_value();
        Operands operands;
        operands.floats.assign(from.float_operand().begin(), from.float_operand().end());
        operands.ints.assign(from.int_operand().begin(), from.int_operand().end());
        operands.strings.assign(from.string_operand().begin(), from.string_operand().end());
        operands.file = from.operand_filepath();
        return value_filter_.Build(env, from.field_name(), from.op(), operands, from.keep_empty());
      }
      case config::BasicTransformConfig::kAddLabel: {
        config::config::LabelConf conf;
        for (const auto &task : proto.add_label().task_label_configs()) {
          auto *to = conf.add_conf();
          *to->mutable_pos_actions() = task.pos_actions();
          *to->mutable_neg_actions() = task.neg_actions();
          to->set_sample_rate(task.sample_rate());
        }
        return adder_.Build(conf, proto.add_label().negative_value(),
                            proto.add_label().new_sample_rate());
      }
      default:
        return errors::InvalidArgument("config has a transform without a type");
    }
  }

  // Whether the sample is kept; AddLabel keeps all.
  template <typename Proto>
  bool Apply(Proto *sample) const {
    switch (kind_) {
      case config::BasicTransformConfig::kFilterByLabel:
        return KeepsByLabel(SpanOf(sample->label()), thresholds_, /*filter_equal=*/false);
      case config::BasicTransformConfig::kFilterByValue:
        return value_filter_.Keeps(sample->line_id());
      case config::BasicTransformConfig::kAddLabel:
        adder_.Apply(sample->mutable_line_id(), sample->mutable_label());
        return true;
      default:
        return Keeps(*fid_filter_, *sample);
    }
  }

 private:
  Status UseFids(const FidFilter::Config &fids) {
    fid_filter_ = std::make_shared<FidFilter>(fids);
    return OkStatus();
  }

  config::BasicTransformConfig::TypeCase kind_ = config::BasicTransformConfig::TYPE_NOT_SET;
  std::shared_ptr<const FidFilter> fid_filter_;
  std::vector<float> thresholds_;
  LineIdFilter value_filter_;
  LabelAdder adder_;
};

// Alternatives of which one has to keep the sample.
using TransformStep = std::vector<BasicTransform>;

template <typename Proto>
class TransformExpander final : public SampleExpander {
 public:
  explicit TransformExpander(std::shared_ptr<const std::vector<TransformStep>> steps)
      : steps_(std::move(steps)) {}

  Status Expand(const Tensor &sample, std::deque<Tensor> *out) override {
    const Proto *proto;
    TF_RETURN_IF_ERROR(GetSample<Proto>(sample.scalar<Variant>()(), &proto));
    Proto changed = *proto;
    for (const TransformStep &step : *steps_) {
      if (std::none_of(step.begin(), step.end(), [&changed](const BasicTransform &transform) {
            return transform.Apply(&changed);
          })) {
        return OkStatus();
      }
    }
    out->push_back(MakeSampleTensor(std::move(changed)));
    return OkStatus();
  }

 private:
  std::shared_ptr<const std::vector<TransformStep>> steps_;
};

class TransformDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  explicit TransformDatasetOp(OpKernelConstruction *ctx) : UnaryDatasetOpKernel(ctx) {
    std::string serialized;
    config::TransformConfig proto;
    OP_REQUIRES_OK(ctx, GetRowType(ctx, &type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &serialized));
    OP_REQUIRES(ctx, proto.ParseFromString(serialized),
                errors::InvalidArgument("config is not a serialized TransformConfig"));
    auto steps = std::make_shared<std::vector<TransformStep>>();
    for (const auto &one : proto.configs()) {
      TransformStep step(one.has_logical_or_config() ? 2 : 1);
      if (one.has_logical_or_config()) {
        OP_REQUIRES_OK(ctx, step[0].Build(ctx->env(), one.logical_or_config().x()));
        OP_REQUIRES_OK(ctx, step[1].Build(ctx->env(), one.logical_or_config().y()));
      } else {
        OP_REQUIRES_OK(ctx, step[0].Build(ctx->env(), one.basic_config()));
      }
      steps->push_back(std::move(step));
    }
    steps_ = std::move(steps);
  }

 protected:
  void MakeDataset(OpKernelContext *ctx, data::DatasetBase *input,
                   data::DatasetBase **output) override {
    SampleDatasetOptions options;
    options.name = "TransformDataset";
    options.attrs = AttrsOf(def());
    options.factory = [steps = steps_, type = type_]() -> std::unique_ptr<SampleExpander> {
      return VisitRowType(type, [&](auto tag) -> std::unique_ptr<SampleExpander> {
        return std::make_unique<TransformExpander<ProtoOf<decltype(tag)>>>(steps);
      });
    };
    OP_REQUIRES_OK(ctx, MakeSampleDataset(ctx, input, std::move(options), output));
  }

 private:
  SampleType type_;
  std::shared_ptr<const std::vector<TransformStep>> steps_;
};

REGISTER_GUARDED_KERNEL(Name("TransformDataset").Device(DEVICE_CPU), TransformDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
