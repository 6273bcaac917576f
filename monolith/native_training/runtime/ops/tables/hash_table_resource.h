// An embedding table as a resource, with the filter and the sync client it is created with.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_RESOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_RESOURCE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/eviction_thread.h"
#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/tables/hash_filter_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"

namespace tensorflow {
namespace monolith_tf {

// Lets `evict` run in the background as often as a table's configuration asks for, if it does.
inline Status MakeEvictionThread(const ::monolith::hash_table::EmbeddingHashTableConfig& proto,
                                 std::function<void()> evict,
                                 std::unique_ptr<engine::EvictionThread>* thread) {
  constexpr int32_t kMaxEvictionHours = 24 * 365 * 100;  // fits 64-bit nanoseconds
  if (!proto.enable_feature_eviction()) return OkStatus();
  if (proto.feature_evict_every_n_hours() <= 0) {
    return errors::InvalidArgument("feature_evict_every_n_hours is ",
                                   proto.feature_evict_every_n_hours(), ", want at least 1");
  }
  const int32_t hours = std::min(proto.feature_evict_every_n_hours(), kMaxEvictionHours);
  try {
    *thread = std::make_unique<engine::EvictionThread>(std::chrono::hours(hours), std::move(evict));
  } catch (const std::exception& error) {
    return errors::ResourceExhausted("no memory or no thread to evict rows: ", error.what());
  }
  return OkStatus();
}

// A table that evicts expired rows in the background if its configuration asks for it.
class SelfEvictingTable {
 public:
  static Status Create(const ::monolith::hash_table::EmbeddingHashTableConfig& proto,
                       std::unique_ptr<SelfEvictingTable>* result) {
    if (proto.has_gpucuco()) {
      return errors::FailedPrecondition(
          "no CUDA device holds this table: its type is gpucuco, and it was placed on a CPU, as "
          "TensorFlow does where it finds no GPU; use CuckooHashTableConfig");
    }
    engine::TableConfig config;
    TF_RETURN_IF_ERROR(TableConfigFromProto(proto, &config));
    auto created = std::make_unique<SelfEvictingTable>();
    TF_RETURN_IF_ERROR(FromEngine(engine::EmbeddingTable::Create(config, &created->table_)));
    engine::EmbeddingTable* table = created->table_.get();
    TF_RETURN_IF_ERROR(MakeEvictionThread(
        proto, [table] { table->Evict(table->expiry()); }, &created->eviction_));
    *result = std::move(created);
    return OkStatus();
  }

  engine::EmbeddingTable* get() const { return table_.get(); }

 private:
  std::unique_ptr<engine::EmbeddingTable> table_;
  std::unique_ptr<engine::EvictionThread>
      eviction_;  // declared after the table, to stop before it goes
};

class HashTableResource : public ResourceBase {
 public:
  static Status Create(const ::monolith::hash_table::EmbeddingHashTableConfig& config,
                       const std::string& name, core::RefCountPtr<HashFilterResource> filter,
                       core::RefCountPtr<SyncClient> sync_client, HashTableResource** resource) {
    core::RefCountPtr<HashTableResource> created(new HashTableResource);
    TF_RETURN_IF_ERROR(SelfEvictingTable::Create(config, &created->table_));
    created->current_.store(created->table_->get(), std::memory_order_release);
    created->filter_ = std::move(filter);
    created->sync_client_ = std::move(sync_client);
    TF_RETURN_IF_ERROR(created->sync_client_->Attach(name, /*group=*/"", created->table()));
    *resource = created.release();
    return OkStatus();
  }

  ~HashTableResource() override {
    if (sync_client_ != nullptr && table_ != nullptr) sync_client_->Detach(table());
  }

  // Replaces the table by one of another configuration with the same rows, whose state is kept
  // where the optimizer is of the same kind. Reading goes on; nothing else may write meanwhile.
  Status Configure(const ::monolith::hash_table::EmbeddingHashTableConfig& config) {
    mutex_lock lock(configure_mu_);
    if (!sync_client_->is_dummy()) {
      return errors::FailedPrecondition("a table that is synchronized cannot be configured anew");
    }
    std::unique_ptr<SelfEvictingTable> next;
    TF_RETURN_IF_ERROR(SelfEvictingTable::Create(config, &next));
    if (next->get()->dim() != table()->dim()) {
      return errors::InvalidArgument("config has dimension ", next->get()->dim(),
                                     ", but the table has ", table()->dim());
    }
    next->get()->SetName(table()->name());
    TF_RETURN_IF_ERROR(CopyRows(*table(), next->get()));
    current_.store(next->get(), std::memory_order_release);
    table_->get()->Clear();
    // Kernels may hold it still.
    former_.push_back(std::move(table_));
    table_ = std::move(next);
    return OkStatus();
  }

  engine::EmbeddingTable* table() const { return current_.load(std::memory_order_acquire); }
  engine::OccurrenceFilter* filter() const { return filter_->filter(); }

  std::string DebugString() const override { return table()->DebugString(); }

 private:
  HashTableResource() = default;

  static Status CopyRows(const engine::EmbeddingTable& from, engine::EmbeddingTable* to) {
    constexpr int64_t kPage = 1 << 16;
    std::vector<std::string> entries;
    std::vector<engine::RecordView> records;
    engine::LoadStats stats;
    int64_t offset = 0;
    do {
      entries.clear();
      records.clear();
      TF_RETURN_IF_ERROR(FromEngine(from.SavePage(0, 1, kPage, offset, &offset, &entries)));
      for (const std::string& entry : entries) {
        records.push_back({entry.data(), static_cast<int64_t>(entry.size())});
      }
      TF_RETURN_IF_ERROR(FromEngine(
          to->LoadRecords(records.data(), static_cast<int64_t>(records.size()), &stats)));
    } while (static_cast<int64_t>(entries.size()) == kPage);
    return OkStatus();
  }

  core::RefCountPtr<HashFilterResource> filter_;
  core::RefCountPtr<SyncClient> sync_client_;
  mutex configure_mu_;
  std::vector<std::unique_ptr<SelfEvictingTable>> former_;
  std::unique_ptr<SelfEvictingTable> table_;
  std::atomic<engine::EmbeddingTable*> current_{nullptr};  // table_'s
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_RESOURCE_H_
