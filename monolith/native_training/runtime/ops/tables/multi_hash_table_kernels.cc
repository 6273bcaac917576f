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
    TF_RETURN_IF_ERROR(CheckScalar("config", ctx->input(0)));
    const tstring& bytes = ctx->input(0).scalar<tstring>()();
    ::monolith::hash_table::MultiEmbeddingHashTableConfig config;
    if (!config.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return errors::InvalidArgument(
          "Unable to parse config. Make sure it is serialized version of "
          "MultiEmbeddingHashTableConfig.");
    }
    core::RefCountPtr<HashFilterResource> filter;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 1, "filter_handle", &filter));
    core::RefCountPtr<SyncClient> sync_client;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 2, "sync_client_handle", &sync_client));
    return MultiHashTableResource::Create(config, name, std::move(filter), std::move(sync_client),
                                          resource);
  }
};

class ReadMultiHashTableOp : public OpKernel {
 public:
  explicit ReadMultiHashTableOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &name_));
    if (name_.empty()) name_ = name();
  }

  void Compute(OpKernelContext* ctx) override {
    const std::string& container =
        container_.empty() ? ctx->resource_manager()->default_container() : container_;
    OP_REQUIRES_OK(ctx, MakeResourceHandleToOutput(ctx, 0, container, name_,
                                                   TypeIndex::Make<MultiHashTableResource>()));
  }

 private:
  std::string container_;
  std::string name_;
};

class IsInitializedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("handle", ctx->input(0)));
    const ResourceHandle& handle = HandleFromInput(ctx, 0);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    out->scalar<bool>()() =
        Exists<MultiHashTableResource>(ctx, handle) || Exists<HashTableResource>(ctx, handle);
  }

 private:
  template <typename T>
  static bool Exists(OpKernelContext* ctx, const ResourceHandle& handle) {
    T* resource = nullptr;
    if (!ctx->resource_manager()->Lookup(handle.container(), handle.name(), &resource).ok()) {
      return false;
    }
    resource->Unref();
    return true;
  }
};

// The checked inputs `id` and `id_split`.
struct RaggedIds {
  const int64_t* ids = nullptr;
  const int64_t* splits = nullptr;
  int64_t rows = 0;
  int64_t num_ids = 0;

  static Status Create(OpKernelContext* ctx, int64_t num_tables, bool many_requests,
                       RaggedIds* result) {
    const Tensor& ids = ctx->input(1);
    const Tensor& splits = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckVector("id", ids));
    TF_RETURN_IF_ERROR(CheckVector("id_split", splits));
    result->rows = splits.NumElements() - 1;
    const bool fits = many_requests
                          ? result->rows >= 0 && num_tables > 0 && result->rows % num_tables == 0
                          : result->rows == num_tables;
    if (!fits) {
      return errors::InvalidArgument(
          "The length of tensor ``id`` doesn't equal to table num. table size: ", num_tables,
          ", id_split has ", splits.NumElements(), " elements, want ", num_tables, " + 1");
    }
    TF_RETURN_IF_ERROR(CheckRowSplits("id_split", splits.vec<int64_t>(), ids.NumElements()));
    result->ids = ids.vec<int64_t>().data();
    result->splits = splits.vec<int64_t>().data();
    result->num_ids = ids.NumElements();
    return OkStatus();
  }

  int64_t size(int64_t row) const { return splits[row + 1] - splits[row]; }

  // Returns where the floats of each row begin, and their total.
  std::vector<int64_t> FloatOffsets(const MultiHashTableResource& tables) const {
    std::vector<int64_t> offsets(1, 0);
    for (int64_t row = 0; row < rows; ++row) {
      offsets.push_back(offsets.back() + size(row) * tables.table(row % tables.size())->dim());
    }
    return offsets;
  }
};

class LookupOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/true, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(*resource);
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

class LookupEntryOp : public OpKernel {
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

class FusedLookupOp : public OpKernel {
 public:
  explicit FusedLookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
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
class AssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/false, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(*resource);
    const Tensor& values = ctx->input(3);
    OP_REQUIRES(ctx, values.NumElements() >= offsets.back(),
                errors::InvalidArgument("The length of tensor ``value`` is too short. It has ",
                                        values.NumElements(), " elements, want ", offsets.back()));
    DeviceRunner runner(ctx);
    engine::WriteOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4, "update_time", &options.req_time));
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

class ReinitializeOp : public OpKernel {
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

class OptimizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    RaggedIds ids;
    OP_REQUIRES_OK(ctx, RaggedIds::Create(ctx, resource->size(), /*many_requests=*/false, &ids));
    const std::vector<int64_t> offsets = ids.FloatOffsets(*resource);
    OP_REQUIRES_OK(ctx, CheckLength("value", ctx->input(3), offsets.back()));
    int64_t num_segments = 0;
    for (const FilteredTable& table : resource->tables()) {
      num_segments += table.table->num_segments();
    }
    OP_REQUIRES_OK(ctx, CheckLength("learning_rate", ctx->input(4), num_segments));
    engine::OptimizeOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 5, "update_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 6, "global_step", &options.global_step));

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

 private:
  static Status CheckLength(const char* name, const Tensor& tensor, int64_t want) {
    if (tensor.NumElements() == want) return OkStatus();
    return errors::InvalidArgument("The length of tensor ``", name, "`` is too ",
                                   tensor.NumElements() < want ? "short" : "long", ". It has ",
                                   tensor.NumElements(), " elements, want ", want);
  }
};

class FusedOptimizeOp : public OpKernel {
 public:
  explicit FusedOptimizeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
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
                        ReadMultiHashTableOp);
REGISTER_GUARDED_KERNEL(Name("IsHashTableInitialized").Device(DEVICE_CPU), IsInitializedOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookup").Device(DEVICE_CPU), LookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableLookupEntry").Device(DEVICE_CPU),
                        LookupEntryOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedLookup").Device(DEVICE_CPU),
                        FusedLookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssign").Device(DEVICE_CPU), AssignOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableAssignAdd").Device(DEVICE_CPU), AssignOp<true>);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableReinitialize").Device(DEVICE_CPU),
                        ReinitializeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableOptimize").Device(DEVICE_CPU), OptimizeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableFusedOptimize").Device(DEVICE_CPU),
                        FusedOptimizeOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
