// InstanceNegativeGenDataset: sampled negatives before every positive sample.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/actions.h"
#include "monolith/native_training/runtime/data/text_lists.h"
#include "monolith/native_training/runtime/ops/data/datasets/sample_dataset.h"
#include "monolith/native_training/runtime/ops/data/samples/item_pool.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_rules.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::BestAction;
using ::monolith::engine::SlotOfV1;
using ::monolith::io::proto::FeatureData;
using ::monolith::io::proto::NamedFeature;

REGISTER_OP("InstanceNegativeGenDataset")
    .Input("input_dataset: variant")
    .Input("pool: resource")
    .Output("handle: variant")
    .Attr("neg_num: int")
    .Attr("per_channel: bool")
    .Attr("channel_feature: string")
    .Attr("item_features: list(string)")
    .Attr("positive_label: int")
    .Attr("negative_label: int")
    .Attr("negative_action: int")
    .Attr("positive_actions: list(int)")
    .Attr("label_index: int")
    .Attr("action_priority: string")
    .Attr("index_feature: string")
    .Attr("throw_origin: bool")
    .Attr("throw_origin_neg: bool")
    .Attr("cache_only_pos: bool")
    .Attr("cache_negative_actions: list(int)")
    .Attr("real_neg_instance_weight: float")
    .Attr("sampled_neg_instance_weight: float")
    .Attr("unbias_sampled_neg: bool")
    .Attr("origin_neg_in_pool_proba: float")
    .Attr("neg_sample_declay_factor: float")
    .Attr("easy_hard_ratio: float")
    .Attr("variant_type: string")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Caches the items of positive samples and draws negatives from them.");

constexpr int64_t kKeepActions = -99999;
constexpr int64_t kDefaultChannel = 3;
constexpr int64_t kDefaultChannelSlot = 3;
constexpr float kMinWeight = 1e-5f;

struct NegativeOptions {
  int64_t neg_num;
  bool per_channel;
  std::string channel_feature;
  std::vector<std::string> item_features;
  int64_t positive_label, negative_label, negative_action;
  std::vector<int64_t> positive_actions;
  int64_t label_index;
  std::vector<int64_t> action_priority;
  std::string index_feature;
  bool throw_origin, throw_origin_neg, cache_only_pos;
  std::vector<int64_t> cache_negative_actions;
  float real_neg_weight, sampled_neg_weight;
  bool unbias;
  float origin_neg_in_pool_proba, decay_factor, easy_hard_ratio;
  // The features of an Instance are slots.
  absl::flat_hash_set<int64_t> item_slots;
  int64_t channel_slot = kDefaultChannelSlot;
  int64_t index_slot = -1;

  Status Init(OpKernelConstruction *ctx, SampleType type) {
    std::string priority;
    TF_RETURN_IF_ERROR(ctx->GetAttr("neg_num", &neg_num));
    TF_RETURN_IF_ERROR(ctx->GetAttr("per_channel", &per_channel));
    TF_RETURN_IF_ERROR(ctx->GetAttr("channel_feature", &channel_feature));
    TF_RETURN_IF_ERROR(ctx->GetAttr("item_features", &item_features));
    TF_RETURN_IF_ERROR(ctx->GetAttr("positive_label", &positive_label));
    TF_RETURN_IF_ERROR(ctx->GetAttr("negative_label", &negative_label));
    TF_RETURN_IF_ERROR(ctx->GetAttr("negative_action", &negative_action));
    TF_RETURN_IF_ERROR(ctx->GetAttr("positive_actions", &positive_actions));
    TF_RETURN_IF_ERROR(ctx->GetAttr("label_index", &label_index));
    TF_RETURN_IF_ERROR(ctx->GetAttr("action_priority", &priority));
    TF_RETURN_IF_ERROR(ctx->GetAttr("index_feature", &index_feature));
    TF_RETURN_IF_ERROR(ctx->GetAttr("throw_origin", &throw_origin));
    TF_RETURN_IF_ERROR(ctx->GetAttr("throw_origin_neg", &throw_origin_neg));
    TF_RETURN_IF_ERROR(ctx->GetAttr("cache_only_pos", &cache_only_pos));
    TF_RETURN_IF_ERROR(ctx->GetAttr("cache_negative_actions", &cache_negative_actions));
    TF_RETURN_IF_ERROR(ctx->GetAttr("real_neg_instance_weight", &real_neg_weight));
    TF_RETURN_IF_ERROR(ctx->GetAttr("sampled_neg_instance_weight", &sampled_neg_weight));
    TF_RETURN_IF_ERROR(ctx->GetAttr("unbias_sampled_neg", &unbias));
    TF_RETURN_IF_ERROR(ctx->GetAttr("origin_neg_in_pool_proba", &origin_neg_in_pool_proba));
    TF_RETURN_IF_ERROR(ctx->GetAttr("neg_sample_declay_factor", &decay_factor));
    TF_RETURN_IF_ERROR(ctx->GetAttr("easy_hard_ratio", &easy_hard_ratio));
    TF_RETURN_IF_ERROR(
        FromEngine(::monolith::data::ParseInts("action_priority", priority, &action_priority)));
    if (neg_num < 0 || label_index < 0) {
      return errors::InvalidArgument("neg_num is ", neg_num, " and label_index ", label_index,
                                     ", want at least 0");
    }
    TF_RETURN_IF_ERROR(CheckCount("neg_num", neg_num, 0, kMaxNegatives));
    TF_RETURN_IF_ERROR(CheckCount("label_index", label_index, 0, kMaxLabels - 1));
    return type == SampleType::kInstance ? ParseSlots() : OkStatus();
  }

 private:
  static Status ParseSlot(const char *what, absl::string_view name, int64_t *slot) {
    absl::string_view number = name;
    absl::ConsumePrefix(&number, "fc_");
    absl::ConsumePrefix(&number, "slot_");
    if (absl::SimpleAtoi(number, slot) && *slot >= 0 && *slot < ::monolith::engine::kMaxSlotsV1) {
      return OkStatus();
    }
    return errors::InvalidArgument(what, " has '", std::string(name), "', want a v1 slot");
  }

  Status ParseSlots() {
    for (const std::string &feature : item_features) {
      int64_t slot;
      TF_RETURN_IF_ERROR(ParseSlot("item_features", feature, &slot));
      item_slots.insert(slot);
    }
    if (!channel_feature.empty()) {
      TF_RETURN_IF_ERROR(ParseSlot("channel_feature", channel_feature, &channel_slot));
    }
    if (!index_feature.empty()) {
      TF_RETURN_IF_ERROR(ParseSlot("index_feature", index_feature, &index_slot));
    }
    return OkStatus();
  }
};

// Finds the part of a sample that describes the item, in each format.
uint64_t FirstFid(const Example &example, const std::string &name) {
  for (const NamedFeature &named : example.named_feature()) {
    if (named.name() != name) continue;
    if (named.feature().fid_v1_list().value_size() > 0) {
      return named.feature().fid_v1_list().value(0);
    }
    if (named.feature().fid_v2_list().value_size() > 0) {
      return named.feature().fid_v2_list().value(0);
    }
  }
  return 0;
}

uint64_t LastFid(const Instance &instance, int64_t slot) {
  for (int i = instance.fid_size() - 1; i >= 0; --i) {
    if (SlotOfV1(instance.fid(i)) == slot) return instance.fid(i);
  }
  return 0;
}

uint64_t ChannelOf(const Example &example, const NegativeOptions &options) {
  return FirstFid(example, options.channel_feature);
}
uint64_t ChannelOf(const Instance &instance, const NegativeOptions &options) {
  return LastFid(instance, options.channel_slot);
}
uint64_t IndexOf(const Example &example, const NegativeOptions &options) {
  return FirstFid(example, options.index_feature);
}
uint64_t IndexOf(const Instance &instance, const NegativeOptions &options) {
  return LastFid(instance, options.index_slot);
}

bool IsItemFeature(const NegativeOptions &options, const std::string &name) {
  const auto &names = options.item_features;
  return std::find(names.begin(), names.end(), name) != names.end();
}

void CopyItem(const Example &example, const NegativeOptions &options, FeatureData *item) {
  for (const NamedFeature &named : example.named_feature()) {
    if (IsItemFeature(options, named.name())) *item->add_feature_columns() = named;
  }
}
void CopyItem(const Instance &instance, const NegativeOptions &options, FeatureData *item) {
  for (uint64_t fid : instance.fid()) {
    if (options.item_slots.contains(SlotOfV1(fid))) item->add_fids(static_cast<int64_t>(fid));
  }
}

void ReplaceItem(const FeatureData &item, const NegativeOptions &options, Example *example) {
  auto *features = example->mutable_named_feature();
  int kept = 0;
  for (int i = 0; i < features->size(); ++i) {
    if (!IsItemFeature(options, features->Get(i).name())) features->SwapElements(kept++, i);
  }
  features->DeleteSubrange(kept, features->size() - kept);
  features->MergeFrom(item.feature_columns());
}
void ReplaceItem(const FeatureData &item, const NegativeOptions &options, Instance *instance) {
  auto *fids = instance->mutable_fid();
  fids->erase(std::remove_if(
                  fids->begin(), fids->end(),
                  [&options](uint64_t fid) { return options.item_slots.contains(SlotOfV1(fid)); }),
              fids->end());
  for (int64_t fid : item.fids()) fids->Add(static_cast<uint64_t>(fid));
}

template <typename Proto>
class NegativeExpander final : public SampleExpander {
 public:
  NegativeExpander(std::shared_ptr<const NegativeOptions> options,
                   core::RefCountPtr<ItemPoolResource> pool)
      : options_(std::move(options)), pool_(std::move(pool)), random_(std::random_device{}()) {}

  Status Expand(const Tensor &tensor, std::deque<Tensor> *out) override {
    const Proto *sample;
    TF_RETURN_IF_ERROR(GetSample<Proto>(tensor.scalar<Variant>()(), &sample));
    const bool positive = IsPositive(*sample);
    const int64_t channel = options_->per_channel
                                ? static_cast<int64_t>(ChannelOf(*sample, *options_))
                                : kDefaultChannel;
    Cache(*sample, positive, channel);
    if (positive) {
      for (int64_t i = 0; i < options_->neg_num; ++i) {
        CachedItemPool::Draw draw;
        if (!DrawItem(channel, &draw)) break;
        out->push_back(MakeSampleTensor(MakeNegative(*sample, draw)));
      }
    }
    if (options_->throw_origin || (!positive && options_->throw_origin_neg)) return OkStatus();
    Proto origin = *sample;
    origin.set_instance_weight(positive ? 1.0f : options_->real_neg_weight);
    out->push_back(MakeSampleTensor(std::move(origin)));
    return OkStatus();
  }

 private:
  bool IsPositive(const Proto &sample) const {
    if (!options_->positive_actions.empty()) {
      const ::monolith::data::Actions actions = SpanOf(sample.line_id().actions());
      return !actions.empty() &&
             ::monolith::data::Contains(
                 options_->positive_actions,
                 ::monolith::data::BestOrFirst(options_->action_priority, actions));
    }
    return options_->label_index < sample.label_size() &&
           sample.label(static_cast<int>(options_->label_index)) ==
               static_cast<float>(options_->positive_label);
  }

  void Cache(const Proto &sample, bool positive, int64_t channel) {
    if (!positive) {
      const bool wanted =
          !options_->cache_only_pos ||
          BestAction(options_->cache_negative_actions, SpanOf(sample.line_id().actions())) >= 0;
      if (!wanted || Uniform() >= options_->origin_neg_in_pool_proba) return;
    }
    auto item = std::make_shared<FeatureData>();
    const uint64_t item_id =
        options_->index_feature.empty() ? sample.line_id().item_id() : IndexOf(sample, *options_);
    item->set_gid(static_cast<int64_t>(item_id));
    CopyItem(sample, *options_, item.get());
    pool_->pool()->Add(channel, item_id, std::move(item));
  }

  bool DrawItem(int64_t channel, CachedItemPool::Draw *draw) {
    if (options_->easy_hard_ratio > 0 && Uniform() < options_->easy_hard_ratio) {
      return pool_->pool()->SampleAnyChannel(&random_, draw);
    }
    return pool_->pool()->Sample(channel, &random_, draw);
  }

  Proto MakeNegative(const Proto &positive, const CachedItemPool::Draw &draw) const {
    Proto sample = positive;
    ReplaceItem(*draw.entry.item, *options_, &sample);
    while (sample.label_size() <= options_->label_index) sample.add_label(kInvalidLabel);
    sample.set_label(static_cast<int>(options_->label_index),
                     static_cast<float>(options_->negative_label));
    LineId *line_id = sample.mutable_line_id();
    line_id->set_item_id(draw.entry.item_id);
    if (options_->negative_action != kKeepActions) {
      line_id->clear_actions();
      line_id->add_actions(static_cast<int32_t>(options_->negative_action));
    }
    sample.set_instance_weight(WeightOf(draw));
    return sample;
  }

  float WeightOf(const CachedItemPool::Draw &draw) const {
    if (options_->sampled_neg_weight > kMinWeight) return options_->sampled_neg_weight;
    if (!options_->unbias) return 1.0f;
    const double frequency = 1.0 / static_cast<double>(draw.entry.sampled);
    return static_cast<float>(1.0 + static_cast<double>(options_->neg_num) *
                                        std::pow(draw.time, options_->decay_factor) * frequency);
  }

  float Uniform() { return std::uniform_real_distribution<float>(0.0f, 1.0f)(random_); }

  const std::shared_ptr<const NegativeOptions> options_;
  const core::RefCountPtr<ItemPoolResource> pool_;
  std::mt19937_64 random_;
};

class InstanceNegativeGenDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  explicit InstanceNegativeGenDatasetOp(OpKernelConstruction *ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetRowType(ctx, &type_));
    auto options = std::make_shared<NegativeOptions>();
    OP_REQUIRES_OK(ctx, options->Init(ctx, type_));
    options_ = std::move(options);
  }

 protected:
  void MakeDataset(OpKernelContext *ctx, data::DatasetBase *input,
                   data::DatasetBase **output) override {
    core::RefCountPtr<ItemPoolResource> pool;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 1, "pool", &pool));
    SampleDatasetOptions options;
    options.name = "InstanceNegativeGenDataset";
    options.attrs = AttrsOf(def());
    options.extra = {ctx->input(1)};
    // std::function copies what it captures, so the reference to the pool is
    // shared.
    auto shared = std::make_shared<core::RefCountPtr<ItemPoolResource>>(std::move(pool));
    options.factory = [negatives = options_, type = type_,
                       shared]() -> std::unique_ptr<SampleExpander> {
      core::RefCountPtr<ItemPoolResource> own = (*shared).GetNewRef();
      return VisitRowType(type, [&](auto tag) -> std::unique_ptr<SampleExpander> {
        return std::make_unique<NegativeExpander<ProtoOf<decltype(tag)>>>(negatives,
                                                                          std::move(own));
      });
    };
    OP_REQUIRES_OK(ctx, MakeSampleDataset(ctx, input, std::move(options), output));
  }

 private:
  SampleType type_;
  std::shared_ptr<const NegativeOptions> options_;
};

REGISTER_GUARDED_KERNEL(Name("InstanceNegativeGenDataset").Device(DEVICE_CPU),
                        InstanceNegativeGenDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
