// CPU kernels of the fused layout ops: each version's tensors are brought into the engine's form,
// then one implementation does the work.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/distribution/embedding_layout.h"
#include "monolith/native_training/runtime/ops/distribution/layout_reader.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::LayoutBatch;
using ::monolith::distribution::LayoutPlan;

// Holds the parts that the forward and the backward op share.
class LayoutKernel : public OpKernel {
 public:
  LayoutKernel(OpKernelConstruction* ctx, int version) : OpKernel(ctx), reader_(version) {
    OP_REQUIRES_OK(ctx, reader_.Init(ctx));
  }

 protected:
  // Checks all offsets; afterwards the engine may follow them blindly. The batches point into
  // `requests`.
  Status ReadRequests(OpKernelContext* ctx, const DeviceRunner& parallel,
                      const OpInputList& embeddings, std::vector<LayoutInput>* requests,
                      std::vector<LayoutBatch>* batches) const {
    TF_RETURN_IF_ERROR(reader_.ReadRequests(ctx, embeddings, requests));
    batches->resize(requests->size());
    for (size_t r = 0; r < requests->size(); ++r) {
      TF_RETURN_IF_ERROR(LayoutReader::RequestError(
          r, requests->size(),
          (*batches)[r].Build(parallel, reader_.plan(), (*requests)[r].layout)));
    }
    return OkStatus();
  }

  const LayoutReader& reader() const { return reader_; }
  const LayoutPlan& plan() const { return reader_.plan(); }

 private:
  LayoutReader reader_;
};

template <int kVersion>
class EmbeddingToLayoutOp : public LayoutKernel {
 public:
  explicit EmbeddingToLayoutOp(OpKernelConstruction* ctx) : LayoutKernel(ctx, kVersion) {
    OP_REQUIRES_OK(ctx, CheckEqual("num_out", ctx->num_outputs(), "shapes in feature_cfgs",
                                   static_cast<int64_t>(plan().outputs().size())));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    OpInputList embeddings;
    OP_REQUIRES_OK(ctx, ctx->input_list("embeddings_list", &embeddings));
    std::vector<LayoutInput> requests;
    std::vector<LayoutBatch> batches;
    OP_REQUIRES_OK(ctx, ReadRequests(ctx, parallel, embeddings, &requests, &batches));

    std::vector<float*> outputs;
    for (size_t o = 0; o < plan().outputs().size(); ++o) {
      TensorShape shape;
      OP_REQUIRES_OK(ctx, reader().OutputShape(o, LayoutReader::TotalBatch(requests), &shape));
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, o, shape, &out));
      outputs.push_back(out->flat<float>().data());
    }
    std::vector<const float*> lists;
    for (const Tensor& list : embeddings) lists.push_back(list.flat<float>().data());
    for (size_t r = 0; r < requests.size(); ++r) {
      batches[r].Forward(parallel, LayoutReader::BlockPointers(requests[r], lists),
                         requests[r].first_row, outputs);
    }
  }
};

template <int kVersion>
class EmbeddingToLayoutGradOp : public LayoutKernel {
 public:
  explicit EmbeddingToLayoutGradOp(OpKernelConstruction* ctx) : LayoutKernel(ctx, kVersion) {}

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    OpInputList embeddings, layout_grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("embeddings_list", &embeddings));
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors_grad", &layout_grads));
    OP_REQUIRES_OK(
        ctx, CheckEqual("length of tensors_grad", layout_grads.size(), "shapes in feature_cfgs",
                        static_cast<int64_t>(plan().outputs().size())));
    std::vector<LayoutInput> requests;
    std::vector<LayoutBatch> batches;
    OP_REQUIRES_OK(ctx, ReadRequests(ctx, parallel, embeddings, &requests, &batches));
    std::vector<const float*> grads;
    for (int o = 0; o < layout_grads.size(); ++o) {
      TensorShape want;
      OP_REQUIRES_OK(ctx, reader().OutputShape(o, LayoutReader::TotalBatch(requests), &want));
      OP_REQUIRES(ctx, layout_grads[o].shape() == want,
                  errors::InvalidArgument("tensors_grad[", o, "] has shape ",
                                          layout_grads[o].shape().DebugString(), ", want ",
                                          want.DebugString()));
      grads.push_back(layout_grads[o].flat<float>().data());
    }

    std::vector<float*> lists;
    for (int j = 0; j < embeddings.size(); ++j) {
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(j, embeddings[j].shape(), &out));
      float* data = out->flat<float>().data();
      parallel.For(out->NumElements(), 1, [data](int64_t begin, int64_t end) {
        std::fill(data + begin, data + end, 0.0f);
      });
      lists.push_back(data);
    }
    for (size_t r = 0; r < requests.size(); ++r) {
      batches[r].Backward(parallel, grads, requests[r].first_row,
                          LayoutReader::BlockPointers(requests[r], lists));
    }
  }
};

}  // namespace

REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayout").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<1>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV2").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<2>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV3").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV4").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<4>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV5").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<5>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGrad").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<1>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV2").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<2>);
// V5 has the gradient interface of V3: no size vectors, so one request.
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV3").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV4").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<4>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV5").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<3>);

}  // namespace monolith_tf
}  // namespace tensorflow
