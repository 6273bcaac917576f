// GPU kernels of the fused layout ops, versions 3 to 5.
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/distribution/embedding_layout.h"
#include "monolith/native_training/runtime/gpu/layout_plan_view.h"
#include "monolith/native_training/runtime/ops/distribution/layout_reader.h"
#include "monolith/native_training/runtime/ops/gpu/gpu_kernel.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::LayoutBatch;
using ::monolith::distribution::LayoutRequest;
using ::monolith::engine::InlineRunner;
using ::monolith::gpu::LayoutPlanView;

class LayoutGpuKernel : public CheckedGpuKernel {
 public:
  LayoutGpuKernel(OpKernelConstruction* ctx, int version)
      : CheckedGpuKernel(ctx), reader_(version) {
    OP_REQUIRES_OK(ctx, reader_.Init(ctx));
  }

 protected:
  const LayoutReader& reader() const { return reader_; }

  static MonoGpuLayoutRequest OnDevice(const LayoutRequest& request) {
    return {request.ids,      request.rows,       request.starts,    request.num_ids,
            request.num_rows, request.num_starts, request.batch_size};
  }

  // Gives the values of the offsets to the check of the CPU kernel.
  Describe DescribeOffsets(const std::vector<LayoutInput>& requests) const {
    return [this, requests](const GpuCall& call) {
      for (size_t r = 0; r < requests.size(); ++r) {
        LayoutRequest request = requests[r].layout;
        std::vector<uint64_t> ids;
        std::vector<int32_t> rows;
        std::vector<uint32_t> starts;
        TF_RETURN_IF_ERROR(call.ReadNow(request.ids, request.num_ids, &ids));
        TF_RETURN_IF_ERROR(call.ReadNow(request.rows, request.num_rows, &rows));
        TF_RETURN_IF_ERROR(call.ReadNow(request.starts, request.num_starts, &starts));
        request.ids = ids.data();
        request.rows = rows.data();
        request.starts = starts.data();
        LayoutBatch batch;
        TF_RETURN_IF_ERROR(LayoutReader::RequestError(
            r, requests.size(), batch.Build(InlineRunner(), reader_.plan(), request)));
      }
      return OkStatus();
    };
  }

  // The shapes of the layout tensors.
  Status OutputShapes(const std::vector<LayoutInput>& requests,
                      std::vector<TensorShape>* shapes) const {
    const int64_t batch = LayoutReader::TotalBatch(requests);
    shapes->resize(reader_.plan().outputs().size());
    for (size_t o = 0; o < shapes->size(); ++o) {
      TF_RETURN_IF_ERROR(reader_.OutputShape(o, batch, &(*shapes)[o]));
    }
    return OkStatus();
  }

 private:
  LayoutReader reader_;
};

template <int kVersion>
class EmbeddingToLayoutGpuOp : public LayoutGpuKernel {
 public:
  explicit EmbeddingToLayoutGpuOp(OpKernelConstruction* ctx) : LayoutGpuKernel(ctx, kVersion) {
    OP_REQUIRES_OK(ctx, CheckEqual("num_out", ctx->num_outputs(), "shapes in feature_cfgs",
                                   static_cast<int64_t>(reader().plan().outputs().size())));
  }

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    OpInputList embeddings;
    TF_RETURN_IF_ERROR(ctx->input_list("embeddings_list", &embeddings));
    std::vector<LayoutInput> requests;
    TF_RETURN_IF_ERROR(reader().ReadRequests(ctx, embeddings, &requests));
    std::vector<TensorShape> shapes;
    TF_RETURN_IF_ERROR(OutputShapes(requests, &shapes));
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, shapes, &whole, &offsets));
    std::vector<float*> outputs;
    for (size_t o = 0; o < shapes.size(); ++o) outputs.push_back(MutableFloats(whole) + offsets[o]);
    std::vector<const float*> lists, blocks;
    for (const Tensor& list : embeddings) lists.push_back(Floats(list));
    std::vector<MonoGpuLayoutRequest> on_device;
    std::vector<int64_t> sizes;
    for (const LayoutInput& request : requests) {
      on_device.push_back(OnDevice(request.layout));
      const auto pointers = LayoutReader::BlockPointers(request, lists);
      blocks.insert(blocks.end(), pointers.begin(), pointers.end());
      for (const auto& block : request.layout.blocks) sizes.push_back(block.size);
    }
    const int64_t num_requests = static_cast<int64_t>(requests.size());
    const int64_t num_blocks =
        requests.empty() ? 0 : static_cast<int64_t>(requests[0].layout.blocks.size());
    const LayoutPlanView view(reader().plan());
    const MonoGpuLayoutPlan plan = view.plan();
    *describe = DescribeOffsets(requests);
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_layout(call->stream(), &plan, num_requests, on_device.data(),
                                       num_blocks, blocks.data(), sizes.data(), outputs.data(),
                                       workspace, bytes);
    });
  }
};

template <int kVersion>
class EmbeddingToLayoutGradGpuOp : public LayoutGpuKernel {
 public:
  explicit EmbeddingToLayoutGradGpuOp(OpKernelConstruction* ctx) : LayoutGpuKernel(ctx, kVersion) {}

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    OpInputList embeddings, layout_grads;
    TF_RETURN_IF_ERROR(ctx->input_list("embeddings_list", &embeddings));
    TF_RETURN_IF_ERROR(ctx->input_list("tensors_grad", &layout_grads));
    TF_RETURN_IF_ERROR(CheckEqual("length of tensors_grad", layout_grads.size(),
                                  "shapes in feature_cfgs",
                                  static_cast<int64_t>(reader().plan().outputs().size())));
    std::vector<LayoutInput> requests;
    TF_RETURN_IF_ERROR(reader().ReadRequests(ctx, embeddings, &requests));
    std::vector<TensorShape> want, shapes;
    TF_RETURN_IF_ERROR(OutputShapes(requests, &want));
    std::vector<const float*> grads;
    for (int o = 0; o < layout_grads.size(); ++o) {
      if (layout_grads[o].shape() != want[o]) {
        return errors::InvalidArgument("tensors_grad[", o, "] has shape ",
                                       layout_grads[o].shape().DebugString(), ", want ",
                                       want[o].DebugString());
      }
      grads.push_back(Floats(layout_grads[o]));
    }
    for (const Tensor& list : embeddings) shapes.push_back(list.shape());
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, shapes, &whole, &offsets));
    const LayoutInput& request = requests[0];
    std::vector<int64_t> block_offsets, sizes;
    for (size_t b = 0; b < request.starts.size(); ++b) {
      block_offsets.push_back(offsets[request.starts[b].list] + request.starts[b].offset);
      sizes.push_back(request.layout.blocks[b].size);
    }
    const MonoGpuLayoutRequest on_device = OnDevice(request.layout);
    const LayoutPlanView view(reader().plan());
    const MonoGpuLayoutPlan plan = view.plan();
    *describe = DescribeOffsets(requests);
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_layout_grad(
          call->stream(), &plan, &on_device, static_cast<int64_t>(sizes.size()),
          block_offsets.data(), sizes.data(), grads.data(), MutableFloats(whole),
          whole.NumElements(), workspace, bytes);
    });
  }
};

REGISTER_GUARDED_KERNEL(
    Name("MonolithEmbeddingToLayoutV3").Device(DEVICE_GPU).HostMemory("batch_size"),
    EmbeddingToLayoutGpuOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV4")
                            .Device(DEVICE_GPU)
                            .HostMemory("batch_size")
                            .HostMemory("fid_list_emb_row_lenth"),
                        EmbeddingToLayoutGpuOp<4>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV5")
                            .Device(DEVICE_GPU)
                            .HostMemory("batch_size")
                            .HostMemory("nfl_size")
                            .HostMemory("feature_size")
                            .HostMemory("fid_size")
                            .HostMemory("emb_size"),
                        EmbeddingToLayoutGpuOp<5>);
REGISTER_GUARDED_KERNEL(
    Name("MonolithEmbeddingToLayoutGradV3").Device(DEVICE_GPU).HostMemory("batch_size"),
    EmbeddingToLayoutGradGpuOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV4")
                            .Device(DEVICE_GPU)
                            .HostMemory("batch_size")
                            .HostMemory("fid_list_emb_row_lenth"),
                        EmbeddingToLayoutGradGpuOp<4>);
// V5 has the gradient interface of V3: no size vectors, so one request.
REGISTER_GUARDED_KERNEL(
    Name("MonolithEmbeddingToLayoutGradV5").Device(DEVICE_GPU).HostMemory("batch_size"),
    EmbeddingToLayoutGradGpuOp<3>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
