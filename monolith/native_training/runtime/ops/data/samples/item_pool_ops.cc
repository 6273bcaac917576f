// ItemPoolCreate, RandomFill, Check, Save and Restore.
//
// Files: {model_path}/model.ckpt-{step}_item_pool_{worker}_{shard}_{workers}, TFRecords of
// ChannelCache; channel c is in shard c mod nshards. Older ones have no "model.ckpt-{step}_". The
// shards of one worker at one step are a set (files/file_set.h) with the manifest
// .model.ckpt-{step}_pool_{worker}_{workers}.manifest.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/distribution/id_sharding.h"
#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/record_reader.h"
#include "monolith/native_training/runtime/ops/data/samples/item_pool.h"
#include "monolith/native_training/runtime/ops/files/env_file_system.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/io/path.h"
#include "tensorflow/core/platform/env.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::io::proto::ChannelCache;
using ::monolith::io::proto::FeatureData;

REGISTER_OP("ItemPoolCreate")
    .Output("pool: resource")
    .Attr("start_num: int")
    .Attr("max_item_num_per_channel: int")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
A pool of items to draw negatives from.

start_num: a channel is drawn from once it has more items.
)doc");

REGISTER_OP("ItemPoolRandomFill")
    .Input("ipool: resource")
    .Output("opool: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Fills the pool with random items, for tests.");

#define FILE_ATTRS()                 \
  Attr("model_path: string")         \
      .Attr("nshards: int = 1")      \
      .Attr("worker_index: int = 0") \
      .Attr("num_workers: int = 1")

REGISTER_OP("ItemPoolCheck")
    .Input("ipool: resource")
    .Input("global_step: int64")
    .Output("opool: resource")
    .FILE_ATTRS()
    .Attr("buffer_size: int = 10485760")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Fails with DataLoss when the files hold something else than the pool.");

REGISTER_OP("ItemPoolSave")
    .Input("ipool: resource")
    .Input("global_step: int64")
    .Output("opool: resource")
    .FILE_ATTRS()
    .Attr("random_sleep_ms: int = 0")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Writes the pool; random_sleep_ms: wait up to that long before, to spread the load.");

REGISTER_OP("ItemPoolRestore")
    .Input("ipool: resource")
    .Input("global_step: int64")
    .Output("opool: resource")
    .FILE_ATTRS()
    .Attr("buffer_size: int = 10485760")
    .Attr("random_sleep_ms: int = 0")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Adds what this worker saved at global_step or last before it; nothing when there are no files.
)doc");

class ItemPoolCreateOp : public NamedResourceOp<ItemPoolResource> {
 public:
  explicit ItemPoolCreateOp(OpKernelConstruction* ctx) : NamedResourceOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("start_num", &start_num_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_item_num_per_channel", &capacity_));
    OP_REQUIRES(
        ctx, start_num_ >= 0 && capacity_ > 0,
        errors::InvalidArgument("start_num is ", start_num_, " and max_item_num_per_channel ",
                                capacity_, ", want at least 0 and 1"));
  }

 private:
  Status Create(OpKernelContext*, const std::string&, ItemPoolResource** resource) override {
    *resource = new ItemPoolResource(start_num_, capacity_);
    return OkStatus();
  }

  int64_t start_num_;
  int64_t capacity_;
};

class ItemPoolRandomFillOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<ItemPoolResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "ipool", &resource));
    CachedItemPool* pool = resource->pool();
    OP_REQUIRES_OK(ctx, CheckCount("start_num of the pool", pool->start_num(), 0, kMaxStartNum));
    std::mt19937_64 random{std::random_device{}()};
    for (int64_t channel = 1; channel <= kChannels; ++channel) {
      const int64_t items = std::min<int64_t>(pool->capacity(), pool->start_num() + kExtraItems);
      for (int64_t i = 0; i < items; ++i) {
        auto data = std::make_shared<FeatureData>();
        const uint64_t item_id = random();
        data->set_gid(static_cast<int64_t>(item_id));
        for (int64_t slot = 1; slot <= 4; ++slot) {
          data->add_fids(static_cast<int64_t>(::monolith::engine::MakeFidV1(slot, random())));
        }
        pool->Add(channel, item_id, std::move(data));
      }
    }
    ctx->set_output(0, ctx->input(0));
  }

 private:
  static constexpr int64_t kChannels = 10;
  static constexpr int64_t kExtraItems = 100;
  static constexpr int64_t kMaxStartNum = 1 << 16;  // random items that are enough to try
};

// Names the pool that one worker saved at one step.
struct PoolSet {
  int64_t step = -1;  // -1: an old name without a step
  int64_t worker = 0;
  int64_t workers = 0;

  bool operator<(const PoolSet& other) const {
    return std::tie(step, worker, workers) < std::tie(other.step, other.worker, other.workers);
  }

  std::string Start() const {
    return step < 0 ? std::string() : strings::StrCat("model.ckpt-", step, "_");
  }
  std::string Prefix() const { return strings::StrCat(Start(), "item_pool_", worker, "_"); }
  std::string Suffix(int64_t shard) const { return strings::StrCat(shard, "_", workers); }
  std::string Manifest() const {
    return strings::StrCat(".", Start(), "pool_", worker, "_", workers, ".manifest");
  }

  engine::FileSetName Name(const std::string& folder) const {
    engine::FileSetName name;
    name.prefix = io::JoinPath(folder, Prefix());
    name.manifest = io::JoinPath(folder, Manifest());
    name.owns = [set = *this](std::string_view suffix) {
      int64_t shard = 0;
      const absl::string_view number(suffix.data(), std::min(suffix.find('_'), suffix.size()));
      return absl::SimpleAtoi(number, &shard) && shard >= 0 && suffix == set.Suffix(shard);
    };
    return name;
  }

  // Parses the name of a file, whose suffix inside the set becomes `suffix`, or of a manifest,
  // whose suffix is empty.
  bool Parse(const std::string& name, std::string* suffix) {
    absl::string_view rest = name;
    const bool is_manifest = absl::ConsumePrefix(&rest, ".");
    if (absl::ConsumePrefix(&rest, "model.ckpt-")) {
      const std::vector<absl::string_view> parts = absl::StrSplit(rest, absl::MaxSplits('_', 1));
      if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &step) || step < 0) return false;
      rest = parts[1];
    }
    if (!absl::ConsumePrefix(&rest, is_manifest ? "pool_" : "item_pool_")) return false;
    if (is_manifest && !absl::ConsumeSuffix(&rest, ".manifest")) return false;
    const std::vector<absl::string_view> parts = absl::StrSplit(rest, '_');
    int64_t shard = 0;
    if (parts.size() != (is_manifest ? 2 : 3) || !absl::SimpleAtoi(parts[0], &worker) ||
        !absl::SimpleAtoi(parts.back(), &workers) || workers <= 0 ||
        (!is_manifest && (!absl::SimpleAtoi(parts[1], &shard) || shard < 0))) {
      return false;
    }
    *suffix = is_manifest ? "" : Suffix(shard);
    // There is no other way to write these numbers.
    return name == (is_manifest ? Manifest() : Prefix() + *suffix);
  }
};

class ItemPoolFileOp : public OpKernel {
 public:
  explicit ItemPoolFileOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("model_path", &model_path_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &nshards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("worker_index", &worker_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_workers", &num_workers_));
    if (ctx->HasAttr("random_sleep_ms")) {
      OP_REQUIRES_OK(ctx, ctx->GetAttr("random_sleep_ms", &random_sleep_ms_));
    }
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(nshards_, random_sleep_ms_));
    OP_REQUIRES(ctx, nshards_ > 0,
                errors::InvalidArgument("nshards is ", nshards_, ", want at least 1"));
    OP_REQUIRES(ctx, worker_ >= 0 && worker_ < num_workers_,
                errors::InvalidArgument("worker_index is ", worker_, ", want 0 to num_workers ",
                                        num_workers_, " - 1"));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<ItemPoolResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "ipool", &resource));
    OP_REQUIRES_OK(ctx, CheckScalar("global_step", ctx->input(1)));
    if (random_sleep_ms_ > 0) {
      std::mt19937_64 random{std::random_device{}()};
      const int64_t ms = std::uniform_int_distribution<int64_t>(0, random_sleep_ms_)(random);
      std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    }
    OP_REQUIRES_OK(ctx, Run(ctx->env(), ctx->input(1).scalar<int64_t>()(), resource->pool()));
    ctx->set_output(0, ctx->input(0));
  }

 protected:
  virtual Status Run(Env* env, int64_t global_step, CachedItemPool* pool) = 0;

  // Adds what this worker saved last at `global_step` or before; every worker saves at steps of its
  // own. `found` is false when there is nothing. After an error the pool is as it was.
  Status Load(Env* env, int64_t global_step, CachedItemPool* pool, bool* found) const {
    *found = false;
    EnvFileSystem files(env);
    std::vector<std::string> names;
    const engine::Status listed =
        files.List(engine::FolderOf(io::JoinPath(model_path_, "x")), &names);
    if (listed.code == engine::StatusCode::kNotFound) return OkStatus();
    TF_RETURN_IF_ERROR(FromEngine(listed));
    std::map<PoolSet, std::vector<std::string>> sets;
    for (const std::string& name : names) {
      PoolSet set;
      std::string suffix;
      if (!set.Parse(name, &suffix) || set.step > global_step) continue;
      if (set.worker != worker_ % set.workers) continue;
      std::vector<std::string>& suffixes = sets[set];
      if (!suffix.empty()) suffixes.push_back(suffix);
    }
    if (sets.empty()) return OkStatus();
    // Where the number of workers has changed between two saves at one step, that of now counts.
    const auto newest = std::max_element(sets.begin(), sets.end(), [&](auto& a, auto& b) {
      const auto rank = [&](const PoolSet& set) {
        return std::make_tuple(set.step, set.workers == num_workers_, set.workers);
      };
      return rank(a.first) < rank(b.first);
    });
    std::sort(newest->second.begin(), newest->second.end());
    TF_RETURN_IF_ERROR(
        FromEngine(LoadSet(&files, newest->first.Name(model_path_), newest->second, pool)));
    *found = true;
    return OkStatus();
  }

  std::string model_path_;
  int64_t nshards_;
  int64_t worker_;
  int64_t num_workers_;

 private:
  static engine::Status LoadSet(engine::FileSystem* files, const engine::FileSetName& name,
                                const std::vector<std::string>& suffixes, CachedItemPool* pool) {
    engine::FileSetReader reader;
    engine::Status status = engine::FileSetReader::OpenManifest(files, name, &reader);
    if (status.code == engine::StatusCode::kNotFound) {
      status = engine::FileSetReader::OpenFiles(files, name, suffixes, &reader);
    }
    if (!status.ok()) return status;
    std::vector<ChannelCache> channels;
    for (const engine::FileSetReader::File& file : reader.files()) {
      status = ReadChannels(reader, file, &channels);
      if (!status.ok()) return status;
    }
    for (ChannelCache& channel : channels) {
      for (FeatureData& data : *channel.mutable_feature_datas()) {
        CachedItemPool::Entry entry;
        entry.item_id = static_cast<uint64_t>(data.gid());
        entry.seen = data.origin_cnt();
        entry.sampled = data.sample_cnt();
        entry.item = std::make_shared<FeatureData>(std::move(data));
        pool->Put(channel.channel_id(), std::move(entry));
      }
    }
    return engine::Status::Ok();
  }

  static engine::Status ReadChannels(const engine::FileSetReader& set,
                                     const engine::FileSetReader::File& file,
                                     std::vector<ChannelCache>* channels) {
    std::unique_ptr<engine::InputFile> input;
    engine::Status status = set.Open(file, &input);
    if (!status.ok()) return status;
    engine::RecordBatchReader reader(std::move(input));
    std::vector<engine::RecordView> records;
    while (true) {
      status = reader.Next(/*max_records=*/16, &records);
      if (status.code == engine::StatusCode::kDataLoss) {
        return engine::Status::DataLoss(file.path + ": " + status.message);
      }
      if (!status.ok() || records.empty()) return status;
      for (const engine::RecordView& record : records) {
        if (!channels->emplace_back().ParseFromArray(record.data, static_cast<int>(record.size))) {
          return engine::Status::DataLoss(file.path + ": a record is not a ChannelCache");
        }
      }
    }
  }

  int64_t random_sleep_ms_ = 0;
};

ChannelCache ToProto(int64_t channel, const std::vector<CachedItemPool::Entry>& entries) {
  ChannelCache proto;
  proto.set_channel_id(channel);
  for (const CachedItemPool::Entry& entry : entries) {
    FeatureData* data = proto.add_feature_datas();
    *data = *entry.item;
    data->set_gid(static_cast<int64_t>(entry.item_id));
    data->set_origin_cnt(entry.seen);
    data->set_sample_cnt(entry.sampled);
  }
  return proto;
}

class ItemPoolSaveOp : public ItemPoolFileOp {
 public:
  using ItemPoolFileOp::ItemPoolFileOp;

 private:
  Status Run(Env* env, int64_t global_step, CachedItemPool* pool) override {
    if (global_step < 0) {
      return errors::InvalidArgument("global_step is ", global_step, ", want at least 0");
    }
    EnvFileSystem files(env);
    return FromEngine(Save(&files, {global_step, worker_, num_workers_}, *pool));
  }

  engine::Status Save(engine::FileSystem* files, const PoolSet& set,
                      const CachedItemPool& pool) const {
    engine::FileSetWriter writer(files, set.Name(model_path_));
    const auto channels = pool.Snapshot();
    std::string record;
    for (int64_t shard = 0; shard < nshards_; ++shard) {
      std::unique_ptr<engine::SetOutputFile> file;
      engine::Status status = writer.Create(set.Suffix(shard), &file);
      if (!status.ok()) return status;
      for (const auto& [channel, entries] : channels) {
        if (::monolith::distribution::ShardOfId(channel, nshards_) != shard) continue;
        const std::string bytes = ToProto(channel, entries).SerializeAsString();
        record.clear();
        engine::AppendRecord(bytes.data(), static_cast<int64_t>(bytes.size()), &record);
        file->AddRecords(1);
        status = file->Append(record.data(), static_cast<int64_t>(record.size()));
        if (!status.ok()) return status;
      }
      status = file->Close();
      if (!status.ok()) return status;
    }
    return writer.Publish();
  }
};

class ItemPoolRestoreOp : public ItemPoolFileOp {
 public:
  using ItemPoolFileOp::ItemPoolFileOp;

 private:
  Status Run(Env* env, int64_t global_step, CachedItemPool* pool) override {
    bool found;
    TF_RETURN_IF_ERROR(Load(env, global_step, pool, &found));
    if (!found) {
      LOG(WARNING) << "no item pool of step " << global_step << " or before in " << model_path_;
    }
    return OkStatus();
  }
};

class ItemPoolCheckOp : public ItemPoolFileOp {
 public:
  using ItemPoolFileOp::ItemPoolFileOp;

 private:
  Status Run(Env* env, int64_t global_step, CachedItemPool* pool) override {
    CachedItemPool saved(pool->start_num(), pool->capacity());
    bool found;
    TF_RETURN_IF_ERROR(Load(env, global_step, &saved, &found));
    if (!found) {
      return errors::NotFound("no item pool of step ", global_step, " or before in ", model_path_);
    }
    const auto want = pool->Snapshot();
    const auto got = saved.Snapshot();
    for (const auto& [channel, entries] : want) {
      const auto it = got.find(channel);
      if (it == got.end() || ToProto(channel, it->second).SerializeAsString() !=
                                 ToProto(channel, entries).SerializeAsString()) {
        return errors::DataLoss("channel ", channel, " of the item pool in ", model_path_,
                                " differs from the pool");
      }
    }
    return CheckEqual("number of channels in the files", static_cast<int64_t>(got.size()),
                      "that of the pool", static_cast<int64_t>(want.size()));
  }
};

REGISTER_GUARDED_KERNEL(Name("ItemPoolCreate").Device(DEVICE_CPU), ItemPoolCreateOp);
REGISTER_GUARDED_KERNEL(Name("ItemPoolRandomFill").Device(DEVICE_CPU), ItemPoolRandomFillOp);
REGISTER_GUARDED_KERNEL(Name("ItemPoolCheck").Device(DEVICE_CPU), ItemPoolCheckOp);
REGISTER_GUARDED_KERNEL(Name("ItemPoolSave").Device(DEVICE_CPU), ItemPoolSaveOp);
REGISTER_GUARDED_KERNEL(Name("ItemPoolRestore").Device(DEVICE_CPU), ItemPoolRestoreOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
