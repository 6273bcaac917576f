// Tables on a GPU as resources: a single one, and a group. What they are created with lives on the
// host: occurrence filters, and sync clients, which have to be dummies.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/gpu/device_table.h"
#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/tables/hash_filter_resource.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/hash.h"
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
  static Status Create(const ::monolith::hash_table::EmbeddingHashTableConfig& config,
                       const std::string& name, core::RefCountPtr<HashFilterResource> filter,
                       core::RefCountPtr<SyncClient> sync_client, DeviceTableResource** resource) {
    core::RefCountPtr<DeviceTableResource> created(new DeviceTableResource);
    TF_RETURN_IF_ERROR(CheckDummy(name, *sync_client));
    TF_RETURN_IF_ERROR(DeviceTable::Create(config, name, &created->table_));
    created->filter_ = std::move(filter);
    *resource = created.release();
    return OkStatus();
  }

  DeviceTable* table() const { return table_.get(); }
  engine::OccurrenceFilter* filter() const { return filter_->filter(); }

  std::string DebugString() const override { return table_->DebugString(); }

 private:
  DeviceTableResource() = default;

  core::RefCountPtr<HashFilterResource> filter_;
  std::unique_ptr<DeviceTable> table_;
};

// Orders its tables by name, as MultiHashTableResource does.
class DeviceTableGroup : public ResourceBase {
 public:
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

Status FusedLookupOnDevice(OpKernelContext* ctx, GpuCall* call, int first_input,
                           const std::vector<FilteredDeviceTable>& tables, int64_t num_of_shards);
Status FusedOptimizeOnDevice(OpKernelContext* ctx, GpuCall* call, int first_input,
                             const std::vector<FilteredDeviceTable>& tables, int64_t num_of_shards,
                             bool enable_grad_accumulation);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_DEVICE_TABLE_RESOURCE_H_
