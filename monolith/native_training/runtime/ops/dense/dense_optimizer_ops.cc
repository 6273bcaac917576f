// ResourceApplyAdamom and ResourceApplyRmsprop take one step of a dense optimizer on resource
// variables.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/dense/dense_kernels.h"
#include "monolith/native_training/runtime/ops/dense/locked_variables.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// Merges the shapes of the variables, inputs [0, num_variables), with that of the gradient, the
// last input. The inputs in between are scalars.
Status OptimizerShape(InferenceContext* c, int num_variables) {
  ShapeHandle shape = c->input(c->num_inputs() - 1);
  for (int i = 0; i < num_variables; ++i) {
    const auto* handle = c->input_handle_shapes_and_types(i);
    const ShapeHandle variable =
        handle == nullptr || handle->empty() ? c->UnknownShape() : (*handle)[0].shape;
    TF_RETURN_IF_ERROR(c->Merge(shape, variable, &shape));
  }
  ShapeHandle unused;
  for (int i = num_variables; i < c->num_inputs() - 1; ++i) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &unused));
  }
  return OkStatus();
}

Status ReadScalar(OpKernelContext* ctx, int input, const char* name, float* value) {
  const Tensor& tensor = ctx->input(input);
  if (!TensorShapeUtils::IsScalar(tensor.shape())) {
    return errors::InvalidArgument(name, " is not a scalar: ", tensor.shape().DebugString());
  }
  *value = tensor.scalar<float>()();
  return OkStatus();
}

// Elements per piece of work: a few hundred kilobytes over all arrays.
constexpr int64_t kStepGrain = 1 << 15;

// Holds the attributes that both optimizers have. `use_locking` exists for symmetry with
// TensorFlow's own optimizers: the variables are always locked.
class OptimizerOp : public OpKernel {
 public:
  explicit OptimizerOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("update_slots", &update_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_v2", &use_v2_));
  }

 protected:
  bool update_slots_;
  bool use_v2_;
};

class ResourceApplyAdamomOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

  void Compute(OpKernelContext* ctx) override {
    ::monolith::dense::AdamomOptions options;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 4, "lr", &options.learning_rate));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 5, "ada_decay", &options.ada_decay));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 6, "mom_decay", &options.mom_decay));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 7, "epsilon", &options.epsilon));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 8, "weight_decay", &options.weight_decay));
    options.use_v2 = use_v2_;
    const Tensor& grad = ctx->input(9);
    static const std::vector<const char*> names = {"var", "m", "v", "c"};
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Lock(ctx, names));
    OP_REQUIRES_OK(ctx, variables.Check(ctx, names, grad));
    const int64_t n = grad.NumElements();
    float* w = nullptr;
    if (!update_slots_) {
      const float *m = variables.values(1), *v = variables.values(2), *c = variables.values(3);
      OP_REQUIRES(
          ctx, std::find(c, c + n, 0.0f) == c + n,
          errors::InvalidArgument(
              "update_slots is false while c holds 0: the first step must update the slots"));
      OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 0, &w));
      DeviceRunner(ctx).RunRanges(n, kStepGrain, [=, &options](int64_t begin, int64_t end) {
        ::monolith::dense::AdamomMove(options, m + begin, v + begin, c + begin, end - begin,
                                      w + begin);
      });
      return;
    }
    float *m = nullptr, *v = nullptr, *c = nullptr;
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 0, &w));
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 1, &m));
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 2, &v));
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 3, &c));
    const float* g = grad.flat<float>().data();
    DeviceRunner(ctx).RunRanges(n, kStepGrain, [=, &options](int64_t begin, int64_t end) {
      ::monolith::dense::AdamomStep(options, g + begin, end - begin, w + begin, m + begin,
                                    v + begin, c + begin);
    });
  }
};

class ResourceApplyRmspropOp : public OptimizerOp {
 public:
  using OptimizerOp::OptimizerOp;

  void Compute(OpKernelContext* ctx) override {
    ::monolith::dense::RmspropOptions options;
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 3, "lr", &options.learning_rate));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 4, "beta1", &options.beta1));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 5, "beta2", &options.beta2));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 6, "epsilon", &options.epsilon));
    OP_REQUIRES_OK(ctx, ReadScalar(ctx, 7, "weight_decay", &options.weight_decay));
    options.use_v2 = use_v2_;
    const Tensor& grad = ctx->input(8);
    static const std::vector<const char*> names = {"var", "m", "v"};
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Lock(ctx, names));
    OP_REQUIRES_OK(ctx, variables.Check(ctx, names, grad));
    if (!update_slots_) return;
    float *w = nullptr, *m = nullptr, *v = nullptr;
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 0, &w));
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 1, &m));
    OP_REQUIRES_OK(ctx, variables.MutableValues(ctx, 2, &v));
    const float* g = grad.flat<float>().data();
    DeviceRunner(ctx).RunRanges(grad.NumElements(), kStepGrain,
                                [=, &options](int64_t begin, int64_t end) {
                                  ::monolith::dense::RmspropStep(options, g + begin, end - begin,
                                                                 w + begin, m + begin, v + begin);
                                });
  }
};

REGISTER_OP("ResourceApplyAdamom")
    .Input("var: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("c: resource")
    .Input("learning_rate: float")
    .Input("ada_decay: float")
    .Input("mom_decay: float")
    .Input("epsilon: float")
    .Input("weight_decay: float")
    .Input("grad: float")
    .Attr("use_locking: bool = false")
    .Attr("update_slots: bool = true")
    .Attr("use_v2: bool = false")
    .SetShapeFn([](InferenceContext* c) { return OptimizerShape(c, /*num_variables=*/4); })
    .Doc(R"doc(
Takes one Adamom step on a dense float variable. With g = weight_decay * var + grad:

m <- mom_decay * m + (1 - mom_decay) * g
v <- ada_decay * v + g^2
c <- ada_decay * c + 1
var <- var - learning_rate * m / sqrt(v / c + epsilon)

With use_v2 the divisor is sqrt(v / c) + epsilon. All variables are locked during the step.

update_slots: if false, m, v and c keep their values; c must not hold 0 then.
use_locking: has no effect.
)doc");

REGISTER_OP("ResourceApplyRmsprop")
    .Input("var: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("learning_rate: float")
    .Input("beta1: float")
    .Input("beta2: float")
    .Input("epsilon: float")
    .Input("weight_decay: float")
    .Input("grad: float")
    .Attr("use_locking: bool = false")
    .Attr("update_slots: bool = true")
    .Attr("use_v2: bool = false")
    .SetShapeFn([](InferenceContext* c) { return OptimizerShape(c, /*num_variables=*/3); })
    .Doc(R"doc(
Takes one RMSProp step with momentum on a dense float variable. With g = weight_decay * var + grad:

v <- v + (g^2 - v) * (1 - beta2)
m <- beta1 * m + learning_rate * g / sqrt(v + epsilon)
var <- var - m

With use_v2: v <- beta2 * v + g^2 and m <- beta1 * m + learning_rate * g / (sqrt(v) + epsilon).
All variables are locked during the step.

update_slots: if false, the op does nothing.
use_locking: has no effect.
)doc");

REGISTER_GUARDED_KERNEL(Name("ResourceApplyAdamom").Device(DEVICE_CPU), ResourceApplyAdamomOp);
REGISTER_GUARDED_KERNEL(Name("ResourceApplyRmsprop").Device(DEVICE_CPU), ResourceApplyRmspropOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
