// GPU kernels of the single-table ops.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/gpu/device_table_resource.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "monolith/native_training/runtime/ops/tables/table_save_kernels.h"

namespace tensorflow {
namespace monolith_tf {

namespace {

class HashTableGpuOp : public NamedResourceOp<DeviceTableResource> {
 public:
  explicit HashTableGpuOp(OpKernelConstruction* ctx) : NamedResourceOp<DeviceTableResource>(ctx) {
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES(ctx, config_.ParseFromString(config),
                errors::InvalidArgument("Unable to parse config. Make sure it is serialized "
                                        "version of EmbeddingHashTableConfig."));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("label", &label_));
  }

 private:
  Status Create(OpKernelContext* ctx, const std::string& name,
                DeviceTableResource** resource) override {
    core::RefCountPtr<HashFilterResource> filter;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "filter_handle", &filter));
    core::RefCountPtr<SyncClient> sync_client;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 1, "sync_client_handle", &sync_client));
    return DeviceTableResource::Create(config_, label_.empty() ? name : label_, std::move(filter),
                                       std::move(sync_client), resource);
  }

  ::monolith::hash_table::EmbeddingHashTableConfig config_;
  std::string label_;
};

class ConfigureGpuOp : public OpKernel {
 public:
  explicit ConfigureGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES(ctx, config_.ParseFromString(config),
                errors::InvalidArgument("config is no serialized EmbeddingHashTableConfig"));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    OP_REQUIRES_OK(ctx, resource->Configure(config_));
  }

 private:
  ::monolith::hash_table::EmbeddingHashTableConfig config_;
};

class LookupGpuOp : public GpuKernel {
 public:
  explicit LookupGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim_size", &dim_size_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    core::RefCountPtr<DeviceTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "table_handle", &resource));
    if (dim_size_ != resource->table()->dim()) {
      return errors::InvalidArgument("dim_size should match hash table size. dim_size is ",
                                     dim_size_, ", the table's is ", resource->table()->dim());
    }
    const Tensor& ids = ctx->input(1);
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {ids.NumElements(), dim_size_}, &out));
    return LookUpDeviceTables(
        call, {{resource->table(), DeviceIds(ids), ids.NumElements(), MutableFloats(*out)}});
  }

 private:
  int64_t dim_size_ = 0;
};

Status LookUpEntriesOfTable(OpKernelContext* ctx, GpuCall* call,
                            const DeviceTableResource& resource) {
  const int64_t n = ctx->input(1).NumElements();
  std::vector<std::string> entries;
  TF_RETURN_IF_ERROR(
      resource.table()->LookupEntries(call->stream(), DeviceIds(ctx->input(1)), n, &entries));
  Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {n}, &out));
  auto strings = out->vec<tstring>();
  for (int64_t i = 0; i < n; ++i) strings(i) = entries[i];
  return OkStatus();
}

template <DeviceWrite write>
Status AssignToTable(OpKernelContext* ctx, GpuCall* call, const DeviceTableResource& resource) {
  const Tensor& ids = ctx->input(1);
  const Tensor& values = ctx->input(2);
  DeviceWriteOptions options;
  TF_RETURN_IF_ERROR(GetNumber(ctx, 3, "req_time", &options.req_time));
  options.filter = resource.filter();
  TF_RETURN_IF_ERROR(CheckIdUpdates(values, ids.NumElements(), resource.table()->dim()));
  TF_RETURN_IF_ERROR(WriteDeviceTable(call, *resource.table(), write,
                                      {DeviceIds(ids), ids.NumElements(), Floats(values)},
                                      options));
  ctx->set_output(0, ctx->input(0));
  return OkStatus();
}

class OptimizeGpuOp : public GpuKernel {
 public:
  explicit OptimizeGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_dedup", &enable_dedup_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    core::RefCountPtr<DeviceTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "table_handle", &resource));
    const Tensor& ids = ctx->input(1);
    const Tensor& grads = ctx->input(2);
    const Tensor& rates = ctx->input(3);
    DeviceWriteOptions options;
    TF_RETURN_IF_ERROR(GetNumber(ctx, 4, "req_time", &options.req_time));
    TF_RETURN_IF_ERROR(GetNumber(ctx, 5, "global_step", &options.global_step));
    int64_t want = 0;
    TF_RETURN_IF_ERROR(MultiplySizes("size of id_values * dimension", ids.NumElements(),
                                     resource->table()->dim(), &want));
    TF_RETURN_IF_ERROR(CheckEqual("size of id_updates", grads.NumElements(),
                                  "size of id_values * dimension", want));
    TF_RETURN_IF_ERROR(CheckEqual("size of learning_rate_tensor", rates.NumElements(),
                                  "number of segments", resource->table()->num_segments()));
    options.learning_rates = rates.flat<float>().data();
    options.sum_duplicates = enable_dedup_;
    options.filter = resource->filter();
    TF_RETURN_IF_ERROR(OptimizeDeviceTables(
        call,
        {{resource->table(), {{DeviceIds(ids), ids.NumElements(), Floats(grads)}}, options}}));
    ctx->set_output(0, ctx->input(0));
    return OkStatus();
  }

 private:
  bool enable_dedup_ = false;
};

Status EraseFromTable(OpKernelContext* ctx, GpuCall* call, const DeviceTableResource& resource) {
  const DeviceTable& table = *resource.table();
  const Tensor& ids = ctx->input(1);
  if (ids.NumElements() > 0) {
    TF_RETURN_IF_ERROR(table.Check(call->library().table_erase(table.get(), call->stream(),
                                                               DeviceIds(ids), ids.NumElements())));
  }
  ctx->set_output(0, ctx->input(0));
  return OkStatus();
}

class SizeGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    int64_t size = 0;
    OP_REQUIRES_OK(ctx, FromEngine(resource->table()->GetSize(&size)));
    out->scalar<int64_t>()() = size;
  }
};

class StatsGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {DeviceTable::kNumStats}, &out));
    OP_REQUIRES_OK(ctx, resource->table()->WriteStats(out->vec<int64_t>().data()));
  }
};

class SaveAsTensorGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    int32_t part = 0, num_parts = 0;
    int64_t limit = 0, offset = 0, new_offset = 0;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 1, "shard_idx", &part));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 2, "num_shards", &num_parts));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 3, "limit", &limit));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4, "offset", &offset));
    std::vector<std::string> entries;
    OP_REQUIRES_OK(
        ctx, resource->table()->SavePage(part, num_parts, limit, offset, &new_offset, &entries));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    out->scalar<int64_t>()() = new_offset;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {static_cast<int64_t>(entries.size())}, &out));
    auto strings = out->vec<tstring>();
    for (size_t i = 0; i < entries.size(); ++i) strings(i) = entries[i];
  }
};

class SaveGpuOp : public TableSaveKernel {
 public:
  using TableSaveKernel::TableSaveKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<DeviceTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return SaveTable(ctx->env(), *resource->table(), basename, options());
  }
};

class RestoreGpuOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<DeviceTableResource> resource;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", &resource));
    return RestoreTable(ctx->env(), basename, resource->table());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTable")
                            .Device(DEVICE_GPU)
                            .HostMemory("filter_handle")
                            .HostMemory("sync_client_handle")
                            .HostMemory("handle"),
                        HashTableGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithHashTableConfigure").Device(DEVICE_GPU).HostMemory("table_handle"),
    ConfigureGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithHashTableLookup").Device(DEVICE_GPU).HostMemory("table_handle"), LookupGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableErase")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("table_handle_output"),
                        KernelOnTables<EraseFromTable>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupEntry")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("entry_str"),
                        KernelOnTables<LookUpEntriesOfTable>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableAssign")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("req_time")
                            .HostMemory("table_handle_output"),
                        KernelOnTables<AssignToTable<DeviceWrite::kAssign>>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableAssignAdd")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("req_time")
                            .HostMemory("table_handle_output"),
                        KernelOnTables<AssignToTable<DeviceWrite::kAssignAdd>>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimize")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("learning_rate_tensor")
                            .HostMemory("req_time")
                            .HostMemory("global_step")
                            .HostMemory("table_handle_output"),
                        OptimizeGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithHashTableSize").Device(DEVICE_GPU).HostMemory("table_handle").HostMemory("size"),
    SizeGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableStats")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("stats"),
                        StatsGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSaveAsTensor")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handle")
                            .HostMemory("shard_idx")
                            .HostMemory("num_shards")
                            .HostMemory("limit")
                            .HostMemory("offset")
                            .HostMemory("new_offset")
                            .HostMemory("entry"),
                        SaveAsTensorGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSave")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("output_handle"),
                        SaveGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestore")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("output_handle"),
                        RestoreGpuOp);
}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
