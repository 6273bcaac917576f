// MonolithPackIds and MonolithUnpackIds carry many vectors of int64 to a device in one tensor,
// since each copy costs more than what it carries.
//
//   vectors [7 9 7]                [4]                     sizes  [3 1]
//   packed  |7 9 7 0 0 0 0 0|4 0 0 0 0 0 0 0|              every vector starts on 64 bytes
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// Views that kernels of TensorFlow take have to be aligned.
constexpr int64_t kAlignment = 64 / sizeof(int64_t);
constexpr int64_t kGrain = 1 << 16;

int64_t Padded(int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

class PackIdsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int n = ctx->num_inputs();
    Tensor* sizes = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {n}, &sizes));
    std::vector<int64_t> offsets(1, 0);
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("vectors[", i, "]"), ctx->input(i)));
      sizes->vec<int64_t>()(i) = ctx->input(i).NumElements();
      offsets.push_back(offsets.back() + Padded(ctx->input(i).NumElements()));
    }
    Tensor* packed = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {offsets.back()}, &packed));
    int64_t* const out = packed->vec<int64_t>().data();
    const int64_t grain = 1 + n * kGrain / (offsets.back() + 1);
    DeviceRunner(ctx).RunRanges(n, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Tensor& vector = ctx->input(static_cast<int>(i));
        const int64_t size = vector.NumElements();
        std::copy_n(vector.vec<int64_t>().data(), size, out + offsets[i]);
        std::fill(out + offsets[i] + size, out + offsets[i + 1], int64_t{0});
      }
    });
  }
};

// Views, wherever the buffer lies: there is nothing for a device to do.
class UnpackIdsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& packed = ctx->input(0);
    const Tensor& sizes = ctx->input(1);
    const int n = ctx->num_outputs();
    OP_REQUIRES_OK(ctx, CheckVector("packed", packed));
    OP_REQUIRES_OK(ctx, CheckVector("sizes", sizes));
    OP_REQUIRES_OK(ctx, CheckEqual("size of sizes", sizes.NumElements(), "number of vectors",
                                   static_cast<int64_t>(n)));
    int64_t begin = 0;
    for (int i = 0; i < n; ++i) {
      const int64_t size = sizes.vec<int64_t>()(i);
      OP_REQUIRES(ctx, size >= 0 && size <= packed.NumElements() - begin,
                  errors::InvalidArgument("sizes[", i, "] is ", size, ", but packed has ",
                                          packed.NumElements() - begin, " elements left"));
      ctx->set_output(i, packed.Slice(begin, begin + size));
      begin += std::min(Padded(size), packed.NumElements() - begin);
    }
    OP_REQUIRES_OK(ctx, CheckEqual("size of packed", packed.NumElements(),
                                   "the padded sizes together", begin));
  }
};

REGISTER_OP("MonolithPackIds")
    .Input("vectors: N * int64")
    .Output("packed: int64")
    .Output("sizes: int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(c->num_inputs()));
      return OkStatus();
    })
    .Doc(R"doc(
Lays vectors end to end, each padded with zeros to a multiple of 8 elements.

sizes: how many elements each vector has.
)doc");

REGISTER_OP("MonolithUnpackIds")
    .Input("packed: int64")
    .Input("sizes: int64")
    .Output("vectors: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return OkStatus();
    })
    .Doc("Undoes MonolithPackIds without copying.");

REGISTER_GUARDED_KERNEL(Name("MonolithPackIds").Device(DEVICE_CPU), PackIdsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithUnpackIds").Device(DEVICE_CPU), UnpackIdsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithUnpackIds").Device(DEVICE_GPU).HostMemory("sizes"),
                        UnpackIdsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
