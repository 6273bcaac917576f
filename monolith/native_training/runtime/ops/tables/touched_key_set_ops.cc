// MonolithTouchedKeySet, ...Insert and ...Steal keep the ids touched since they were last taken.
#include <cstdint>
#include <new>
#include <string>

#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;
using KeySet = ::monolith::engine::ConcurrentKeySet<int64_t>;

class TouchedKeySet : public ResourceBase {
 public:
  TouchedKeySet(int64_t capacity, int64_t concurrency_level) : keys(capacity, concurrency_level) {}

  std::string DebugString() const override {
    return strings::StrCat("touched key set of capacity ", keys.capacity());
  }

  KeySet keys;
};

class TouchedKeySetOp : public ResourceOpKernel<TouchedKeySet> {
 public:
  explicit TouchedKeySetOp(OpKernelConstruction* ctx) : ResourceOpKernel<TouchedKeySet>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &capacity_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("concurrency_level", &concurrency_level_));
    // Checks the declared minima itself: eager execution does not.
    OP_REQUIRES(ctx, capacity_ >= 0,
                errors::InvalidArgument("capacity is ", capacity_, ", want at least 0"));
    OP_REQUIRES(
        ctx, concurrency_level_ >= 1,
        errors::InvalidArgument("concurrency_level is ", concurrency_level_, ", want at least 1"));
  }

 private:
  Status CreateResource(TouchedKeySet** resource) override {
    *resource = new TouchedKeySet(capacity_, concurrency_level_);
    return OkStatus();
  }

  int64_t capacity_;
  int64_t concurrency_level_;
};

class TouchedKeySetInsertOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<TouchedKeySet> set;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &set));
    const Tensor& ids = ctx->input(1);
    Tensor* dropped;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {1}, &dropped));
    try {
      dropped->flat<int64_t>()(0) = set->keys.Insert(ids.flat<int64_t>().data(), ids.NumElements());
    } catch (const std::bad_alloc&) {
      ctx->SetStatus(errors::ResourceExhausted("no memory to insert ", ids.NumElements(),
                                               " ids into the touched key set"));
    }
  }
};

class TouchedKeySetStealOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<TouchedKeySet> set;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &set));
    const KeySet::Stolen stolen = set->keys.Steal();
    Tensor* ids;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {stolen.size()}, &ids));
    stolen.CopyTo(ids->flat<int64_t>().data());
  }
};

REGISTER_OP("MonolithTouchedKeySet")
    .Output("handle: resource")
    .Attr("capacity: int >= 0 = 2097152")
    .Attr("concurrency_level: int >= 1 = 1024")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a thread-safe set of int64 ids to insert into and to take all ids out of.

capacity: an insert into a set of more than this many ids first drops them all.
concurrency_level: how many threads may usefully insert at once.
)doc");

REGISTER_OP("MonolithTouchedKeySetInsert")
    .Input("handle: resource")
    .Input("ids: int64")
    .Output("size: int64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Vector(1));
      return OkStatus();
    })
    .Doc(R"doc(
Inserts ids of any shape in row-major order.

size: [1], how many ids were dropped because the set overflowed. Not the size of the set.
)doc");

REGISTER_OP("MonolithTouchedKeySetSteal")
    .Input("handle: resource")
    .Output("ids: int64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Takes all ids out of the set, in no particular order; each insert is wholly before or wholly after.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithTouchedKeySet").Device(DEVICE_CPU), TouchedKeySetOp);
REGISTER_GUARDED_KERNEL(Name("MonolithTouchedKeySetInsert").Device(DEVICE_CPU),
                        TouchedKeySetInsertOp);
REGISTER_GUARDED_KERNEL(Name("MonolithTouchedKeySetSteal").Device(DEVICE_CPU),
                        TouchedKeySetStealOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
