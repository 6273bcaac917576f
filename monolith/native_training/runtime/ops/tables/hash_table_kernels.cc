// Kernels of the single-table ops that work in memory.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_op_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class HashTableOp : public NamedResourceOp<HashTableResource> {
 public:
  explicit HashTableOp(OpKernelConstruction* ctx) : NamedResourceOp<HashTableResource>(ctx) {
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES(ctx, config_.ParseFromString(config),
                errors::InvalidArgument("Unable to parse config. Make sure it is serialized "
                                        "version of EmbeddingHashTableConfig."));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("label", &label_));
  }

 private:
  Status Create(OpKernelContext* ctx, const std::string& name,
                HashTableResource** resource) override {
    core::RefCountPtr<HashFilterResource> filter;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "filter_handle", &filter));
    core::RefCountPtr<SyncClient> sync_client;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 1, "sync_client_handle", &sync_client));
    TF_RETURN_IF_ERROR(HashTableResource::Create(config_, name, std::move(filter),
                                                 std::move(sync_client), resource));
    (*resource)->table()->SetName(label_.empty() ? name : label_);
    return OkStatus();
  }

  ::monolith::hash_table::EmbeddingHashTableConfig config_;
  std::string label_;
};

class ConfigureOp : public OpKernel {
 public:
  explicit ConfigureOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES(ctx, config_.ParseFromString(config),
                errors::InvalidArgument("config is no serialized EmbeddingHashTableConfig"));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    OP_REQUIRES_OK(ctx, resource->Configure(config_));
  }

 private:
  ::monolith::hash_table::EmbeddingHashTableConfig config_;
};

class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim_size", &dim_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_multi_threads", &use_multi_threads_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    OP_REQUIRES(ctx, dim_size_ == resource->table()->dim(),
                errors::InvalidArgument("dim_size should match hash table size. dim_size is ",
                                        dim_size_, ", the table's is ", resource->table()->dim()));
    const Tensor& ids = ctx->input(1);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {ids.NumElements(), dim_size_}, &out));
    DeviceRunner runner(ctx);
    resource->table()->Lookup(ids.flat<int64_t>().data(), ids.NumElements(),
                              out->flat<float>().data(), use_multi_threads_ ? &runner : nullptr);
  }

 private:
  int64_t dim_size_ = 0;
  bool use_multi_threads_ = false;
};

class LookupEntryOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    const Tensor& ids = ctx->input(1);
    std::vector<std::string> entries;
    OP_REQUIRES_OK(ctx, FromEngine(resource->table()->LookupEntries(ids.flat<int64_t>().data(),
                                                                    ids.NumElements(), &entries)));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {ids.NumElements()}, &out));
    auto strings = out->vec<tstring>();
    for (int64_t i = 0; i < ids.NumElements(); ++i) strings(i) = entries[i];
  }
};

class LookupGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& indices = ctx->input(0);
    const Tensor& ids = ctx->input(1);
    const Tensor& grads = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckMatrix("id_indices", indices));
    OP_REQUIRES_OK(ctx, CheckVector("id_values", ids));
    OP_REQUIRES_OK(ctx, CheckMatrix("input_grads", grads));
    const int64_t n = ids.NumElements();
    OP_REQUIRES_OK(ctx,
                   CheckEqual("rows of id_indices", indices.dim_size(0), "size of id_values", n));
    OP_REQUIRES(ctx, n == 0 || indices.dim_size(1) >= 1,
                errors::InvalidArgument("id_indices has shape ", indices.shape().DebugString(),
                                        ", want at least one column"));
    const auto rows = indices.matrix<int64_t>();
    const auto from = grads.matrix<float>();
    const int64_t num_rows = grads.dim_size(0), dim = grads.dim_size(1);
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES(
          ctx, rows(i, 0) >= 0 && rows(i, 0) < num_rows,
          errors::InvalidArgument("id_indices[", i, ", 0] is ", rows(i, 0),
                                  ", want a row of input_grads, of which there are ", num_rows));
    }
    ctx->set_output(0, ids);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {n, dim}, &out));
    float* to = out->flat<float>().data();
    for (int64_t i = 0; i < n; ++i) {
      const float* row = from.data() + rows(i, 0) * dim;
      std::copy(row, row + dim, to + i * dim);
    }
  }
};

template <bool add>
class AssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    const Tensor& ids = ctx->input(1);
    const Tensor& values = ctx->input(2);
    engine::WriteOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 3, "req_time", &options.req_time));
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.non_finite));
    options.filter = resource->filter();
    OP_REQUIRES_OK(ctx, CheckIdUpdates(values, ids.NumElements(), resource->table()->dim()));
    const engine::WriteSpan span{ids.flat<int64_t>().data(), ids.NumElements(),
                                 values.flat<float>().data()};
    OP_REQUIRES_OK(ctx, FromEngine(add ? resource->table()->AssignAdd(span, options)
                                       : resource->table()->Assign(span, options)));
    ctx->set_output(0, ctx->input(0));
  }
};

class EraseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    const Tensor& ids = ctx->input(1);
    resource->table()->Erase(ids.flat<int64_t>().data(), ids.NumElements());
    ctx->set_output(0, ctx->input(0));
  }
};

class OptimizeOp : public OpKernel {
 public:
  explicit OptimizeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_multi_threads", &use_multi_threads_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_dedup", &enable_dedup_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    const Tensor& ids = ctx->input(1);
    const Tensor& grads = ctx->input(2);
    const Tensor& rates = ctx->input(3);
    engine::OptimizeOptions options;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4, "req_time", &options.write.req_time));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 5, "global_step", &options.global_step));
    OP_REQUIRES_OK(ctx, GetNonFinite(&options.write.non_finite));
    int64_t want = 0;
    OP_REQUIRES_OK(ctx, MultiplySizes("size of id_values * dimension", ids.NumElements(),
                                      resource->table()->dim(), &want));
    OP_REQUIRES_OK(ctx, CheckEqual("size of id_updates", grads.NumElements(),
                                   "size of id_values * dimension", want));
    OP_REQUIRES_OK(ctx, CheckEqual("size of learning_rate_tensor", rates.NumElements(),
                                   "number of segments", resource->table()->num_segments()));
    options.learning_rates = rates.flat<float>().data();
    options.num_learning_rates = rates.NumElements();
    options.dedup = enable_dedup_;
    options.write.filter = resource->filter();
    DeviceRunner runner(ctx);
    if (use_multi_threads_) options.write.runner = &runner;
    const engine::WriteSpan span{ids.flat<int64_t>().data(), ids.NumElements(),
                                 grads.flat<float>().data()};
    OP_REQUIRES_OK(ctx, FromEngine(resource->table()->Optimize(span, options)));
    ctx->set_output(0, ctx->input(0));
  }

 private:
  bool use_multi_threads_ = false;
  bool enable_dedup_ = false;
};

class SizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    out->scalar<int64_t>()() = resource->table()->Size();
  }
};

class SaveAsTensorOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    int32_t part = 0, num_parts = 0;
    int64_t limit = 0, offset = 0, new_offset = 0;
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 1, "shard_idx", &part));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 2, "num_shards", &num_parts));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 3, "limit", &limit));
    OP_REQUIRES_OK(ctx, GetNumber(ctx, 4, "offset", &offset));
    std::vector<std::string> entries;
    OP_REQUIRES_OK(ctx, FromEngine(resource->table()->SavePage(part, num_parts, limit, offset,
                                                               &new_offset, &entries)));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    out->scalar<int64_t>()() = new_offset;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {static_cast<int64_t>(entries.size())}, &out));
    auto strings = out->vec<tstring>();
    for (size_t i = 0; i < entries.size(); ++i) strings(i) = entries[i];
  }
};

class ExtractSlotOp : public OpKernel {
 public:
  explicit ExtractSlotOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fid_v2", &fid_v2_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& entries = ctx->input(0);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, entries.shape(), &out));
    const auto from = entries.flat<tstring>();
    auto slots = out->flat<int32_t>();
    ::monolith::hash_table::EntryDump dump;
    for (int64_t i = 0; i < entries.NumElements(); ++i) {
      if (from(i).size() > INT32_MAX ||
          !dump.ParseFromArray(from(i).data(), static_cast<int>(from(i).size()))) {
        LOG_FIRST_N(ERROR, 10) << "Element " << i
                               << " is not an EntryDump; its slot is that of id 0.";
        dump.Clear();
      }
      slots(i) =
          static_cast<int32_t>(fid_v2_ ? engine::SlotOfV2(dump.id()) : engine::SlotOfV1(dump.id()));
    }
  }

 private:
  bool fid_v2_ = true;
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTable").Device(DEVICE_CPU), HashTableOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableConfigure").Device(DEVICE_CPU), ConfigureOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookup").Device(DEVICE_CPU), LookupOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupEntry").Device(DEVICE_CPU), LookupEntryOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableLookupGradient").Device(DEVICE_CPU),
                        LookupGradientOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableAssign").Device(DEVICE_CPU), AssignOp<false>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableAssignAdd").Device(DEVICE_CPU), AssignOp<true>);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableErase").Device(DEVICE_CPU), EraseOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableOptimize").Device(DEVICE_CPU), OptimizeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSize").Device(DEVICE_CPU), SizeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashTableSaveAsTensor").Device(DEVICE_CPU), SaveAsTensorOp);
REGISTER_GUARDED_KERNEL(Name("MonolithExtractSlotFromEntry").Device(DEVICE_CPU), ExtractSlotOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
