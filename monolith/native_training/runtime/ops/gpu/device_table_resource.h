// Tables on a GPU as resources: a single one, and a group. What they are created with lives on the
// host: occurrence filters, and sync clients, which have to be dummies.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/gpu/device_table.h"
#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_filter_resource.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/hash.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {

// The rows of a table on a GPU are not reported, so nothing could be pushed.
inline Status CheckDummy(const std::string& name, const SyncClient& client) {
  if (client.is_dummy()) return OkStatus();
  return errors::InvalidArgument("table ", name,
                                 " is on a GPU, whose updates cannot be pushed: it needs a dummy "
                                 "sync client; use CuckooHashTableConfig for real-time training");
}

class DeviceTableResource : public ResourceBase {
 public:
  static constexpr char kInput[] = "table_handle";

  static Status Create(const ::monolith::hash_table::EmbeddingHashTableConfig& config,
                       const std::string& name, core::RefCountPtr<HashFilterResource> filter,
                       core::RefCountPtr<SyncClient> sync_client, DeviceTableResource** resource) {
    core::RefCountPtr<DeviceTableResource> created(new DeviceTableResource);
    TF_RETURN_IF_ERROR(CheckDummy(name, *sync_client));
    TF_RETURN_IF_ERROR(DeviceTable::Create(config, name, &created->table_));
    created->current_.store(created->table_.get(), std::memory_order_release);
    created->filter_ = std::move(filter);
    *resource = created.release();
    return OkStatus();
  }

  // As HashTableResource::Configure.
  Status Configure(const ::monolith::hash_table::EmbeddingHashTableConfig& config) {
    mutex_lock lock(configure_mu_);
    std::unique_ptr<DeviceTable> next;
    TF_RETURN_IF_ERROR(DeviceTable::Create(config, table()->name(), &next));
    if (next->dim() != table()->dim()) {
      return errors::InvalidArgument("config has dimension ", next->dim(), ", but the table has ",
                                     table()->dim());
    }
    TF_RETURN_IF_ERROR(CopyRows(*table(), next.get()));
    current_.store(next.get(), std::memory_order_release);
    // Kernels may hold it still.
    former_.push_back(std::move(table_));
    table_ = std::move(next);
    const DeviceTable& former = *former_.back();
    return former.Check(former.library().table_clear(former.get(), nullptr));
  }

  DeviceTable* table() const { return current_.load(std::memory_order_acquire); }
  engine::OccurrenceFilter* filter() const { return filter_->filter(); }

  std::string DebugString() const override { return table()->DebugString(); }

 private:
  DeviceTableResource() = default;

  static Status CopyRows(const DeviceTable& from, DeviceTable* to) {
    constexpr int kShards = engine::EmbeddingTable::NumShards();
    std::vector<std::string> entries;
    std::vector<const char*> records;
    std::vector<int64_t> sizes;
    for (int shard = 0; shard < kShards; ++shard) {
      int64_t offset = 0, state_reset = 0;
      TF_RETURN_IF_ERROR(from.SavePage(shard, kShards, INT64_MAX, offset, &offset, &entries));
      records.clear();
      sizes.clear();
      for (const std::string& entry : entries) {
        records.push_back(entry.data());
        sizes.push_back(static_cast<int64_t>(entry.size()));
      }
      if (entries.empty()) continue;
      TF_RETURN_IF_ERROR(to->Check(
          to->library().table_load_records(to->get(), nullptr, records.data(), sizes.data(),
                                           static_cast<int64_t>(records.size()), &state_reset)));
    }
    return OkStatus();
  }

  core::RefCountPtr<HashFilterResource> filter_;
  mutex configure_mu_;
  std::vector<std::unique_ptr<DeviceTable>> former_;
  std::unique_ptr<DeviceTable> table_;
  std::atomic<DeviceTable*> current_{nullptr};  // table_'s
};

// Orders its tables by name, as MultiHashTableResource does.
class DeviceTableGroup : public ResourceBase {
 public:
  static constexpr char kInput[] = "mtable";

  struct Member {
    std::unique_ptr<DeviceTable> table;
    std::unique_ptr<engine::TableFilter> own_filter;
    engine::OccurrenceFilter* filter = nullptr;
  };

  static Status Create(const ::monolith::hash_table::MultiEmbeddingHashTableConfig& config,
                       const std::string& name, core::RefCountPtr<HashFilterResource> filter,
                       core::RefCountPtr<SyncClient> sync_client, DeviceTableGroup** resource) {
    std::map<std::string, int> by_name;
    TF_RETURN_IF_ERROR(OrderByName(config, &by_name));
    TF_RETURN_IF_ERROR(CheckDummy(name, *sync_client));
    core::RefCountPtr<DeviceTableGroup> created(new DeviceTableGroup);
    created->filter_ = std::move(filter);
    for (const auto& entry : by_name) {
      Member member;
      TF_RETURN_IF_ERROR(
          DeviceTable::Create(config.configs(entry.second), entry.first, &member.table));
      member.filter = created->filter_->filter();
      TF_RETURN_IF_ERROR(MakeTableFilter(config.configs(entry.second), entry.first, member.filter,
                                         &member.own_filter));
      if (member.own_filter != nullptr) member.filter = member.own_filter.get();
      created->dims_.push_back(member.table->dim());
      created->num_segments_ += member.table->num_segments();
      created->members_.push_back(std::move(member));
    }
    *resource = created.release();
    return OkStatus();
  }

  int64_t size() const { return static_cast<int64_t>(members_.size()); }
  DeviceTable* table(int64_t i) const { return members_[i].table.get(); }
  engine::OccurrenceFilter* filter(int64_t i) const { return members_[i].filter; }
  const std::vector<int64_t>& dims() const { return dims_; }
  int64_t num_segments() const { return num_segments_; }

  // Returns a table's position, or -1.
  int64_t Find(const std::string& name) const {
    for (int64_t i = 0; i < size(); ++i) {
      if (table(i)->name() == name) return i;
    }
    return -1;
  }

  std::vector<NamedRecordTable> named_tables() const {
    std::vector<NamedRecordTable> result;
    for (const Member& member : members_) {
      result.push_back({member.table->name(), member.table.get()});
    }
    return result;
  }

  std::string DebugString() const override {
    std::string text = "{";
    for (const Member& member : members_) {
      strings::StrAppend(&text, text.size() > 1 ? ", " : "", "\"", member.table->name(),
                         "\": ", member.table->DebugString());
    }
    return text + "}";
  }

 private:
  DeviceTableGroup() = default;

  core::RefCountPtr<HashFilterResource> filter_;
  std::vector<Member> members_;
  std::vector<int64_t> dims_;
  int64_t num_segments_ = 0;
};

// The part of either that fused ops and lists of tables need.
struct FilteredDeviceTable {
  const DeviceTable* table;
  engine::OccurrenceFilter* filter;
};

// Holds references to tables during a call: to the single ones of the first inputs, or to a group.
class HeldDeviceTables {
 public:
  Status Lookup(OpKernelContext* ctx, int num_tables) {
    for (int i = 0; i < num_tables; ++i) {
      core::RefCountPtr<DeviceTableResource> resource;
      TF_RETURN_IF_ERROR(LookupHandleInput(ctx, i, "table_handles", &resource));
      tables_.push_back({resource->table(), resource->filter()});
      resources_.push_back(std::move(resource));
    }
    return OkStatus();
  }

  Status LookupGroup(OpKernelContext* ctx) {
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, DeviceTableGroup::kInput, &group_));
    for (int64_t i = 0; i < group_->size(); ++i) {
      tables_.push_back({group_->table(i), group_->filter(i)});
    }
    return OkStatus();
  }

  const std::vector<FilteredDeviceTable>& tables() const { return tables_; }

 private:
  std::vector<core::RefCountPtr<DeviceTableResource>> resources_;
  core::RefCountPtr<DeviceTableGroup> group_;
  std::vector<FilteredDeviceTable> tables_;
};

// A kernel that is a function of the table, or of the group of tables, of input 0.
template <auto kRun>
class KernelOnTables;

template <typename Resource, Status (*kRun)(OpKernelContext*, GpuCall*, const Resource&)>
class KernelOnTables<kRun> : public GpuKernel {
 public:
  using GpuKernel::GpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    core::RefCountPtr<Resource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, Resource::kInput, &resource));
    return kRun(ctx, call, *resource);
  }
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_
