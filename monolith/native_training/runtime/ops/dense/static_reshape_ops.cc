// MonolithStaticReshapeN does many reshapes, to shapes known when the graph is built, in one op.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/lib/gtl/inlined_vector.h"
#include "tensorflow/core/util/overflow.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// A checked target shape, with everything computed that does not depend on the input.
struct Target {
  PartialTensorShape shape;
  int unknown_dim = -1;       // index, or -1
  int64_t known_product = 1;  // product of the other dimensions
  gtl::InlinedVector<int64_t, 4> dims;
  TensorShape full;  // `shape` with 0 for the unknown dimension
};

Status MakeTarget(const PartialTensorShape& shape, size_t i, Target* target) {
  if (shape.unknown_rank()) {
    return errors::InvalidArgument("Shape cannot be unknown rank for input [", i, "]!");
  }
  target->shape = shape;
  for (int d = 0; d < shape.dims(); ++d) {
    const int64_t size = shape.dim_size(d);
    if (size >= 0) {
      target->known_product = MultiplyWithoutOverflow(target->known_product, size);
      if (target->known_product >= 0) continue;
      return errors::InvalidArgument("shapes[", i, "] ", shape.DebugString(),
                                     " has more elements than int64 can count");
    }
    if (target->unknown_dim >= 0) {
      return errors::InvalidArgument("shapes[", i, "] ", shape.DebugString(),
                                     " has more than one unknown dimension");
    }
    target->unknown_dim = d;
  }
  for (const int64_t size : shape.dim_sizes()) target->dims.push_back(std::max<int64_t>(0, size));
  return TensorShape::BuildTensorShape(target->dims, &target->full);
}

Status DoesNotFit(const Target& target, int i, const Tensor& input) {
  return errors::InvalidArgument("inputs[", i, "] has shape ", input.shape().DebugString(), " of ",
                                 input.NumElements(), " elements, which does not fit shapes[", i,
                                 "] = ", target.shape.DebugString());
}

// Makes *output a view of `input`. Does not even copy a shape in which nothing is unknown: the
// executor's own work per tensor is a fraction of a microsecond.
Status View(const Target& target, int i, const Tensor& input, Tensor* output) {
  const int64_t num_elements = input.NumElements();
  if (target.unknown_dim < 0) {
    if (num_elements != target.known_product || !output->CopyFrom(input, target.full)) {
      return DoesNotFit(target, i, input);
    }
    return OkStatus();
  }
  const int64_t unknown = target.known_product == 0 ? 0 : num_elements / target.known_product;
  if (unknown * target.known_product != num_elements) return DoesNotFit(target, i, input);
  gtl::InlinedVector<int64_t, 4> dims = target.dims;
  dims[target.unknown_dim] = unknown;
  TensorShape shape;
  TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(dims, &shape));
  return output->CopyFrom(input, shape) ? OkStatus() : DoesNotFit(target, i, input);
}

Status CheckCounts(size_t num_shapes, size_t num_inputs) {
  return CheckEqual("number of shapes", static_cast<int64_t>(num_shapes), "number of inputs",
                    static_cast<int64_t>(num_inputs));
}

class StaticReshapeNOp : public OpKernel {
 public:
  explicit StaticReshapeNOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<PartialTensorShape> shapes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes));
    OP_REQUIRES_OK(ctx, CheckCounts(shapes.size(), ctx->num_inputs()));
    targets_.resize(shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      OP_REQUIRES_OK(ctx, MakeTarget(shapes[i], i, &targets_[i]));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const int n = static_cast<int>(targets_.size());
    Tensor* sizes;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, n, {n}, &sizes));
    auto size = sizes->vec<int64_t>();
    for (int i = 0; i < n; ++i) {
      const Tensor& input = ctx->input(i);
      Tensor output;
      OP_REQUIRES_OK(ctx, View(targets_[i], i, input, &output));
      size(i) = input.NumElements();
      ctx->set_output(i, std::move(output));
    }
  }

  bool IsExpensive() override { return false; }

 private:
  std::vector<Target> targets_;
};

REGISTER_OP("MonolithStaticReshapeN")
    .Input("inputs: dtypes")
    .Output("outputs: dtypes")
    .Output("sizes: int64")
    .Attr("dtypes: list(type)")
    .Attr("shapes: list(shape)")
    .Attr("enable_parallelism: bool = true")
    .Attr("cost_per_tensor: int = 10000000")
    .SetShapeFn([](InferenceContext* c) {
      // Leaves errors in the shapes to the kernel, which reports them the same way in every mode:
      // an error from here would be a ValueError where a graph is built.
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      for (int i = 0; i < c->num_inputs(); ++i) {
        ShapeHandle shape = c->UnknownShape();
        if (static_cast<size_t>(i) < shapes.size()) {
          TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        }
        SetOutputShape(c, i, shape);
      }
      c->set_output(c->num_inputs(), c->Vector(static_cast<int64_t>(shapes.size())));
      return OkStatus();
    })
    .Doc(R"doc(
Reshapes each input to its own shape without copying.

shapes: one per input, with at most one unknown dimension each, which is inferred.
enable_parallelism: has no effect, a reshape costs nothing.
cost_per_tensor: has no effect.
sizes: [N], the number of elements of each output.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithStaticReshapeN").Device(DEVICE_CPU), StaticReshapeNOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
