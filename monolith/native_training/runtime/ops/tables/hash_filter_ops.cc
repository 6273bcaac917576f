// Creates occurrence filters and intercepts gradients with them. hash_filter_checkpoint_ops.cc
// saves and restores them.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/probabilistic_filter.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_filter_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithHashFilter")
    .Output("handle: resource")
    .Attr("capacity: int = 300000000")
    .Attr("split_num: int = 7")
    .Attr("config: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a filter that counts occurrences of ids in a ring of counters.

capacity: How many ids are remembered.
split_num: Number of counters in the ring.
config: A serialized SlotOccurrenceThresholdConfig.
)doc");

REGISTER_OP("MonolithProbabilisticFilter")
    .Output("handle: resource")
    .Attr("equal_probability: bool = false")
    .Attr("config: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a filter without memory that admits ids with a probability.

equal_probability: Whether every occurrence has the same probability.
config: A serialized SlotOccurrenceThresholdConfig.
)doc");

REGISTER_OP("MonolithDummyHashFilter")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Creates a filter that lets everything pass.");

REGISTER_OP("MonolithHashFilterInterceptGradient")
    .Input("filter_handle: resource")
    .Input("ids: int64")
    .Input("embeddings: float")
    .Output("same_embeddings: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      return OkStatus();
    })
    .Doc(R"doc(
Passes embeddings on; their gradient is zero where an id is still filtered.

ids: [n].
embeddings: n rows of any shape.
)doc");

REGISTER_OP("MonolithHashFilterInterceptGradientGradient")
    .Input("filter_handle: resource")
    .Input("ids: int64")
    .Input("grad: float")
    .Output("filted_grad: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      return OkStatus();
    })
    .Doc(R"doc(
Sets the gradient rows of filtered ids to zero. Asking counts an occurrence of each id.

ids: [n].
grad: n rows of any shape.
)doc");

class HashFilterOp : public NamedResourceOp<HashFilterResource> {
 public:
  explicit HashFilterOp(OpKernelConstruction* ctx) : NamedResourceOp<HashFilterResource>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &capacity_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("split_num", &split_num_));
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES_OK(ctx, ThresholdsFromBytes(config, &thresholds_));
  }

 private:
  Status Create(OpKernelContext*, const std::string&, HashFilterResource** resource) override {
    std::unique_ptr<engine::SlidingHashFilter> filter;
    TF_RETURN_IF_ERROR(
        FromEngine(engine::SlidingHashFilter::Create(capacity_, split_num_, thresholds_, &filter)));
    engine::SlidingHashFilter* sliding = filter.get();
    *resource = new HashFilterResource(std::move(filter), sliding);
    return OkStatus();
  }

  int64_t capacity_ = 0;
  int64_t split_num_ = 0;
  engine::OccurrenceThresholdConfig thresholds_;
};

class ProbabilisticFilterOp : public NamedResourceOp<HashFilterResource> {
 public:
  explicit ProbabilisticFilterOp(OpKernelConstruction* ctx)
      : NamedResourceOp<HashFilterResource>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("equal_probability", &equal_probability_));
    std::string config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("config", &config));
    OP_REQUIRES_OK(ctx, ThresholdsFromBytes(config, &thresholds_));
  }

 private:
  Status Create(OpKernelContext*, const std::string&, HashFilterResource** resource) override {
    std::unique_ptr<engine::ProbabilisticFilter> filter;
    TF_RETURN_IF_ERROR(
        FromEngine(engine::ProbabilisticFilter::Create(equal_probability_, thresholds_, &filter)));
    *resource = new HashFilterResource(std::move(filter), nullptr);
    return OkStatus();
  }

  bool equal_probability_ = false;
  engine::OccurrenceThresholdConfig thresholds_;
};

class DummyHashFilterOp : public NamedResourceOp<HashFilterResource> {
 public:
  using NamedResourceOp<HashFilterResource>::NamedResourceOp;

 private:
  Status Create(OpKernelContext*, const std::string&, HashFilterResource** resource) override {
    *resource = new HashFilterResource(std::make_unique<engine::DummyFilter>(), nullptr);
    return OkStatus();
  }
};

class InterceptGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(2)); }
};

class InterceptGradientGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<HashFilterResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "filter_handle", &resource));
    const Tensor& ids = ctx->input(1);
    const Tensor& grad = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckVector("ids", ids));
    const int64_t n = ids.NumElements();
    const int64_t size = grad.NumElements();
    OP_REQUIRES(ctx, n == 0 ? size == 0 : size % n == 0,
                errors::InvalidArgument("grad has ", size, " elements, want rows for ", n, " ids"));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({2}, 0, grad.shape(), &out));
    if (n == 0) return;
    const int64_t width = size / n;
    std::vector<uint8_t> filtered(n);
    resource->filter()->Filter(ids.vec<int64_t>().data(), nullptr, n, /*for_table=*/false,
                               filtered.data());
    const float* from = grad.flat<float>().data();
    float* to = out->flat<float>().data();
    for (int64_t i = 0; i < n; ++i) {
      float* row = to + i * width;
      if (filtered[i]) {
        std::fill(row, row + width, 0.0f);
      } else if (to != from) {
        std::copy(from + i * width, from + (i + 1) * width, row);
      }
    }
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithHashFilter").Device(DEVICE_CPU), HashFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithProbabilisticFilter").Device(DEVICE_CPU),
                        ProbabilisticFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithDummyHashFilter").Device(DEVICE_CPU), DummyHashFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterInterceptGradient").Device(DEVICE_CPU),
                        InterceptGradientOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterInterceptGradientGradient").Device(DEVICE_CPU),
                        InterceptGradientGradientOp);

// Filters of tables on a GPU have to be placed there, but live on the host all the same.
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilter").Device(DEVICE_GPU).HostMemory("handle"),
                        HashFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithProbabilisticFilter").Device(DEVICE_GPU).HostMemory("handle"),
                        ProbabilisticFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithDummyHashFilter").Device(DEVICE_GPU).HostMemory("handle"),
                        DummyHashFilterOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterInterceptGradient")
                            .Device(DEVICE_GPU)
                            .HostMemory("filter_handle")
                            .HostMemory("ids"),
                        InterceptGradientOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHashFilterInterceptGradientGradient")
                            .Device(DEVICE_GPU)
                            .HostMemory("filter_handle")
                            .HostMemory("ids")
                            .HostMemory("grad")
                            .HostMemory("filted_grad"),
                        InterceptGradientGradientOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
