// Single tables in the files of a group: what graph mode trains as one resource, others hold as
// tables of their own.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/file_kernel.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"
#include "monolith/native_training/runtime/ops/tables/table_places.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithHashTableSaveGroup")
    .Input("handle: resource")
    .Input("basename: string")
    .Input("others: num_others * resource")
    .Output("output_handle: resource")
    .Attr("num_others: int >= 0")
    .Attr("names: list(string) >= 1")
    .Attr("nshards: int = -1")
    .Attr("slot_expire_time_config: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Writes tables to the files of a group, as MonolithMultiHashTableSave does.

handle: The first table.
basename: Scalar.
others: The other tables.
names: The names of the tables in the group.
nshards: Number of files; -1 lets the size decide.
slot_expire_time_config: A serialized SlotExpireTimeConfig.
)doc");

REGISTER_OP("MonolithHashTableRestoreGroup")
    .Input("handle: resource")
    .Input("basename: string")
    .Input("others: num_others * resource")
    .Output("output_handle: resource")
    .Attr("num_others: int >= 0")
    .Attr("names: list(string) >= 1")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Replaces the content of tables by that of the tables of these names in the files of a group.

handle: The first table.
basename: Scalar.
others: The other tables.
names: The names of the tables in the group. Fails if one is not there; nothing changes then.
)doc");

// A kernel on (handle, basename, others), whose tables have names.
class GroupFileKernel : public FileKernel {
 public:
  explicit GroupFileKernel(OpKernelConstruction* ctx) : FileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, CheckEachOnce("names", "name", names_));
  }

 protected:
  // Groups have their tables in the order of the names. The resources keep the tables alive.
  Status GetTables(OpKernelContext* ctx,
                   std::vector<core::RefCountPtr<HashTableResource>>* resources,
                   std::vector<NamedTable>* tables) const {
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
              [](const NamedTable& a, const NamedTable& b) { return a.name < b.name; });
    return OkStatus();
  }

 private:
  std::vector<std::string> names_;
};

class HashTableSaveGroupOp : public GroupFileKernel {
 public:
  explicit HashTableSaveGroupOp(OpKernelConstruction* ctx) : GroupFileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &options_.nshards));
    std::string expiry;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_expire_time_config", &expiry));
    OP_REQUIRES_OK(ctx, ExpiryPolicyFromBytes(expiry, &options_.expiry));
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(options_.nshards, /*random_sleep_ms=*/0));
  }

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    std::vector<NamedTable> tables;
    TF_RETURN_IF_ERROR(GetTables(ctx, &resources, &tables));
    return SaveTables(ctx->env(), tables, basename, options_);
  }

  SaveOptions options_;
};

class HashTableRestoreGroupOp : public GroupFileKernel {
 public:
  using GroupFileKernel::GroupFileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    std::vector<core::RefCountPtr<HashTableResource>> resources;
    std::vector<NamedTable> tables;
    TF_RETURN_IF_ERROR(GetTables(ctx, &resources, &tables));
    std::vector<std::pair<std::string, uint64_t>> saved;
    TF_RETURN_IF_ERROR(ReadTableSizes(ctx->env(), basename, &saved));
    for (const NamedTable& table : tables) {
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

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSaveGroup").Device(DEVICE_CPU),
                        HashTableSaveGroupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestoreGroup").Device(DEVICE_CPU),
                        HashTableRestoreGroupOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
