// Kernels of MonolithHashTableSave and MonolithHashTableRestore.
#include <string>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_save_kernels.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class HashTableSaveOp : public TableSaveKernel {
 public:
  using TableSaveKernel::TableSaveKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return SaveTable(ctx->env(), *engine::AsRecordTable(resource->table()), basename, options());
  }
};

class HashTableRestoreOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return RestoreTable(ctx->env(), basename, engine::AsRecordTable(resource->table()).get());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSave").Device(DEVICE_CPU), HashTableSaveOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestore").Device(DEVICE_CPU), HashTableRestoreOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
