// Kernels of MonolithHashTableSave and MonolithHashTableRestore.
#include <string>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/file_kernel.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class HashTableSaveOp : public FileKernel {
 public:
  explicit HashTableSaveOp(OpKernelConstruction* ctx) : FileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &options_.nshards));
    int64_t random_sleep_ms = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("random_sleep_ms", &random_sleep_ms));
    set_max_delay_ms(random_sleep_ms);
    std::string expiry;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_expire_time_config", &expiry));
    OP_REQUIRES_OK(ctx, ExpiryPolicyFromBytes(expiry, &options_.expiry));
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(options_.nshards, random_sleep_ms));
  }

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return SaveTable(ctx->env(), *resource->table(), basename, options_);
  }

  SaveOptions options_;
};

class HashTableRestoreOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<HashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return RestoreTable(ctx->env(), basename, resource->table());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSave").Device(DEVICE_CPU), HashTableSaveOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestore").Device(DEVICE_CPU), HashTableRestoreOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
