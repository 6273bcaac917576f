// Gathering the embeddings of several tables from one flat buffer by float offset, and back.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "monolith/native_training/runtime/ops/distribution/fused_gather_checks.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::ParallelRunner;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

}  // namespace

REGISTER_OP("MonolithFusedGatherEmbeddingsByInput")
    .Input("fused_embeddings: float")
    .Input("embedding_offsets: M * int32")
    .Output("output: M * float")
    .Attr("embedding_dims: list(int)")
    .Attr("M: int >= 1")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("embedding_dims", &dims));
      TF_RETURN_IF_ERROR(CheckDims(dims, c->num_outputs()));
      for (int m = 0; m < c->num_outputs(); ++m) {
        ShapeHandle offsets;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(1 + m), 1, &offsets));
        SetOutputShape(c, m, c->Matrix(c->Dim(offsets, 0), dims[m]));
      }
      return OkStatus();
    })
    .Doc(R"doc(
output[m][j] = fused_embeddings[embedding_offsets[m][j] : + embedding_dims[m]].

fused_embeddings: flat vector.
)doc");

REGISTER_OP("MonolithFusedGatherEmbeddingsByInputGradient")
    .Input("fused_embeddings_size: int32")
    .Input("grads: M * float")
    .Input("embedding_offsets: M * int32")
    .Input("scale: float")
    .Output("output: float")
    .Attr("embedding_dims: list(int)")
    .Attr("M: int >= 1")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &scalar));
      const Tensor* size = c->input_tensor(0);
      if (size == nullptr || size->scalar<int32_t>()() < 0) {
        c->set_output(0, c->Vector(c->UnknownDim()));
      } else {
        c->set_output(0, c->Vector(size->scalar<int32_t>()()));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithFusedGatherEmbeddingsByInput: scale * grads[m][j] summed at embedding_offsets[m][j].

fused_embeddings_size: number of floats of the flat buffer.
scale: scalar.
)doc");

class FusedGatherEmbeddingsByInputOp : public OpKernel {
 public:
  explicit FusedGatherEmbeddingsByInputOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("embedding_dims", &dims_));
    int num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &num_tables));
    OP_REQUIRES_OK(ctx, CheckDims(dims_, num_tables));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& fused = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckVector("fused_embeddings", fused));
    const int64_t num_tables = static_cast<int64_t>(dims_.size());
    for (int64_t m = 0; m < num_tables; ++m) {
      OP_REQUIRES_OK(ctx, CheckOffsets(ctx->input(1 + m), m, dims_[m], fused.NumElements()));
    }
    const float* from = fused.vec<float>().data();
    const DeviceRunner parallel(ctx);
    for (int64_t m = 0; m < num_tables; ++m) {
      const auto offset = ctx->input(1 + m).vec<int32_t>();
      const int64_t dim = dims_[m];
      TensorShape shape;
      OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({offset.size(), dim}, &shape));
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, m, shape, &out));
      float* to = out->flat<float>().data();
      parallel.For(offset.size(), dim / 2 + 10, [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          std::memcpy(to + j * dim, from + offset(j), dim * sizeof(float));
        }
      });
    }
  }

 private:
  std::vector<int64_t> dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedGatherEmbeddingsByInput").Device(DEVICE_CPU),
                        FusedGatherEmbeddingsByInputOp);

class FusedGatherEmbeddingsByInputGradientOp : public OpKernel {
 public:
  explicit FusedGatherEmbeddingsByInputGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("embedding_dims", &dims_));
    int num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &num_tables));
    OP_REQUIRES_OK(ctx, CheckDims(dims_, num_tables));
  }

  void Compute(OpKernelContext* ctx) override {
    const int64_t num_tables = static_cast<int64_t>(dims_.size());
    const Tensor& size_tensor = ctx->input(0);
    const Tensor& scale_tensor = ctx->input(1 + 2 * num_tables);
    OP_REQUIRES_OK(ctx, CheckScalar("fused_embeddings_size", size_tensor));
    OP_REQUIRES_OK(ctx, CheckScalar("scale", scale_tensor));
    const int64_t size = size_tensor.scalar<int32_t>()();
    OP_REQUIRES(ctx, size >= 0,
                errors::InvalidArgument("fused_embeddings_size is ", size, ", want at least 0"));
    const float scale = scale_tensor.scalar<float>()();
    std::vector<Table> tables(num_tables);
    int64_t floats = 0;
    for (int64_t m = 0; m < num_tables; ++m) {
      const Tensor& grads = ctx->input(1 + m);
      const Tensor& offsets = ctx->input(1 + num_tables + m);
      OP_REQUIRES_OK(ctx, CheckOffsets(offsets, m, dims_[m], size));
      OP_REQUIRES(ctx,
                  grads.dims() == 2 && grads.dim_size(0) == offsets.dim_size(0) &&
                      grads.dim_size(1) == dims_[m],
                  errors::InvalidArgument("grads[", m, "] has shape ", grads.shape().DebugString(),
                                          ", want [", offsets.dim_size(0), ",", dims_[m], "]"));
      tables[m] = {grads.flat<float>().data(), offsets.vec<int32_t>().data(), offsets.dim_size(0),
                   dims_[m]};
      floats += grads.NumElements();
    }
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {size}, &out));
    float* to = out->vec<float>().data();

    // A thread owns a range of the output and adds whatever falls into it: no locks, one order.
    const DeviceRunner parallel(ctx);
    const int64_t tasks =
        std::max<int64_t>(1, std::min(size, parallel.TasksFor(size + 2 * floats)));
    parallel.RunTasks(tasks, [&](int64_t task) {
      const int64_t begin = ParallelRunner::Cut(size, tasks, task);
      const int64_t end = ParallelRunner::Cut(size, tasks, task + 1);
      std::fill(to + begin, to + end, 0.0f);
      for (const Table& table : tables) AddRange(table, scale, begin, end, to);
    });
  }

 private:
  struct Table {
    const float* grads;
    const int32_t* offsets;
    int64_t count;
    int64_t dim;
  };

  static void AddRange(const Table& table, float scale, int64_t begin, int64_t end, float* to) {
    for (int64_t j = 0; j < table.count; ++j) {
      const int64_t offset = table.offsets[j];
      if (offset >= end || offset + table.dim <= begin) continue;
      const int64_t first = std::max(begin, offset), last = std::min(end, offset + table.dim);
      const float* grad = table.grads + j * table.dim + (first - offset);
      float* __restrict__ sum = to + first;
      if (scale == 1.0f) {
        for (int64_t i = 0; i < last - first; ++i) sum[i] += grad[i];
      } else {
        for (int64_t i = 0; i < last - first; ++i) sum[i] += scale * grad[i];
      }
    }
  }

  std::vector<int64_t> dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedGatherEmbeddingsByInputGradient").Device(DEVICE_CPU),
                        FusedGatherEmbeddingsByInputGradientOp);

}  // namespace monolith_tf
}  // namespace tensorflow
