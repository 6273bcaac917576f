// GPU kernels of the fused ops, which look up and update the parts of all ranks of several tables:
// of single tables, and of a group.
#include <cstdint>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/gpu/device_table_resource.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/tables/fused_table_calls.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

Status FusedLookupOnDevice(OpKernelContext* ctx, GpuCall* call, int first_input,
                           const std::vector<FilteredDeviceTable>& tables, int64_t num_of_shards) {
  const Tensor& ids = ctx->input(first_input);
  TF_RETURN_IF_ERROR(CheckVector("ids", ids));
  std::vector<int64_t> dims;
  for (const FilteredDeviceTable& table : tables) dims.push_back(table.table->dim());
  FusedOffsets offsets;
  TF_RETURN_IF_ERROR(FusedOffsets::Create(ctx->input(first_input + 1), dims, num_of_shards,
                                          ids.NumElements(), &offsets));
  Tensor* embeddings = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {offsets.floats.back()}, &embeddings));
  const int64_t num_tables = static_cast<int64_t>(tables.size());
  std::vector<DeviceLookup> lookups;
  for (int64_t i = 0; i < num_tables * num_of_shards; ++i) {
    const int64_t n = offsets.ids[i + 1] - offsets.ids[i];
    if (n == 0) continue;
    lookups.push_back({tables[i % num_tables].table, DeviceIds(ids) + offsets.ids[i], n,
                       MutableFloats(*embeddings) + offsets.floats[i]});
  }
  TF_RETURN_IF_ERROR(LookUpDeviceTables(call, lookups));
  TF_RETURN_IF_ERROR(OutputFusedOffsets(ctx, offsets, num_of_shards));
  ctx->set_output(4, ids);
  return OkStatus();
}

Status FusedOptimizeOnDevice(OpKernelContext* ctx, GpuCall* call, int first_input,
                             const std::vector<FilteredDeviceTable>& tables, int64_t num_of_shards,
                             bool enable_grad_accumulation) {
  const Tensor& ids = ctx->input(first_input);
  const Tensor& grads = ctx->input(first_input + 3);
  std::vector<int64_t> dims;
  int64_t num_segments = 0;
  for (const FilteredDeviceTable& table : tables) {
    dims.push_back(table.table->dim());
    num_segments += table.table->num_segments();
  }
  FusedOffsets offsets;
  TF_RETURN_IF_ERROR(
      CheckFusedUpdate(ctx, first_input, dims, num_segments, num_of_shards, &offsets));
  DeviceWriteOptions options;
  TF_RETURN_IF_ERROR(GetNumber(ctx, first_input + 7, "req_time", &options.req_time));
  TF_RETURN_IF_ERROR(GetNumber(ctx, first_input + 8, "global_step", &options.global_step));
  options.sum_duplicates = enable_grad_accumulation;
  const int64_t num_tables = static_cast<int64_t>(tables.size());
  const float* rate = ctx->input(first_input + 6).flat<float>().data();
  std::vector<DeviceUpdate> updates;
  for (int64_t table = 0; table < num_tables; ++table) {
    options.learning_rates = rate;
    options.filter = tables[table].filter;
    rate += tables[table].table->num_segments();
    DeviceUpdate update{tables[table].table, {}, options};
    for (int64_t shard = 0; shard < num_of_shards; ++shard) {
      const int64_t i = shard * num_tables + table;
      update.spans.push_back({DeviceIds(ids) + offsets.ids[i], offsets.ids[i + 1] - offsets.ids[i],
                              Floats(grads) + offsets.floats[i]});
    }
    updates.push_back(std::move(update));
  }
  return OptimizeDeviceTables(call, updates);
}

// A kernel on the tables of the first inputs, or on those of the group that input 0 is.
template <bool kIsGroup>
class FusedGpuKernel : public GpuKernel {
 public:
  explicit FusedGpuKernel(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    if (!kIsGroup) OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &num_handles_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_of_shards_));
  }

 protected:
  Status Hold(OpKernelContext* ctx, HeldDeviceTables* held) const {
    return kIsGroup ? held->LookupGroup(ctx) : held->Lookup(ctx, num_handles_);
  }
  int num_handles() const { return num_handles_; }
  int64_t num_of_shards() const { return num_of_shards_; }

 private:
  int num_handles_ = 1;
  int64_t num_of_shards_ = 0;
};

template <bool kIsGroup>
class FusedLookupGpuOp : public FusedGpuKernel<kIsGroup> {
 public:
  using FusedGpuKernel<kIsGroup>::FusedGpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    HeldDeviceTables held;
    TF_RETURN_IF_ERROR(this->Hold(ctx, &held));
    return FusedLookupOnDevice(ctx, call, this->num_handles(), held.tables(),
                               this->num_of_shards());
  }
};

template <bool kIsGroup>
class FusedOptimizeGpuOp : public FusedGpuKernel<kIsGroup> {
 public:
  explicit FusedOptimizeGpuOp(OpKernelConstruction* ctx) : FusedGpuKernel<kIsGroup>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_grad_accumulation", &enable_grad_accumulation_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    HeldDeviceTables held;
    TF_RETURN_IF_ERROR(this->Hold(ctx, &held));
    TF_RETURN_IF_ERROR(FusedOptimizeOnDevice(ctx, call, this->num_handles(), held.tables(),
                                             this->num_of_shards(), enable_grad_accumulation_));
    for (int i = 0; i < this->num_handles(); ++i) ctx->set_output(i, ctx->input(i));
    return OkStatus();
  }

 private:
  bool enable_grad_accumulation_ = false;
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableFusedLookup")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handles")
                            .HostMemory("fused_slot_size")
                            .HostMemory("req_time")
                            .HostMemory("embedding_splits")
                            .HostMemory("id_offsets")
                            .HostMemory("embedding_offsets"),
                        FusedLookupGpuOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableFusedOptimize")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handles")
                            .HostMemory("fused_slot_size")
                            .HostMemory("id_offsets")
                            .HostMemory("grad_offsets")
                            .HostMemory("learning_rate_tensors")
                            .HostMemory("req_time")
                            .HostMemory("global_step")
                            .HostMemory("table_handles_output"),
                        FusedOptimizeGpuOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedLookup")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("fused_slot_size")
                            .HostMemory("req_time")
                            .HostMemory("embedding_splits")
                            .HostMemory("id_offsets")
                            .HostMemory("embedding_offsets"),
                        FusedLookupGpuOp<true>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedOptimize")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("fused_slot_size")
                            .HostMemory("id_offsets")
                            .HostMemory("grad_offsets")
                            .HostMemory("learning_rate_tensors")
                            .HostMemory("req_time")
                            .HostMemory("global_step")
                            .HostMemory("mtable_out"),
                        FusedOptimizeGpuOp<true>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
