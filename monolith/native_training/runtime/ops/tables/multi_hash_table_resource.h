// A group of embedding tables as one resource.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_MULTI_HASH_TABLE_RESOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_MULTI_HASH_TABLE_RESOURCE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/tables/fused_table_calls.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/hash.h"

namespace tensorflow {
namespace monolith_tf {

// Table name -> place in a configuration.
inline Status OrderByName(const ::monolith::hash_table::MultiEmbeddingHashTableConfig& config,
                          std::map<std::string, int>* by_name) {
  if (config.names_size() != config.configs_size() || config.names_size() == 0) {
    return errors::InvalidArgument("config has ", config.names_size(), " names and ",
                                   config.configs_size(),
                                   " configs, want as many of both, and at least one");
  }
  for (int i = 0; i < config.names_size(); ++i) {
    if (!by_name->emplace(config.names(i), i).second) {
      return errors::InvalidArgument("config has two tables named ", config.names(i));
    }
  }
  return OkStatus();
}

// Makes the filter of a table that has a threshold of its own; else leaves `filter` null.
inline Status MakeTableFilter(const ::monolith::hash_table::EmbeddingHashTableConfig& config,
                              const std::string& name, engine::OccurrenceFilter* shared,
                              std::unique_ptr<engine::TableFilter>* filter) {
  if (!config.has_occurrence_threshold()) return OkStatus();
  const engine::Status made =
      engine::TableFilter::Create(shared, config.occurrence_threshold(), Hash64(name), filter);
  if (made.ok()) return OkStatus();
  return errors::InvalidArgument("table ", name, ": ", made.message);
}

// Orders its tables by name: row k of ragged ids belongs to the k-th.
class MultiHashTableResource : public ResourceBase {
 public:
  static Status Create(const ::monolith::hash_table::MultiEmbeddingHashTableConfig& config,
                       const std::string& name, core::RefCountPtr<HashFilterResource> filter,
                       core::RefCountPtr<SyncClient> sync_client,
                       MultiHashTableResource** resource) {
    std::map<std::string, int> by_name;
    TF_RETURN_IF_ERROR(OrderByName(config, &by_name));
    core::RefCountPtr<MultiHashTableResource> created(new MultiHashTableResource);
    created->filter_ = std::move(filter);
    created->sync_client_ = std::move(sync_client);
    for (const auto& entry : by_name) {
      std::unique_ptr<SelfEvictingTable> table;
      const Status status = SelfEvictingTable::Create(config.configs(entry.second), &table);
      if (!status.ok()) {
        return Status(status.code(),
                      strings::StrCat("table ", entry.first, ": ", status.message()));
      }
      table->get()->SetName(entry.first);
      TF_RETURN_IF_ERROR(created->sync_client_->Attach(entry.first, name, table->get()));
      created->names_.push_back({entry.first, table->get()});
      engine::OccurrenceFilter* filter_of_table = created->filter_->filter();
      std::unique_ptr<engine::TableFilter> own;
      TF_RETURN_IF_ERROR(
          MakeTableFilter(config.configs(entry.second), entry.first, filter_of_table, &own));
      if (own != nullptr) {
        filter_of_table = own.get();
        created->table_filters_.push_back(std::move(own));
      }
      created->tables_.push_back({table->get(), filter_of_table});
      created->dims_.push_back(table->get()->dim());
      created->owned_.push_back(std::move(table));
    }
    *resource = created.release();
    return OkStatus();
  }

  ~MultiHashTableResource() override {
    for (const FilteredTable& table : tables_) sync_client_->Detach(table.table);
  }

  int64_t size() const { return static_cast<int64_t>(tables_.size()); }
  engine::EmbeddingTable* table(int64_t i) const { return tables_[i].table; }
  engine::OccurrenceFilter* filter(int64_t i) const { return tables_[i].filter; }
  const std::vector<FilteredTable>& tables() const { return tables_; }
  const std::vector<int64_t>& dims() const { return dims_; }
  const std::vector<NamedTable>& named_tables() const { return names_; }

  // Returns a table's position, or -1.
  int64_t Find(const std::string& name) const {
    const auto found = std::lower_bound(
        names_.begin(), names_.end(), name,
        [](const NamedTable& table, const std::string& wanted) { return table.name < wanted; });
    return found != names_.end() && found->name == name ? found - names_.begin() : -1;
  }

  std::string DebugString() const override {
    std::string text = "{";
    for (const NamedTable& table : names_) {
      strings::StrAppend(&text, text.size() > 1 ? ", " : "", "\"", table.name,
                         "\": ", table.table->DebugString());
    }
    return text + "}";
  }

 private:
  MultiHashTableResource() = default;

  core::RefCountPtr<HashFilterResource> filter_;
  std::vector<std::unique_ptr<engine::TableFilter>> table_filters_;
  core::RefCountPtr<SyncClient> sync_client_;
  std::vector<std::unique_ptr<SelfEvictingTable>> owned_;
  std::vector<FilteredTable> tables_;
  std::vector<int64_t> dims_;
  std::vector<NamedTable> names_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_MULTI_HASH_TABLE_RESOURCE_H_
