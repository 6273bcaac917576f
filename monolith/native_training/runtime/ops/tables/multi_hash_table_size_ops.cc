// Counts the rows of each table in a group.
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithMultiHashTableSize")
    .Input("mtable: resource")
    .Output("sizes: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Returns the number of rows of each table in a group, in order of the table names.

mtable: The group.
)doc");

class MultiHashTableSizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MultiHashTableResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "mtable", &resource));
    Tensor* sizes = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {resource->size()}, &sizes));
    for (int64_t i = 0; i < resource->size(); ++i) {
      sizes->vec<int64_t>()(i) = resource->table(i)->Size();
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithMultiHashTableSize").Device(DEVICE_CPU),
                        MultiHashTableSizeOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
