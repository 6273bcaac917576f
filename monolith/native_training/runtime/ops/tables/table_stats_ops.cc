// Tells what tables hold and have done.
#include <cstdint>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

// Rows, bytes, expired rows, filtered ids, rows that were not finite.
constexpr int64_t kNumStats = 5;

void Write(const engine::TableStats& stats, int64_t* out) {
  out[0] = stats.size;
  out[1] = stats.memory;
  out[2] = stats.expired;
  out[3] = stats.filtered;
  out[4] = stats.nonfinite_gradients;
}

REGISTER_OP("MonolithHashTableStats")
    .Input("table_handle: resource")
    .Output("stats: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(kNumStats));
      return OkStatus();
    })
    .Doc(R"doc(
Returns what a table holds and has done.

stats: [5]. Rows; bytes that the table takes; rows that were erased because they had expired; how
  often an id got no row because it was seen too seldom; how often a gradient or value of a row was
  not finite. The last three count from the table's start.
)doc");

class HashTableStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "table_handle", &resource));
    Tensor* stats = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {kNumStats}, &stats));
    Write(resource->table()->Stats(), stats->vec<int64_t>().data());
  }
};

REGISTER_OP("MonolithMultiHashTableStats")
    .Input("mtable: resource")
    .Output("stats: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, kNumStats));
      return OkStatus();
    })
    .Doc(R"doc(
Returns what each table of a group holds and has done, in order of the table names.

mtable: The group.
stats: [tables, 5], as MonolithHashTableStats returns them.
)doc");

class MultiHashTableStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    Tensor* stats = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {resource->size(), kNumStats}, &stats));
    int64_t* out = stats->flat<int64_t>().data();
    for (int64_t i = 0; i < resource->size(); ++i) {
      Write(resource->table(i)->Stats(), out + i * kNumStats);
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashTableStats").Device(DEVICE_CPU), HashTableStatsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableStats").Device(DEVICE_CPU),
                        MultiHashTableStatsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
