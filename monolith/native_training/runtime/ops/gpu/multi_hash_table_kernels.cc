// GPU kernels of the ops on groups of tables.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/gpu/device_table_resource.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/group_handle_kernels.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "monolith/native_training/runtime/ops/tables/table_save_kernels.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class CreateGroupGpuOp : public NamedResourceOp<DeviceTableGroup> {
 public:
  using NamedResourceOp<DeviceTableGroup>::NamedResourceOp;

 private:
  Status Create(OpKernelContext* ctx, const std::string& name,
                DeviceTableGroup** resource) override {
    ::monolith::hash_table::MultiEmbeddingHashTableConfig config;
    TF_RETURN_IF_ERROR(ParseGroupConfig(ctx->input(0), &config));
    core::RefCountPtr<HashFilterResource> filter;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 1, "filter_handle", &filter));
    core::RefCountPtr<SyncClient> sync_client;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 2, "sync_client_handle", &sync_client));
    return DeviceTableGroup::Create(config, name, std::move(filter), std::move(sync_client),
                                    resource);
  }
};

Status LookUpGroup(OpKernelContext* ctx, GpuCall* call, const DeviceTableGroup& group) {
  RaggedIds ids;
  TF_RETURN_IF_ERROR(RaggedIds::Create(ctx, group.size(), /*many_requests=*/true, &ids));
  const std::vector<int64_t> offsets = ids.FloatOffsets(group.dims());
  Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {offsets.back()}, &out));
  std::vector<DeviceLookup> lookups;
  for (int64_t row = 0; row < ids.rows; ++row) {
    if (ids.size(row) == 0) continue;
    lookups.push_back({group.table(row % group.size()), ids.ids + ids.splits[row], ids.size(row),
                       MutableFloats(*out) + offsets[row]});
  }
  return LookUpDeviceTables(call, lookups);
}

Status LookUpEntriesOfGroup(OpKernelContext* ctx, GpuCall* call, const DeviceTableGroup& group) {
  RaggedIds ids;
  TF_RETURN_IF_ERROR(RaggedIds::Create(ctx, group.size(), /*many_requests=*/false, &ids));
  Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {ids.num_ids}, &out));
  auto strings = out->vec<tstring>();
  for (int64_t row = 0; row < ids.rows; ++row) {
    const int64_t n = ids.size(row);
    if (n == 0) continue;
    std::vector<std::string> entries;
    TF_RETURN_IF_ERROR(
        group.table(row)->LookupEntries(call->stream(), ids.ids + ids.splits[row], n, &entries));
    for (int64_t i = 0; i < n; ++i) strings(ids.splits[row] + i) = entries[i];
  }
  return OkStatus();
}

template <DeviceWrite write>
Status AssignToGroup(OpKernelContext* ctx, GpuCall* call, const DeviceTableGroup& group) {
  RaggedIds ids;
  TF_RETURN_IF_ERROR(RaggedIds::Create(ctx, group.size(), /*many_requests=*/false, &ids));
  const std::vector<int64_t> offsets = ids.FloatOffsets(group.dims());
  const Tensor& values = ctx->input(3);
  if (values.NumElements() < offsets.back()) {
    return errors::InvalidArgument("The length of tensor ``value`` is too short. It has ",
                                   values.NumElements(), " elements, want ", offsets.back());
  }
  DeviceWriteOptions options;
  TF_RETURN_IF_ERROR(GetNumber(ctx, 4, "update_time", &options.req_time));
  for (int64_t row = 0; row < ids.rows; ++row) {
    if (ids.size(row) == 0) continue;
    options.filter = group.filter(row);
    TF_RETURN_IF_ERROR(WriteDeviceTable(
        call, *group.table(row), write,
        {ids.ids + ids.splits[row], ids.size(row), Floats(values) + offsets[row]}, options));
  }
  ctx->set_output(0, ctx->input(0));
  return OkStatus();
}

Status ReinitializeInGroup(OpKernelContext* ctx, GpuCall* call, const DeviceTableGroup& group) {
  TF_RETURN_IF_ERROR(CheckScalar("table_name", ctx->input(1)));
  const Tensor& ids = ctx->input(2);
  const int64_t n = ids.NumElements();
  Tensor* status = nullptr;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {n}, &status));
  const int64_t number = group.Find(std::string(ctx->input(1).scalar<tstring>()()));
  if (number < 0) {
    status->vec<int32_t>().setConstant(-1);
  } else {
    const DeviceTable& table = *group.table(number);
    Tensor existed;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_INT32, TensorShape({n}), &existed));
    TF_RETURN_IF_ERROR(table.Check(call->library().table_reinitialize(
        table.get(), call->stream(), DeviceIds(ids), n,
        static_cast<int64_t>(ctx->env()->NowSeconds()), static_cast<int32_t*>(existed.data()))));
    TF_RETURN_IF_ERROR(call->ReadInOrder(existed.data(), status->vec<int32_t>().data(),
                                         n * int64_t{sizeof(int32_t)}));
  }
  ctx->set_output(0, ctx->input(0));
  return OkStatus();
}

Status OptimizeGroup(OpKernelContext* ctx, GpuCall* call, const DeviceTableGroup& group) {
  RaggedIds ids;
  TF_RETURN_IF_ERROR(RaggedIds::Create(ctx, group.size(), /*many_requests=*/false, &ids));
  const std::vector<int64_t> offsets = ids.FloatOffsets(group.dims());
  TF_RETURN_IF_ERROR(CheckLength("value", ctx->input(3), offsets.back()));
  TF_RETURN_IF_ERROR(CheckLength("learning_rate", ctx->input(4), group.num_segments()));
  DeviceWriteOptions options;
  TF_RETURN_IF_ERROR(GetNumber(ctx, 5, "update_time", &options.req_time));
  TF_RETURN_IF_ERROR(GetNumber(ctx, 6, "global_step", &options.global_step));
  const float* rate = ctx->input(4).flat<float>().data();
  std::vector<DeviceUpdate> updates;
  for (int64_t row = 0; row < ids.rows; ++row) {
    options.learning_rates = rate;
    options.filter = group.filter(row);
    rate += group.table(row)->num_segments();
    if (ids.size(row) == 0) continue;
    updates.push_back(
        {group.table(row),
         {{ids.ids + ids.splits[row], ids.size(row), Floats(ctx->input(3)) + offsets[row]}},
         options});
  }
  TF_RETURN_IF_ERROR(OptimizeDeviceTables(call, updates));
  ctx->set_output(0, ctx->input(0));
  return OkStatus();
}

class MultiSizeGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableGroup> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    Tensor* sizes = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {group->size()}, &sizes));
    for (int64_t i = 0; i < group->size(); ++i) {
      OP_REQUIRES_OK(ctx, FromEngine(group->table(i)->GetSize(&sizes->vec<int64_t>()(i))));
    }
  }
};

class MultiStatsGpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeviceTableGroup> group;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &group));
    Tensor* stats = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {group->size(), DeviceTable::kNumStats}, &stats));
    int64_t* const out = stats->flat<int64_t>().data();
    for (int64_t i = 0; i < group->size(); ++i) {
      OP_REQUIRES_OK(ctx, group->table(i)->WriteStats(out + i * DeviceTable::kNumStats));
    }
  }
};

class MultiSaveGpuOp : public GroupSaveKernel {
 public:
  using GroupSaveKernel::GroupSaveKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<DeviceTableGroup> group;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &group));
    return SaveTables(ctx->env(), group->named_tables(), basename, options());
  }
};

class MultiRestoreGpuOp : public FileKernel {
 public:
  using FileKernel::FileKernel;

 private:
  Status Run(OpKernelContext* ctx, const std::string& basename) override {
    core::RefCountPtr<DeviceTableGroup> group;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &group));
    return RestoreTables(ctx->env(), basename, group->named_tables());
  }
};

REGISTER_GUARDED_KERNEL(Name("CreateMonolithMultiHashTable")
                            .Device(DEVICE_GPU)
                            .HostMemory("config")
                            .HostMemory("filter_handle")
                            .HostMemory("sync_client_handle")
                            .HostMemory("multi_hash_table_handle"),
                        CreateGroupGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("ReadMonolithMultiHashTable").Device(DEVICE_GPU).HostMemory("multi_hash_table_handle"),
    ReadGroupOp<DeviceTableGroup>);
REGISTER_GUARDED_KERNEL(Name("IsHashTableInitialized")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("is_initialized"),
                        IsInitializedOp<DeviceTableGroup, DeviceTableResource>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookup")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("id_split"),
                        KernelOnTables<LookUpGroup>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupEntry")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("id_split")
                            .HostMemory("serialized_entries"),
                        KernelOnTables<LookUpEntriesOfGroup>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssign")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("id_split")
                            .HostMemory("update_time")
                            .HostMemory("updated_table"),
                        KernelOnTables<AssignToGroup<DeviceWrite::kAssign>>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssignAdd")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("id_split")
                            .HostMemory("update_time")
                            .HostMemory("updated_table"),
                        KernelOnTables<AssignToGroup<DeviceWrite::kAssignAdd>>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableReinitialize")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("table_name")
                            .HostMemory("updated_table")
                            .HostMemory("id_status"),
                        KernelOnTables<ReinitializeInGroup>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimize")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("id_split")
                            .HostMemory("learning_rate")
                            .HostMemory("update_time")
                            .HostMemory("global_step")
                            .HostMemory("updated_table"),
                        KernelOnTables<OptimizeGroup>);
REGISTER_GUARDED_KERNEL(
    Name("MonolithMultiHashTableSize").Device(DEVICE_GPU).HostMemory("mtable").HostMemory("sizes"),
    MultiSizeGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithMultiHashTableStats").Device(DEVICE_GPU).HostMemory("mtable").HostMemory("stats"),
    MultiStatsGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableSave")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("basename")
                            .HostMemory("output_mtable"),
                        MultiSaveGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableRestore")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("basename")
                            .HostMemory("output_mtable"),
                        MultiRestoreGpuOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
