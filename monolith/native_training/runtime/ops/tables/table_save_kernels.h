// The bases of kernels that save: they read the attributes.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_SAVE_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_SAVE_KERNELS_H_

#include <cstdint>
#include <string>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/tables/file_kernel.h"
#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"

namespace tensorflow {
namespace monolith_tf {

// The kernel of MonolithHashTableSave.
class TableSaveKernel : public FileKernel {
 public:
  explicit TableSaveKernel(OpKernelConstruction* ctx) : FileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &options_.nshards));
    int64_t random_sleep_ms = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("random_sleep_ms", &random_sleep_ms));
    set_max_delay_ms(random_sleep_ms);
    std::string expiry;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_expire_time_config", &expiry));
    OP_REQUIRES_OK(ctx, ExpiryPolicyFromBytes(expiry, &options_.expiry));
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(options_.nshards, random_sleep_ms));
  }

 protected:
  const SaveOptions& options() const { return options_; }

 private:
  SaveOptions options_;
};

// The kernel of MonolithMultiHashTableSave.
class GroupSaveKernel : public FileKernel {
 public:
  explicit GroupSaveKernel(OpKernelConstruction* ctx) : FileKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nshards", &options_.nshards));
    std::string expiry;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_expire_time_config", &expiry));
    OP_REQUIRES_OK(ctx, ExpiryPolicyFromBytes(expiry, &options_.expiry));
    options_.use_own_expiry = expiry.empty();
    OP_REQUIRES_OK(ctx, CheckSaveAttrs(options_.nshards, /*random_sleep_ms=*/0));
  }

 protected:
  const SaveOptions& options() const { return options_; }

 private:
  SaveOptions options_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_SAVE_KERNELS_H_
