// ShardingSparseFids and its versions: the ids of a batch of samples, split by hash table and
// parameter server. See runtime/data/fid_sharding.h for what the outputs mean; versions differ in
// the halves of fid_offset and in how the lists are packed into tensors.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/fid_sharding.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::FeatureRows;
using ::monolith::data::OffsetKind;
using ::monolith::data::ShardedFeatureConfig;
using ::monolith::data::ShardedFids;
using ::monolith::data::ShardFids;
using ::monolith::data::ShardingPlan;
using ::monolith::io::proto::FeatureConfigs;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

constexpr OffsetKind KindOf(int version) {
  return version == 1   ? OffsetKind::kListPosition
         : version == 2 ? OffsetKind::kFeaturePosition
                        : OffsetKind::kFloatOffset;
}

Status ParsePlan(const std::string& feature_cfgs, OffsetKind kind, ShardingPlan* plan) {
  FeatureConfigs proto;
  if (!proto.ParseFromString(feature_cfgs)) {
    return errors::InvalidArgument("feature_cfgs is not a serialized FeatureConfigs");
  }
  std::map<std::string, ShardedFeatureConfig> features;
  for (const auto& [name, config] : proto.feature_configs()) {
    ShardedFeatureConfig& feature = features[name];
    feature.table = config.table();
    for (int32_t dim : config.slice_dims()) feature.width += dim;
  }
  const std::string problem = plan->Build(features, kind);
  return problem.empty() ? OkStatus() : errors::InvalidArgument("feature_cfgs: ", problem);
}

// Parameter servers, of which there is at least one. Every feature has a list per server.
template <typename Context>
Status GetServers(Context* ctx, const ShardingPlan& plan, int64_t* servers) {
  int64_t ps_num;
  TF_RETURN_IF_ERROR(ctx->GetAttr("ps_num", &ps_num));
  *servers = std::max<int64_t>(ps_num, 1);
  TF_RETURN_IF_ERROR(CheckShards("ps_num", *servers));
  const int64_t features = static_cast<int64_t>(plan.features().size());
  return CheckCount("ps_num * number of features", *servers * features, 0, kMaxLists);
}

Status CheckNumLists(const ShardingPlan& plan, int64_t num_servers, int64_t n) {
  const int64_t want = plan.num_tables() * num_servers;
  if (n == want) return OkStatus();
  return errors::InvalidArgument("N is ", n, ", want ", plan.num_tables(), " tables * ",
                                 num_servers, " servers = ", want);
}

// Outputs before the offsets: N fid lists, N row splits and, in version 5, N sizes.
template <int version>
Status ListsShape(InferenceContext* c) {
  std::string feature_cfgs;
  int64_t servers;
  int64_t n;
  TF_RETURN_IF_ERROR(c->GetAttr("feature_cfgs", &feature_cfgs));
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  ShardingPlan plan;
  TF_RETURN_IF_ERROR(ParsePlan(feature_cfgs, KindOf(version), &plan));
  TF_RETURN_IF_ERROR(GetServers(c, plan, &servers));
  TF_RETURN_IF_ERROR(CheckNumLists(plan, servers, n));
  int out = 0;
  for (int64_t j = 0; j < n; ++j) c->set_output(out++, c->Vector(c->UnknownDim()));
  for (int64_t j = 0; j < n; ++j) {
    c->set_output(out++, c->Vector(static_cast<int64_t>(plan.tables()[j / servers].size()) + 1));
  }
  if (version == 5) {
    for (int64_t j = 0; j < n; ++j) c->set_output(out++, c->Vector(1));
  }
  c->set_output(out++, c->Vector(c->UnknownDim()));  // fid_offset
  c->set_output(out++, c->Vector(c->UnknownDim()));  // feature_offset
  c->set_output(out++, c->Vector(static_cast<int64_t>(plan.features().size()) + 1));
  c->set_output(out++, version == 5 ? c->Vector(1) : c->Scalar());
  if (version == 5) {
    for (int i = 0; i < 3; ++i) c->set_output(out++, c->Vector(1));
    c->set_output(out++, c->Vector(n));
  }
  return OkStatus();
}

Status PackedShape(InferenceContext* c) {
  std::string feature_cfgs;
  int64_t servers;
  TF_RETURN_IF_ERROR(c->GetAttr("feature_cfgs", &feature_cfgs));
  ShardingPlan plan;
  TF_RETURN_IF_ERROR(ParsePlan(feature_cfgs, KindOf(4), &plan));
  TF_RETURN_IF_ERROR(GetServers(c, plan, &servers));
  const int64_t features = static_cast<int64_t>(plan.features().size());
  c->set_output(0, c->Vector(c->UnknownDim()));
  c->set_output(1, c->Vector((features + plan.num_tables()) * servers));
  c->set_output(2, c->Vector(plan.num_tables() * servers));
  c->set_output(3, c->Vector(servers));
  c->set_output(4, c->Vector(plan.num_tables() * servers));
  c->set_output(5, c->Vector(c->UnknownDim()));
  c->set_output(6, c->Vector(c->UnknownDim()));
  c->set_output(7, c->Vector(features + 1));
  c->set_output(8, c->Scalar());
  return OkStatus();
}

constexpr char kListsDoc[] = R"doc(
Splits the ids of a batch by hash table and parameter server.

Tables and features are numbered in the order of their names; list j = table * servers + server.

pb_input: Example or Instance: a vector of samples; ExampleBatch: one, scalar or [1].
fid_list: ids of list j, feature after feature.
fid_list_row_splits: where the features of list j start, and its end.
fid_offset: per occurrence of an id, where its embedding is.
feature_offset: start of every (feature, row) in fid_offset, and the total.
nfl_offset: start of every feature in feature_offset; bit 31: one row for the whole batch.
batch_size: rows.
ps_num: number of parameter servers; less than 1 counts as 1.
feature_cfgs: serialized FeatureConfigs.
unique: list an id once per feature.
input_type: example, examplebatch or instance.
parallel_flag: 0: one thread.
single_thread_feature_watermark: fewest ids for which several threads are used.
)doc";

#define SHARDING_ATTRS()                                     \
  Attr("ps_num: int")                                        \
      .Attr("feature_cfgs: string")                          \
      .Attr("unique: bool")                                  \
      .Attr("input_type: string")                            \
      .Attr("parallel_flag: int")                            \
      .Attr("single_thread_feature_watermark: int = 320000") \
      .Attr("T: {variant, string}")

#define REGISTER_LISTS_OP(name)                 \
  REGISTER_OP(name)                             \
      .Input("pb_input: T")                     \
      .Output("fid_list: N * int64")            \
      .Output("fid_list_row_splits: N * int64") \
      .Output("fid_offset: uint64")             \
      .Output("feature_offset: int32")          \
      .Output("nfl_offset: uint32")             \
      .Output("batch_size: int32")              \
      .SHARDING_ATTRS()                         \
      .Attr("N: int >= 0")                      \
      .SetShapeFn(ListsShape<1>)                \
      .Doc(kListsDoc)

REGISTER_LISTS_OP("ShardingSparseFids");
REGISTER_LISTS_OP("ShardingSparseFidsV2");
REGISTER_LISTS_OP("ShardingSparseFidsV3");

REGISTER_OP("ShardingSparseFidsV4")
    .Input("pb_input: T")
    .Output("fid_list: int64")
    .Output("fid_list_row_splits: int64")
    .Output("fid_list_table_row_length: int32")
    .Output("fid_list_shard_row_lenth: int32")
    .Output("fid_list_emb_row_lenth: int32")
    .Output("fid_offset: uint64")
    .Output("feature_offset: int32")
    .Output("nfl_offset: uint32")
    .Output("batch_size: int32")
    .SHARDING_ATTRS()
    .SetShapeFn(PackedShape)
    .Doc(R"doc(
ShardingSparseFidsV3 with all lists in one tensor, server after server, table after table.

fid_list_row_splits: the splits of every list; each starts at 0 again.
fid_list_table_row_length: ids of each list.
fid_list_shard_row_lenth: ids of each server.
fid_list_emb_row_lenth: floats of the embeddings of each list.
)doc");

REGISTER_OP("ShardingSparseFidsV5")
    .Input("pb_input: T")
    .Output("fid_list: N * int64")
    .Output("fid_list_row_splits: N * int64")
    .Output("fid_list_row_splits_size: N * int32")
    .Output("fid_offset: uint64")
    .Output("feature_offset: int32")
    .Output("nfl_offset: uint32")
    .Output("batch_size: int32")
    .Output("nfl_size: int32")
    .Output("feature_size: int32")
    .Output("fid_size: int32")
    .Output("emb_size: int32")
    .SHARDING_ATTRS()
    .Attr("N: int >= 0")
    .SetShapeFn(ListsShape<5>)
    .Doc(R"doc(
ShardingSparseFidsV3 with the size of every output, so that several requests can be concatenated.

fid_list_row_splits_size: [1] each: length of the row splits.
batch_size: [1].
nfl_size: [1]: length of nfl_offset.
feature_size: [1]: length of feature_offset.
fid_size: [1]: length of fid_offset.
emb_size: floats of the embeddings of each list.
)doc");

// Rows of all features of the plan, and the ids that had to be regrouped to get them.
struct BatchRows {
  std::vector<FeatureRows> features;
  std::vector<std::vector<uint64_t>> regrouped;
  int64_t batch_size = 0;
};

using FeatureIndex = absl::flat_hash_map<absl::string_view, int64_t>;

Status CollectRows(const SampleBatch<Example>& batch, const ShardingPlan& plan,
                   const FeatureIndex& index, BatchRows* rows) {
  const int64_t num_features = static_cast<int64_t>(plan.features().size());
  std::vector<const ExampleFeature*> cells(static_cast<size_t>(num_features));
  for (int64_t row = 0; row < batch.size(); ++row) {
    std::fill(cells.begin(), cells.end(), nullptr);
    for (const auto& named : batch[row].named_feature()) {
      const auto it = index.find(named.name());
      if (it != index.end()) cells[it->second] = &named.feature();
    }
    for (int64_t f = 0; f < num_features; ++f) {
      TF_RETURN_IF_ERROR(AppendFids(plan.features()[f].name, cells[f], &rows->features[f]));
      rows->features[f].AddRow();
    }
  }
  rows->batch_size = batch.size();
  return OkStatus();
}

Status CollectRows(const SampleBatch<ExampleBatch>& batch, const ShardingPlan& plan,
                   const FeatureIndex& index, BatchRows* rows) {
  if (batch.size() != 1) {
    return errors::InvalidArgument("pb_input has ", batch.size(), " ExampleBatch, want 1");
  }
  TF_RETURN_IF_ERROR(CheckBatchSize(batch[0]));
  std::vector<const ::monolith::io::proto::NamedFeatureList*> columns(plan.features().size());
  for (const auto& column : batch[0].named_feature_list()) {
    const auto it = index.find(column.name());
    if (it != index.end()) columns[it->second] = &column;
  }
  for (size_t f = 0; f < columns.size(); ++f) {
    FeatureRows& feature = rows->features[f];
    if (columns[f] == nullptr) {
      feature.shared = true;
      feature.AddRow();
      continue;
    }
    TF_RETURN_IF_ERROR(CheckColumn(batch[0], *columns[f]));
    feature.shared = IsShared(*columns[f]);
    const int64_t num_rows = feature.shared ? 1 : columns[f]->feature_size();
    for (int64_t row = 0; row < num_rows; ++row) {
      const ExampleFeature* cell =
          row < columns[f]->feature_size() ? &columns[f]->feature(row) : nullptr;
      TF_RETURN_IF_ERROR(AppendFids(plan.features()[f].name, cell, &feature));
      feature.AddRow();
    }
  }
  rows->batch_size = batch[0].batch_size();
  return OkStatus();
}

// v1 slot of a feature named fc_slot_<n> or slot_<n>, else -1.
int64_t SlotOfName(absl::string_view name) {
  if (absl::StartsWith(name, "fc_")) name.remove_prefix(3);
  int64_t slot;
  if (!absl::ConsumePrefix(&name, "slot_") || !absl::SimpleAtoi(name, &slot)) return -1;
  return slot >= 0 && slot < ::monolith::engine::kMaxSlotsV1 ? slot : -1;
}

Status CollectRows(const SampleBatch<Instance>& batch, const ShardingPlan& plan,
                   const FeatureIndex& index, BatchRows* rows) {
  const int64_t num_features = static_cast<int64_t>(plan.features().size());
  std::vector<std::vector<int64_t>> by_slot(::monolith::engine::kMaxSlotsV1);
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t slot = SlotOfName(plan.features()[f].name);
    if (slot >= 0) by_slot[slot].push_back(f);
  }
  std::vector<const InstanceFeature*> cells(static_cast<size_t>(num_features));
  std::vector<std::vector<uint64_t>> v1(static_cast<size_t>(num_features));
  for (int64_t row = 0; row < batch.size(); ++row) {
    std::fill(cells.begin(), cells.end(), nullptr);
    for (const InstanceFeature& feature : batch[row].feature()) {
      const auto it = index.find(feature.name());
      if (it != index.end()) cells[it->second] = &feature;
    }
    for (uint64_t fid : batch[row].fid()) {
      for (int64_t f : by_slot[::monolith::engine::SlotOfV1(fid)]) v1[f].push_back(fid);
    }
    for (int64_t f = 0; f < num_features; ++f) {
      FeatureRows& feature = rows->features[f];
      if (!v1[f].empty()) {
        rows->regrouped.push_back(std::move(v1[f]));
        v1[f].clear();
        const std::vector<uint64_t>& fids = rows->regrouped.back();
        feature.spans.push_back({fids.data(), static_cast<int64_t>(fids.size()), true});
      }
      if (cells[f] != nullptr) {
        feature.spans.push_back({cells[f]->fid().data(), cells[f]->fid_size(), false});
        for (const auto& list : cells[f]->fid_list()) {
          feature.spans.push_back({list.value().data(), list.value_size(), false});
        }
      }
      feature.AddRow();
    }
  }
  rows->batch_size = batch.size();
  return OkStatus();
}

template <int version>
class ShardingSparseFidsOp : public OpKernel {
 public:
  explicit ShardingSparseFidsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string feature_cfgs, input_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_cfgs", &feature_cfgs));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unique", &unique_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("input_type", &input_type));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parallel_flag", &parallel_flag_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("single_thread_feature_watermark", &watermark_));
    OP_REQUIRES_OK(ctx, ParseSampleType("input_type", input_type, &type_));
    OP_REQUIRES_OK(ctx, ParsePlan(feature_cfgs, KindOf(version), &plan_));
    OP_REQUIRES_OK(ctx, GetServers(ctx, plan_, &servers_));
    if (version != 4) {
      int64_t n;
      OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n));
      OP_REQUIRES_OK(ctx, CheckNumLists(plan_, servers_, n));
    }
    for (size_t f = 0; f < plan_.features().size(); ++f) {
      index_[plan_.features()[f].name] = static_cast<int64_t>(f);
    }
  }

  void Compute(OpKernelContext* ctx) override {
    switch (type_) {
      case SampleType::kInstance:
        return Run<Instance>(ctx);
      case SampleType::kExample:
        return Run<Example>(ctx);
      case SampleType::kExampleBatch:
        return Run<ExampleBatch>(ctx);
    }
  }

 private:
  template <typename Proto>
  void Run(OpKernelContext* ctx) {
    const DeviceRunner pool(ctx);
    const ::monolith::engine::InlineRunner inline_only;
    SampleBatch<Proto> batch;
    OP_REQUIRES_OK(ctx, batch.Load("pb_input", ctx->input(0), pool));
    BatchRows rows;
    rows.features.resize(plan_.features().size());
    OP_REQUIRES_OK(ctx, CollectRows(batch, plan_, index_, &rows));
    int64_t num_ids = 0;
    for (const FeatureRows& feature : rows.features) {
      for (const auto& span : feature.spans) num_ids += span.size;
    }
    const ::monolith::engine::ParallelRunner& parallel =
        parallel_flag_ > 0 && num_ids >= watermark_
            ? static_cast<const ::monolith::engine::ParallelRunner&>(pool)
            : inline_only;
    ShardedFids sharded;
    const std::string problem =
        ShardFids(plan_, rows.features, servers_, unique_, KindOf(version), parallel, &sharded);
    OP_REQUIRES(ctx, problem.empty(), errors::InvalidArgument("pb_input: ", problem));
    int out = 0;
    OP_REQUIRES_OK(ctx,
                   version == 4 ? WritePacked(ctx, sharded, &out) : WriteLists(ctx, sharded, &out));
    OP_REQUIRES_OK(ctx, WriteVector<uint64_t>(ctx, out++, sharded.fid_offset));
    OP_REQUIRES_OK(ctx, WriteVector<int32_t>(ctx, out++, sharded.feature_offset));
    OP_REQUIRES_OK(ctx, WriteVector<uint32_t>(ctx, out++, sharded.nfl_offset));
    if (version != 5) {
      Tensor* batch_size;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(out, TensorShape({}), &batch_size));
      batch_size->scalar<int32_t>()() = static_cast<int32_t>(rows.batch_size);
      return;
    }
    for (int64_t size : {rows.batch_size, static_cast<int64_t>(sharded.nfl_offset.size()),
                         static_cast<int64_t>(sharded.feature_offset.size()),
                         static_cast<int64_t>(sharded.fid_offset.size())}) {
      OP_REQUIRES_OK(ctx, WriteVector<int32_t>(ctx, out++, std::vector<int64_t>{size}));
    }
    OP_REQUIRES_OK(ctx, WriteVector<int32_t>(ctx, out++, sharded.embedding_sizes));
  }

  template <typename T, typename Source>
  static Status WriteVector(OpKernelContext* ctx, int out, const std::vector<Source>& values) {
    Tensor* tensor;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, out, {static_cast<int64_t>(values.size())}, &tensor));
    std::transform(values.begin(), values.end(), tensor->flat<T>().data(),
                   [](Source value) { return static_cast<T>(value); });
    return OkStatus();
  }

  static Status WriteLists(OpKernelContext* ctx, const ShardedFids& sharded, int* out) {
    for (const auto& list : sharded.fid_lists) {
      TF_RETURN_IF_ERROR(WriteVector<int64_t>(ctx, (*out)++, list));
    }
    for (const auto& splits : sharded.row_splits) {
      TF_RETURN_IF_ERROR(WriteVector<int64_t>(ctx, (*out)++, splits));
    }
    if (version != 5) return OkStatus();
    for (const auto& splits : sharded.row_splits) {
      const std::vector<int64_t> size = {static_cast<int64_t>(splits.size())};
      TF_RETURN_IF_ERROR(WriteVector<int32_t>(ctx, (*out)++, size));
    }
    return OkStatus();
  }

  Status WritePacked(OpKernelContext* ctx, const ShardedFids& sharded, int* out) const {
    std::vector<int64_t> fids, splits, table_lengths, shard_lengths, embedding_lengths;
    for (int64_t p = 0; p < servers_; ++p) {
      const size_t before = fids.size();
      for (int64_t t = 0; t < plan_.num_tables(); ++t) {
        const int64_t j = t * servers_ + p;
        const std::vector<int64_t>& list = sharded.fid_lists[j];
        fids.insert(fids.end(), list.begin(), list.end());
        splits.insert(splits.end(), sharded.row_splits[j].begin(), sharded.row_splits[j].end());
        table_lengths.push_back(static_cast<int64_t>(list.size()));
        embedding_lengths.push_back(sharded.embedding_sizes[j]);
      }
      shard_lengths.push_back(static_cast<int64_t>(fids.size() - before));
    }
    TF_RETURN_IF_ERROR(WriteVector<int64_t>(ctx, (*out)++, fids));
    TF_RETURN_IF_ERROR(WriteVector<int64_t>(ctx, (*out)++, splits));
    for (const auto* lengths : {&table_lengths, &shard_lengths, &embedding_lengths}) {
      TF_RETURN_IF_ERROR(WriteVector<int32_t>(ctx, (*out)++, *lengths));
    }
    return OkStatus();
  }

  int64_t servers_;
  bool unique_;
  SampleType type_;
  int64_t parallel_flag_;
  int64_t watermark_;
  ShardingPlan plan_;
  FeatureIndex index_;
};

#define REGISTER_SHARDING_KERNEL(name, version) \
  REGISTER_GUARDED_KERNEL(Name(name).Device(DEVICE_CPU), ShardingSparseFidsOp<version>)

REGISTER_SHARDING_KERNEL("ShardingSparseFids", 1);
REGISTER_SHARDING_KERNEL("ShardingSparseFidsV2", 2);
REGISTER_SHARDING_KERNEL("ShardingSparseFidsV3", 3);
REGISTER_SHARDING_KERNEL("ShardingSparseFidsV4", 4);
REGISTER_SHARDING_KERNEL("ShardingSparseFidsV5", 5);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
