// The kernels that save and restore single tables in the files of a group, wherever tables live.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_GROUP_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_GROUP_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/file_kernel.h"
#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"
#include "monolith/native_training/runtime/ops/tables/table_places.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {

// A kernel on (handle, basename, others), whose tables have names.
template <typename Resource, typename Named>
class GroupFileKernel : public FileKernel {
 public:
  explicit GroupFileKernel(OpKernelConstruction* ctx) : FileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, CheckEachOnce("names", "name", names_));
  }

 protected:
  // Groups have their tables in the order of the names. The resources keep the tables alive.
  Status GetTables(OpKernelContext* ctx, std::vector<core::RefCountPtr<Resource>>* resources,
                   std::vector<Named>* tables) const {
    const int count = ctx->num_inputs() - 1;
    if (static_cast<int>(names_.size()) != count) {
      return errors::InvalidArgument("names has ", names_.size(), " elements, want ", count,
                                     ", one per table");
    }
    for (int i = 0; i < count; ++i) {
      resources->emplace_back();
      TF_RETURN_IF_ERROR(LookupHandleInput(ctx, i == 0 ? 0 : i + 1, i == 0 ? "handle" : "others",
                                           &resources->back()));
      tables->push_back({names_[i], resources->back()->table()});
    }
    for (size_t i = 0; i < tables->size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if ((*tables)[i].table == (*tables)[j].table) {
          return errors::InvalidArgument((*tables)[j].name, " and ", (*tables)[i].name,
                                         " are one table, want every table once");
        }
      }
    }
    std::sort(tables->begin(), tables->end(),
              [](const Named& a, const Named& b) { return a.name < b.name; });
    return OkStatus();
  }

 private:
  std::vector<std::string> names_;
};

template <typename Resource, typename Named>
class HashTableSaveGroupOp : public GroupFileKernel<Resource, Named> {
 public:
  explicit HashTableSaveGroupOp(OpKernelConstruction* ctx) : GroupFileKernel<Resource, Named>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &options_.nshards));
    std::string expiry;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_expire_time_config", &expiry));
    OP_REQUIRES_OK(ctx, ExpiryPolicyFromBytes(expiry, &options_.expiry));
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(options_.nshards, /*random_sleep_ms=*/0));
  }

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    std::vector<core::RefCountPtr<Resource>> resources;
    std::vector<Named> tables;
    TF_RETURN_IF_ERROR(this->GetTables(ctx, &resources, &tables));
    return SaveTables(ctx->env(), tables, basename, options_);
  }

  SaveOptions options_;
};

template <typename Resource, typename Named>
class HashTableRestoreGroupOp : public GroupFileKernel<Resource, Named> {
 public:
  using GroupFileKernel<Resource, Named>::GroupFileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    std::vector<core::RefCountPtr<Resource>> resources;
    std::vector<Named> tables;
    TF_RETURN_IF_ERROR(this->GetTables(ctx, &resources, &tables));
    std::vector<std::pair<std::string, uint64_t>> saved;
    TF_RETURN_IF_ERROR(ReadTableSizes(ctx->env(), basename, &saved));
    for (const Named& table : tables) {
      const bool found = std::any_of(saved.begin(), saved.end(),
                                     [&](const auto& other) { return other.first == table.name; });
      if (found) continue;
      std::string names;
      for (const auto& other : saved) strings::StrAppend(&names, " ", other.first);
      return errors::NotFound(basename, " has no table ", table.name, "; it has:", names);
    }
    return RestoreTables(ctx->env(), basename, tables);
  }
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_TABLE_GROUP_KERNELS_H_
