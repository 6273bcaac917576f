// GPU kernels of ops on lists of tables, single ones or those of a group: lookups and updates of
// one step, and files of several single tables.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/ops/gpu/device_table_resource.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_group_kernels.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "monolith/native_training/runtime/ops/tables/table_places.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// Output i = the vectors of ids[i] in tables[i], [n, dims[i]].
Status LookUpListsOnDevice(OpKernelContext* ctx, GpuCall* call,
                           const std::vector<FilteredDeviceTable>& tables,
                           const std::vector<int64_t>& dims, const OpInputList& ids) {
  TF_RETURN_IF_ERROR(CheckEqual("size of dims", static_cast<int64_t>(dims.size()),
                                "number of inputs", ids.size()));
  std::vector<DeviceLookup> lookups;
  for (int i = 0; i < ids.size(); ++i) {
    const DeviceTable* const table = tables[i].table;
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    if (dims[i] != table->dim()) {
      return errors::InvalidArgument("dims[", i, "] is ", dims[i],
                                     ", but the table of that input has dimension ", table->dim());
    }
    const int64_t n = ids[i].NumElements();
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, i, {n, dims[i]}, &out));
    if (n > 0) lookups.push_back({table, DeviceIds(ids[i]), n, MutableFloats(*out)});
  }
  return LookUpDeviceTables(call, lookups);
}

// One step per table and distinct id, on the sum of the id's gradients. Learning rates are on the
// host, one per segment of each table; `options` has the times.
Status OptimizeListsOnDevice(GpuCall* call, const std::vector<FilteredDeviceTable>& tables,
                             const std::vector<const float*>& learning_rates,
                             const OpInputList& ids, const OpInputList& grads,
                             DeviceWriteOptions options) {
  options.sum_duplicates = true;
  options.count_once = true;
  std::vector<DeviceUpdate> updates;
  for (int i = 0; i < ids.size(); ++i) {
    const DeviceTable* const table = tables[i].table;
    TF_RETURN_IF_ERROR(CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
    const int64_t n = ids[i].NumElements();
    int64_t want = 0;
    TF_RETURN_IF_ERROR(MultiplySizes("size of ids * dimension", n, table->dim(), &want));
    if (grads[i].NumElements() != want) {
      return errors::InvalidArgument("grads[", i, "] has ", grads[i].NumElements(),
                                     " elements, want ", n, " ids times dimension ", table->dim());
    }
    if (n == 0) continue;
    options.filter = tables[i].filter;
    options.learning_rates = learning_rates[i];
    updates.push_back({table, {{DeviceIds(ids[i]), n, Floats(grads[i])}}, options});
  }
  return OptimizeDeviceTables(call, updates);
}

class LookupListGpuOp : public GpuKernel {
 public:
  explicit LookupListGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    OpInputList ids;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    HeldDeviceTables held;
    TF_RETURN_IF_ERROR(held.Lookup(ctx, ids.size()));
    return LookUpListsOnDevice(ctx, call, held.tables(), dims_, ids);
  }

 private:
  std::vector<int64_t> dims_;
};

class OptimizeListGpuOp : public GpuKernel {
 public:
  using GpuKernel::GpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    OpInputList ids, grads, rates;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(ctx->input_list("grads", &grads));
    TF_RETURN_IF_ERROR(ctx->input_list("learning_rates", &rates));
    HeldDeviceTables held;
    TF_RETURN_IF_ERROR(held.Lookup(ctx, ids.size()));
    DeviceWriteOptions options;
    TF_RETURN_IF_ERROR(GetNumber(ctx, 4 * ids.size(), "req_time", &options.req_time));
    TF_RETURN_IF_ERROR(GetNumber(ctx, 4 * ids.size() + 1, "global_step", &options.global_step));
    std::vector<const float*> learning_rates;
    std::vector<const DeviceTable*> sorted;
    for (int i = 0; i < ids.size(); ++i) {
      const DeviceTable* const table = held.tables()[i].table;
      TF_RETURN_IF_ERROR(CheckEqual(strings::StrCat("size of learning_rates[", i, "]"),
                                    rates[i].NumElements(), "number of segments",
                                    table->num_segments()));
      learning_rates.push_back(rates[i].flat<float>().data());
      sorted.push_back(table);
    }
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      return errors::InvalidArgument("table_handles has a table twice, want every table once");
    }
    return OptimizeListsOnDevice(call, held.tables(), learning_rates, ids, grads, options);
  }
};

class MultiLookupListGpuOp : public GpuKernel {
 public:
  explicit MultiLookupListGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    core::RefCountPtr<DeviceTableGroup> group;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &group));
    OpInputList ids;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(CheckTablePlaces(tables_, ids.size(), group->size()));
    std::vector<FilteredDeviceTable> tables;
    for (const int64_t place : tables_) {
      tables.push_back({group->table(place), group->filter(place)});
    }
    return LookUpListsOnDevice(ctx, call, tables, dims_, ids);
  }

 private:
  std::vector<int64_t> tables_;
  std::vector<int64_t> dims_;
};

class MultiOptimizeListGpuOp : public GpuKernel {
 public:
  explicit MultiOptimizeListGpuOp(OpKernelConstruction* ctx) : GpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(ctx, CheckEachOnce("tables", "table", tables_));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call) override {
    core::RefCountPtr<DeviceTableGroup> group;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "mtable", &group));
    OpInputList ids, grads;
    TF_RETURN_IF_ERROR(ctx->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(ctx->input_list("grads", &grads));
    TF_RETURN_IF_ERROR(CheckTablePlaces(tables_, ids.size(), group->size()));
    DeviceWriteOptions options;
    const int rates = 1 + 2 * ids.size();
    TF_RETURN_IF_ERROR(GetNumber(ctx, rates + 1, "update_time", &options.req_time));
    TF_RETURN_IF_ERROR(GetNumber(ctx, rates + 2, "global_step", &options.global_step));
    TF_RETURN_IF_ERROR(CheckLength("learning_rate", ctx->input(rates), group->num_segments()));
    std::vector<int64_t> first_rate(1, 0);
    for (int64_t t = 0; t < group->size(); ++t) {
      first_rate.push_back(first_rate.back() + group->table(t)->num_segments());
    }
    std::vector<FilteredDeviceTable> tables;
    std::vector<const float*> learning_rates;
    for (const int64_t place : tables_) {
      tables.push_back({group->table(place), group->filter(place)});
      learning_rates.push_back(ctx->input(rates).flat<float>().data() + first_rate[place]);
    }
    TF_RETURN_IF_ERROR(OptimizeListsOnDevice(call, tables, learning_rates, ids, grads, options));
    ctx->set_output(0, ctx->input(0));
    return OkStatus();
  }

 private:
  std::vector<int64_t> tables_;
};

REGISTER_GUARDED_KERNEL(
    Name("MonolithHashTableLookupList").Device(DEVICE_GPU).HostMemory("table_handles"),
    LookupListGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimizeList")
                            .Device(DEVICE_GPU)
                            .HostMemory("table_handles")
                            .HostMemory("learning_rates")
                            .HostMemory("req_time")
                            .HostMemory("global_step"),
                        OptimizeListGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithMultiHashTableLookupList").Device(DEVICE_GPU).HostMemory("mtable"),
    MultiLookupListGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimizeList")
                            .Device(DEVICE_GPU)
                            .HostMemory("mtable")
                            .HostMemory("learning_rate")
                            .HostMemory("update_time")
                            .HostMemory("global_step")
                            .HostMemory("updated_table"),
                        MultiOptimizeListGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSaveGroup")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("others")
                            .HostMemory("output_handle"),
                        HashTableSaveGroupOp<DeviceTableResource, NamedRecordTable>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableRestoreGroup")
                            .Device(DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("basename")
                            .HostMemory("others")
                            .HostMemory("output_handle"),
                        HashTableRestoreGroupOp<DeviceTableResource, NamedRecordTable>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
