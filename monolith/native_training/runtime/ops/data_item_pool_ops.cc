// ItemPoolCreate, RandomFill, Check, Save and Restore.
//
// Files: {model_path}/model.ckpt-{step}_item_pool_{worker}_{shard}_{workers}, TFRecords of
// ChannelCache; channel c is in shard c mod nshards. Older ones have no "model.ckpt-{step}_".
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "monolith/native_training/runtime/data/fid.h"
#include "monolith/native_training/runtime/distribution/id_sharding.h"
#include "monolith/native_training/runtime/ops/data_item_pool.h"
#include "monolith/native_training/runtime/ops/kernel_registration.h"
#include "monolith/native_training/runtime/ops/named_resource_op.h"
#include "monolith/native_training/runtime/ops/op_checks.h"
#include "monolith/native_training/runtime/ops/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/io/path.h"
#include "tensorflow/core/lib/io/record_reader.h"
#include "tensorflow/core/lib/io/record_writer.h"
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
Adds what was saved at global_step or last before it; nothing when there are no files.
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
          data->add_fids(static_cast<int64_t>(::monolith::data::MakeFidV1(slot, random())));
        }
        pool->Add(channel, item_id, std::move(data));
      }
    }
    ctx->set_output(0, ctx->input(0));
  }

 private:
  static constexpr int64_t kChannels = 10;
  static constexpr int64_t kExtraItems = 100;
  static constexpr int64_t kMaxStartNum = 1 << 16;  // so many random items are enough to try
};

// The name of a file of a pool.
struct PoolFile {
  int64_t step = -1;  // -1: an old name without a step
  int64_t worker = 0;
  int64_t shard = 0;
  int64_t workers = 0;

  std::string Name() const {
    return strings::StrCat("model.ckpt-", step, "_item_pool_", worker, "_", shard, "_", workers);
  }

  bool Parse(absl::string_view name) {
    if (absl::ConsumePrefix(&name, "model.ckpt-")) {
      const std::vector<absl::string_view> parts = absl::StrSplit(name, absl::MaxSplits('_', 1));
      if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &step) || step < 0) return false;
      name = parts[1];
    }
    if (!absl::ConsumePrefix(&name, "item_pool_")) return false;
    const std::vector<absl::string_view> parts = absl::StrSplit(name, '_');
    return parts.size() == 3 && absl::SimpleAtoi(parts[0], &worker) &&
           absl::SimpleAtoi(parts[1], &shard) && absl::SimpleAtoi(parts[2], &workers) &&
           workers > 0;
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

  // Reads the files of this worker that were saved at `global_step` or last before it. `found` is
  // false when there are none.
  Status Load(Env* env, int64_t global_step, CachedItemPool* pool, bool* found) const {
    *found = false;
    std::vector<std::string> names;
    if (!env->GetChildren(model_path_, &names).ok()) return OkStatus();
    int64_t newest = -2;
    std::vector<std::pair<PoolFile, std::string>> files;
    for (const std::string& name : names) {
      PoolFile file;
      if (!file.Parse(name) || file.step > global_step) continue;
      newest = std::max(newest, file.step);
      files.emplace_back(file, name);
    }
    std::sort(files.begin(), files.end(),
              [](const auto& a, const auto& b) { return a.second < b.second; });
    for (const auto& [file, name] : files) {
      if (file.step != newest || file.worker != worker_ % file.workers) continue;
      TF_RETURN_IF_ERROR(LoadFile(env, io::JoinPath(model_path_, name), pool));
      *found = true;
    }
    return OkStatus();
  }

  std::string model_path_;
  int64_t nshards_;
  int64_t worker_;
  int64_t num_workers_;

 private:
  static Status LoadFile(Env* env, const std::string& path, CachedItemPool* pool) {
    std::unique_ptr<RandomAccessFile> file;
    TF_RETURN_IF_ERROR(env->NewRandomAccessFile(path, &file));
    io::SequentialRecordReader reader(file.get());
    for (;;) {
      tstring record;
      const Status status = reader.ReadRecord(&record);
      if (errors::IsOutOfRange(status)) return OkStatus();
      if (!status.ok()) return errors::DataLoss(path, ": ", status.message());
      ChannelCache channel;
      if (!channel.ParseFromArray(record.data(), static_cast<int>(record.size()))) {
        return errors::DataLoss(path, ": a record is not a ChannelCache");
      }
      for (FeatureData& data : *channel.mutable_feature_datas()) {
        CachedItemPool::Entry entry;
        entry.item_id = static_cast<uint64_t>(data.gid());
        entry.seen = data.origin_cnt();
        entry.sampled = data.sample_cnt();
        entry.item = std::make_shared<FeatureData>(std::move(data));
        pool->Put(channel.channel_id(), std::move(entry));
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
    TF_RETURN_IF_ERROR(env->RecursivelyCreateDir(model_path_));
    const auto channels = pool->Snapshot();
    for (int64_t shard = 0; shard < nshards_; ++shard) {
      const std::string path =
          io::JoinPath(model_path_, PoolFile{global_step, worker_, shard, num_workers_}.Name());
      const std::string temporary = path + "_tmp";
      std::unique_ptr<WritableFile> file;
      TF_RETURN_IF_ERROR(env->NewWritableFile(temporary, &file));
      io::RecordWriter writer(file.get());
      for (const auto& [channel, entries] : channels) {
        if (::monolith::distribution::ShardOfId(channel, nshards_) != shard) continue;
        TF_RETURN_IF_ERROR(writer.WriteRecord(ToProto(channel, entries).SerializeAsString()));
      }
      TF_RETURN_IF_ERROR(writer.Close());
      TF_RETURN_IF_ERROR(file->Close());
      TF_RETURN_IF_ERROR(env->RenameFile(temporary, path));
    }
    return OkStatus();
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
