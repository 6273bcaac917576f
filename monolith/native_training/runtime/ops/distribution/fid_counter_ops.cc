// MonolithFidCounter marks a tensor as a counter; its gradient (Python) is what counts.
#include <cstdint>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class FidCounterOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
};

REGISTER_OP("MonolithFidCounter")
    .Input("counter: float")
    .Output("output: float")
    .Attr("step: float")
    .Attr("counter_threshold: int")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc(R"doc(
Identity whose registered gradient is -step where counter < counter_threshold, else 0.

counter: How often each id was seen.
output: counter itself.
step: What one update adds.
counter_threshold: Where counting stops.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithFidCounter").Device(DEVICE_CPU), FidCounterOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
