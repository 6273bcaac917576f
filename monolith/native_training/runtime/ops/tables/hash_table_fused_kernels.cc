// Kernels of MonolithHashTableFusedLookup and MonolithHashTableFusedOptimize.
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/fused_table_calls.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// Holds references to the tables of the first inputs during a call.
class HeldTables {
 public:
  Status Lookup(OpKernelContext* ctx, int num_tables) {
    for (int i = 0; i < num_tables; ++i) {
      core::RefCountPtr<HashTableResource> resource;
      TF_RETURN_IF_ERROR(LookupHandleInput(ctx, i, "table_handles", &resource));
      tables_.push_back({resource->table(), resource->filter()});
      resources_.push_back(std::move(resource));
    }
    return OkStatus();
  }

  const std::vector<FilteredTable>& tables() const { return tables_; }

 private:
  std::vector<core::RefCountPtr<HashTableResource>> resources_;
  std::vector<FilteredTable> tables_;
};

class FusedLookupOp : public OpKernel {
 public:
  explicit FusedLookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &num_tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_of_shards_));
  }

  void Compute(OpKernelContext* ctx) override {
    HeldTables held;
    OP_REQUIRES_OK(ctx, held.Lookup(ctx, num_tables_));
    OP_REQUIRES_OK(ctx, FusedLookup(ctx, num_tables_, held.tables(), num_of_shards_));
  }

 private:
  int num_tables_ = 0;
  int64_t num_of_shards_ = 0;
};

class FusedOptimizeOp : public OpKernel {
 public:
  explicit FusedOptimizeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &num_tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_of_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_grad_accumulation", &enable_grad_accumulation_));
  }

  void Compute(OpKernelContext* ctx) override {
    HeldTables held;
    OP_REQUIRES_OK(ctx, held.Lookup(ctx, num_tables_));
    OP_REQUIRES_OK(ctx, FusedOptimize(ctx, num_tables_, held.tables(), num_of_shards_,
                                      enable_grad_accumulation_));
    for (int i = 0; i < num_tables_; ++i) ctx->set_output(i, ctx->input(i));
  }

 private:
  int num_tables_ = 0;
  int64_t num_of_shards_ = 0;
  bool enable_grad_accumulation_ = false;
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableFusedLookup").Device(DEVICE_CPU), FusedLookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableFusedOptimize").Device(DEVICE_CPU), FusedOptimizeOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
