// Kernels that save and restore a group of tables, and count what was saved.
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_save_kernels.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class MultiHashTableSaveOp : public GroupSaveKernel {
 public:
  using GroupSaveKernel::GroupSaveKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &resource));
    return SaveTables(ctx->env(), resource->named_tables(), basename, options());
  }
};

class MultiHashTableRestoreOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &resource));
    return RestoreTables(ctx->env(), basename, resource->named_tables());
  }
};

class FeatureStatOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("basename", ctx->input(0)));
    const std::string basename(ctx->input(0).scalar<tstring>()());
    std::vector<std::pair<std::string, uint64_t>> sizes;
    OP_REQUIRES_OK(ctx, ReadTableSizes(ctx->env(), basename, &sizes));
    const int64_t n = static_cast<int64_t>(sizes.size());
    Tensor *names = nullptr, *counts = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {n}, &names));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {n}, &counts));
    for (int64_t i = 0; i < n; ++i) {
      names->vec<tstring>()(i) = sizes[i].first;
      counts->vec<uint64_t>()(i) = sizes[i].second;
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableSave").Device(DEVICE_CPU),
                        MultiHashTableSaveOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableRestore").Device(DEVICE_CPU),
                        MultiHashTableRestoreOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFeatureStat").Device(DEVICE_CPU),
                        FeatureStatOp);
// Beside groups that are on a GPU.
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFeatureStat")
                            .Device(DEVICE_GPU)
                            .HostMemory("basename")
                            .HostMemory("features")
                            .HostMemory("counts"),
                        FeatureStatOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
