// Kernels of the table-group ops that work in memory.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/group_handle_kernels.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class CreateMultiHashTableOp : public NamedResourceOp<MultiHashTableResource> {
 public:
  using NamedResourceOp<MultiHashTableResource>::NamedResourceOp;

 private:
  Status Create(OpKernelContext* ctx, const std::string& name,
                MultiHashTableResource** resource) override {
    ::monolith::hash_table::MultiEmbeddingHashTableConfig config;
    TF_RETURN_IF_ERROR(ParseGroupConfig(ctx->input(0), &config));
    core::RefCountPtr<HashFilterResource> filter;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 1, "filter_handle", &filter));
    core::RefCountPtr<SyncClient> sync_client;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 2, "sync_client_handle", &sync_client));
    return MultiHashTableResource::Create(config, name, std::move(filter), std::move(sync_client),
                                          resource);
  }
};

class MultiLookupOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/true, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(resource->dims());
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {offsets.back()}, &out));
    std::vector<engine::LookupRequest> requests;
    for (int64_t row = 0; row < ids.rows; ++row) {
      if (ids.size(row) == 0) continue;
      requests.push_back({resource->table(row % resource->size()), ids.ids + ids.splits[row],
                          ids.size(row), out->vec<float>().data() + offsets[row]});
    }
    DeviceRunner runner(ctx);
    engine::EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()),
                                       &runner);
  }
};

class MultiLookupEntryOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/false, &ids));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {ids.num_ids}, &out));
    auto strings = out->vec<tstring>();
    for (int64_t row = 0; row < ids.rows; ++row) {
      std::vector<std::string> entries;
      OP_REQUIRES_OK(ctx, FromEngine(resource->table(row)->LookupEntries(ids.ids + ids.splits[row],
                                                                         ids.size(row), &entries)));
      for (int64_t i = 0; i < ids.size(row); ++i) strings(ids.splits[row] + i) = entries[i];
    }
  }
};

class MultiFusedLookupOp : public OpKernel {
 public:
  explicit MultiFusedLookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_of_shards_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    OP_REQUIRES_OK(ctx, FusedLookup(ctx, 1, resource->tables(), num_of_shards_));
  }

 private:
  int64_t num_of_shards_ = 0;
};

template <bool add>
class MultiAssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/false, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(resource->dims());
    const Tensor& values = ctx->input(3);
    OP_REQUIRES(ctx, values.NumElements() >= offsets.back(),
                errors::InvalidArgument("The length of tensor ``value`` is too short. It has ",
                                        values.NumElements(), " elements, want ", offsets.back()));
    DeviceRunner runner(ctx);
    engine::WriteOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4, "update_time", &options.req_time));
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.non_finite));
    options.runner = &runner;
    for (int64_t row = 0; row < ids.rows; ++row) {
      if (ids.size(row) == 0) continue;
      options.filter = resource->filter(row);
      const engine::WriteSpan span{ids.ids + ids.splits[row], ids.size(row),
                                   values.flat<float>().data() + offsets[row]};
      OP_REQUIRES_OK(ctx, FromEngine(add ? resource->table(row)->AssignAdd(span, options)
                                         : resource->table(row)->Assign(span, options)));
    }
    ctx->set_output(0, ctx->input(0));
  }
};

class MultiReinitializeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    OP_REQUIRES_OK(ctx, CheckScalar("table_name", ctx->input(1)));
    const Tensor& ids = ctx->input(2);
    Tensor* status = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {ids.NumElements()}, &status));
    const int64_t table = resource->Find(std::string(ctx->input(1).scalar<tstring>()()));
    if (table < 0) {
      status->vec<int32_t>().setConstant(-1);
    } else {
      OP_REQUIRES_OK(
          ctx, FromEngine(resource->table(table)->Reinitialize(
                   ids.flat<int64_t>().data(), ids.NumElements(),
                   static_cast<int64_t>(ctx->env()->NowSeconds()), status->vec<int32_t>().data())));
    }
    ctx->set_output(0, ctx->input(0));
  }
};

class MultiOptimizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/false, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(resource->dims());
    OP_REQUIRES_OK(ctx, CheckLength("value", ctx->input(3), offsets.back()));
    int64_t num_segments = 0;
    for (const FilteredTable& table : resource->tables()) {
      num_segments += table.table->num_segments();
    }
    OP_REQUIRES_OK(ctx, CheckLength("learning_rate", ctx->input(4), num_segments));
    engine::OptimizeOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 5, "update_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 6, "global_step", &options.global_step));
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.write.non_finite));

    std::vector<engine::WriteSpan> spans;
    std::vector<engine::OptimizeRequest> requests;
    spans.reserve(ids.rows);
    const float* rate = ctx->input(4).flat<float>().data();
    for (int64_t row = 0; row < ids.rows; ++row) {
      options.learning_rates = rate;
      options.num_learning_rates = resource->table(row)->num_segments();
      options.write.filter = resource->filter(row);
      rate += options.num_learning_rates;
      if (ids.size(row) == 0) continue;
      spans.push_back({ids.ids + ids.splits[row], ids.size(row),
                       ctx->input(3).flat<float>().data() + offsets[row]});
      requests.push_back({resource->table(row), &spans.back(), 1, options});
    }
    DeviceRunner runner(ctx);
    OP_REQUIRES_OK(ctx, FromEngine(engine::EmbeddingTable::OptimizeMany(
                            requests.data(), static_cast<int64_t>(requests.size()), &runner)));
    ctx->set_output(0, ctx->input(0));
  }
};

class MultiFusedOptimizeOp : public OpKernel {
 public:
  explicit MultiFusedOptimizeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_of_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_grad_accumulation", &enable_grad_accumulation_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    OP_REQUIRES_OK(
        ctx, FusedOptimize(ctx, 1, resource->tables(), num_of_shards_, enable_grad_accumulation_));
    ctx->set_output(0, ctx->input(0));
  }

 private:
  int64_t num_of_shards_ = 0;
  bool enable_grad_accumulation_ = false;
};

REGISTER_GUARDED_KERNEL(Name("CreateMonolithMultiHashTable").Device(DEVICE_CPU),
                        CreateMultiHashTableOp);
REGISTER_GUARDED_KERNEL(Name("ReadMonolithMultiHashTable").Device(DEVICE_CPU),
                        ReadGroupOp<MultiHashTableResource>);
REGISTER_GUARDED_KERNEL(Name("IsHashTableInitialized").Device(DEVICE_CPU),
                        IsInitializedOp<MultiHashTableResource, HashTableResource>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookup").Device(DEVICE_CPU), MultiLookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupEntry").Device(DEVICE_CPU),
                        MultiLookupEntryOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedLookup").Device(DEVICE_CPU),
                        MultiFusedLookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssign").Device(DEVICE_CPU),
                        MultiAssignOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssignAdd").Device(DEVICE_CPU),
                        MultiAssignOp<true>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableReinitialize").Device(DEVICE_CPU),
                        MultiReinitializeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimize").Device(DEVICE_CPU), MultiOptimizeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedOptimize").Device(DEVICE_CPU),
                        MultiFusedOptimizeOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
