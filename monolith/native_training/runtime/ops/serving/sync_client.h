// Remembers which rows of which tables were updated, so that they can be pushed to serving
// replicas, or written to a row log.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_SYNC_CLIENT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_SYNC_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/row_log/batch_builder.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Marks that the writer of a row log and the savers of checkpoints leave each other in a client:
// one runs on a parameter server, the others on the chief.
struct RowLogMarks {
  // Where the log ends for the writer: epoch, seq, next offset; zeros before the first batch.
  int64_t position[3] = {0, 0, 0};
  // How often tables were declared ready, and the position and step of the checkpoint that they had
  // then; the step is negative if they came from none.
  int64_t ready_count = 0;
  int64_t restored[4] = {0, 0, 0, -1};
  int64_t saved_step = 0;  // of the newest complete checkpoint
};

// A dummy client remembers nothing. A real one serves single tables or the tables of one group, not
// both. One that is for a row log keeps what it learns in builder(); Collect gives nothing then.
// Thread-safe.
class SyncClient : public ResourceBase {
 public:
  // One table and the rows that were updated since the last Collect.
  struct Delta {
    std::string unique_id;
    int64_t dim = 0;
    std::vector<int64_t> ids;
    std::vector<float> rows;  // ids.size() * dim
  };

  explicit SyncClient(bool is_dummy) : is_dummy_(is_dummy) {}

  // For a row log whose batches become scans when more than `capacity` rows were updated.
  explicit SyncClient(int64_t capacity)
      : is_dummy_(false), builder_(std::make_unique<::monolith::engine::BatchBuilder>(capacity)) {}

  bool is_dummy() const { return is_dummy_; }

  // Null unless the client is for a row log.
  ::monolith::engine::BatchBuilder* builder() const { return builder_.get(); }

  RowLogMarks marks() const {
    mutex_lock lock(mu_);
    return marks_;
  }
  void UpdateMarks(const std::function<void(RowLogMarks*)>& update) {
    mutex_lock lock(mu_);
    update(&marks_);
  }

  // Name of the group whose tables are attached; empty for single tables.
  std::string group() const {
    mutex_lock lock(mu_);
    return group_;
  }

  // Makes `table` report its updates until Detach. `group` is empty for a single table.
  Status Attach(const std::string& unique_id, const std::string& group,
                ::monolith::engine::EmbeddingTable* table) {
    if (is_dummy_) return OkStatus();
    mutex_lock lock(mu_);
    if (!sources_.empty() && group != group_) {
      return errors::InvalidArgument(
          "A sync client serves single tables or one group of tables, but ", Describe(group_),
          " is attached and ", Describe(group), " is to be");
    }
    group_ = group;
    sources_.push_back({unique_id, table});
    if (builder_ != nullptr) {
      ::monolith::engine::BatchBuilder* const builder = builder_.get();
      const auto touch = [builder, table](const int64_t* ids, int64_t n) {
        builder->Touch(table, ids, n);
      };
      table->SetTouchedCallback(touch);
      table->SetErasedCallback(touch);
      table->SetReplacedCallback(
          [builder] { builder->RequestScan(::monolith::engine::kScanReplaced); });
      builder->Attach(unique_id, table);
      return OkStatus();
    }
    table->SetTouchedCallback([this, table](const int64_t* ids, int64_t n) {
      std::vector<::monolith::engine::TableKey> keys(n);
      for (int64_t i = 0; i < n; ++i) keys[i] = {ids[i], table};
      Touch(keys);
    });
    return OkStatus();
  }

  // Waits for a running Collect; `table` may go away afterwards.
  void Detach(const ::monolith::engine::EmbeddingTable* table) {
    if (builder_ != nullptr) builder_->Detach(table);
    mutex_lock lock(mu_);
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i].table == table) {
        sources_.erase(sources_.begin() + i);
        return;
      }
    }
  }

  // Takes the touched ids and reads their rows. Leaves out single tables without updates, but
  // returns every table of a group with any update: a push to a group names them all in order.
  std::vector<Delta> Collect() {
    mutex_lock lock(mu_);
    std::vector<Delta> deltas(sources_.size());
    const auto stolen = touched_.Steal();
    std::vector<::monolith::engine::TableKey> keys(stolen.size());
    stolen.CopyTo(keys.data());
    std::unordered_map<const void*, Delta*> delta_of_table;
    for (size_t i = 0; i < sources_.size(); ++i) delta_of_table[sources_[i].table] = &deltas[i];
    for (const auto& key : keys) {
      const auto found = delta_of_table.find(key.table);
      if (found != delta_of_table.end()) found->second->ids.push_back(key.id);
    }
    std::vector<Delta> result;
    for (size_t i = 0; i < sources_.size(); ++i) {
      Delta& delta = deltas[i];
      if (delta.ids.empty() && (group_.empty() || keys.empty())) continue;
      delta.unique_id = sources_[i].unique_id;
      delta.dim = sources_[i].table->dim();
      delta.rows.resize(delta.ids.size() * delta.dim);
      sources_[i].table->Lookup(delta.ids.data(), static_cast<int64_t>(delta.ids.size()),
                                delta.rows.data());
      result.push_back(std::move(delta));
    }
    return result;
  }

  // Takes back rows that could not be pushed: the next push holds them, with the values they have
  // by then. Returns false and forgets them if they would fill more than half of the set: an
  // unreachable target must not cost the others their rows.
  bool TakeBack(const std::vector<Delta>& deltas) {
    int64_t num_ids = 0;
    for (const Delta& delta : deltas) num_ids += static_cast<int64_t>(delta.ids.size());
    if (num_ids > kCapacity / 2) return false;
    mutex_lock lock(mu_);
    for (const Delta& delta : deltas) {
      for (const Source& source : sources_) {
        if (source.unique_id != delta.unique_id) continue;
        std::vector<::monolith::engine::TableKey> keys;
        keys.reserve(delta.ids.size());
        for (const int64_t id : delta.ids) keys.push_back({id, source.table});
        Touch(keys);
      }
    }
    return true;
  }

  std::string DebugString() const override {
    return is_dummy_ ? "dummy sync client" : builder_ ? "row log client" : "sync client";
  }

 private:
  struct Source {
    std::string unique_id;
    ::monolith::engine::EmbeddingTable* table;
  };

  void Touch(const std::vector<::monolith::engine::TableKey>& keys) {
    const int64_t dropped = touched_.Insert(keys.data(), static_cast<int64_t>(keys.size()));
    if (dropped > 0) {
      LOG(WARNING) << "More than " << kCapacity << " rows were updated since the last push; "
                   << dropped << " of them will not be pushed until they are updated again";
    }
  }

  static std::string Describe(const std::string& group) {
    return group.empty() ? "a single table" : "group " + group;
  }

  static constexpr int64_t kCapacity = 2097152;
  static constexpr int64_t kConcurrency = 64;

  const bool is_dummy_;
  const std::unique_ptr<::monolith::engine::BatchBuilder> builder_;
  ::monolith::engine::ConcurrentKeySet<::monolith::engine::TableKey> touched_{kCapacity,
                                                                              kConcurrency};
  mutable mutex mu_;
  std::vector<Source> sources_ TF_GUARDED_BY(mu_);
  std::string group_ TF_GUARDED_BY(mu_);
  RowLogMarks marks_ TF_GUARDED_BY(mu_);
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SERVING_SYNC_CLIENT_H_
