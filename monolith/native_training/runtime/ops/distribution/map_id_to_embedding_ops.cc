// From unique ids and their embeddings, as the servers sent them, to one embedding per id of the
// batch.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/distribution/id_index.h"
#include "monolith/native_training/runtime/distribution/row_scatter.h"
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

using ::monolith::distribution::ForEachHashed;
using ::monolith::distribution::IdIndex;
using ::monolith::distribution::PackRow;
using ::monolith::distribution::RowOf;
using ::monolith::distribution::ScatterAddRows;
using ::monolith::distribution::TensorOf;
using ::monolith::engine::InlineRunner;
using ::monolith::engine::ParallelRunner;
using ::monolith::engine::PrefetchForRead;
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

DimensionHandle LastDim(InferenceContext* c, ShapeHandle shape) {
  return c->RankKnown(shape) && c->Rank(shape) > 0 ? c->Dim(shape, -1) : c->UnknownDim();
}

DimensionHandle FirstDim(InferenceContext* c, ShapeHandle shape) {
  return c->RankKnown(shape) && c->Rank(shape) > 0 ? c->Dim(shape, 0) : c->UnknownDim();
}

// input.shape + [last dim of embeddings]
Status WithEmbeddingDim(InferenceContext* c, ShapeHandle input, ShapeHandle embeddings,
                        ShapeHandle* out) {
  if (c->RankKnown(input)) {
    TF_RETURN_IF_ERROR(
        CheckCount("rank of input", c->Rank(input), 0, TensorShape::MaxDimensions() - 1));
  }
  return c->Concatenate(input, c->Vector(LastDim(c, embeddings)), out);
}

// Adds ids[j] -> (tensor, j); the first occurrence of an id wins.
void AddIds(const Tensor& ids, int64_t tensor, IdIndex* index) {
  const int64_t* id = ids.vec<int64_t>().data();
  ForEachHashed(
      *index, 0, ids.NumElements(), [id](int64_t j) { return id[j]; },
      [&](int64_t j, int64_t value, uint64_t hash) {
        index->FindOrInsert(value, hash, PackRow(tensor, j));
      });
}

Status CheckIds(const Tensor& ids) {
  TF_RETURN_IF_ERROR(CheckVector("ids", ids));
  if (ids.dim_size(0) <= std::numeric_limits<uint32_t>::max()) return OkStatus();
  return errors::InvalidArgument("ids has ", ids.dim_size(0), " elements, want at most ",
                                 std::numeric_limits<uint32_t>::max());
}

// rows[i] = place of input[i] in the index.
Status FindRows(const ParallelRunner& parallel, const IdIndex& index, const int64_t* input,
                int64_t n, int64_t* rows) {
  std::atomic<int64_t> missing{n};
  parallel.For(n, 20, [&](int64_t begin, int64_t end) {
    int64_t first_missing = n;
    ForEachHashed(
        index, begin, end, [input](int64_t i) { return input[i]; },
        [&](int64_t i, int64_t id, uint64_t hash) {
          rows[i] = index.Find(id, hash);
          if (rows[i] == IdIndex::kMissing) first_missing = std::min(first_missing, i);
        });
    int64_t before = missing;
    while (first_missing < before && !missing.compare_exchange_weak(before, first_missing)) {
    }
  });
  if (missing == n) return OkStatus();
  return errors::InvalidArgument("Unable to map id ", input[missing]);
}

void CopyRows(const ParallelRunner& parallel, const int64_t* rows, int64_t n,
              const std::vector<const float*>& embeddings, int64_t dim, float* out) {
  constexpr int64_t kLookahead = 8;
  parallel.For(n, dim / 2 + 10, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kLookahead < end) {
        const int64_t ahead = rows[i + kLookahead];
        PrefetchForRead(embeddings[TensorOf(ahead)] + RowOf(ahead) * dim);
      }
      std::memcpy(out + i * dim, embeddings[TensorOf(rows[i])] + RowOf(rows[i]) * dim,
                  dim * sizeof(float));
    }
  });
}

// The width of `grads`, which has one row per element of a tensor of `shape`.
Status GradWidth(const Tensor& grads, const char* name, const TensorShape& shape, int64_t* dim) {
  if (grads.dims() < 1) return errors::InvalidArgument("grads is a scalar, want at least a vector");
  *dim = grads.dim_size(grads.dims() - 1);
  int64_t rows = 1;
  for (int d = 0; d + 1 < grads.dims(); ++d) rows *= grads.dim_size(d);
  if (rows == shape.num_elements()) return OkStatus();
  return errors::InvalidArgument("grads has shape ", grads.shape().DebugString(), ", want one row",
                                 " for each of the ", shape.num_elements(), " elements of ", name);
}

}  // namespace

REGISTER_OP("MonolithMapIdToEmbedding")
    .Input("ids: num_splits * int64")
    .Input("embeddings: num_splits * float")
    .Input("input: int64")
    .Output("output: float")
    .Attr("num_splits: int >= 1")
    .Attr("use_multi_threads: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      const int num_splits = (c->num_inputs() - 1) / 2;
      ShapeHandle out;
      TF_RETURN_IF_ERROR(WithEmbeddingDim(c, c->input(2 * num_splits), c->input(num_splits), &out));
      c->set_output(0, out);
      return OkStatus();
    })
    .Doc(R"doc(
The embedding of every id of `input`. An id that occurs more than once in `ids` takes its first row.

ids: vectors of ids, one per server.
embeddings: [len(ids[s]), dim] per server.
input: ids of any shape, all of them in `ids`.
output: input.shape + [dim].
)doc");

REGISTER_OP("MonolithMapIdToEmbeddingGradient")
    .Input("ids: num_splits * int64")
    .Input("input: int64")
    .Input("grads: float")
    .Output("embedding_grads: num_splits * float")
    .Attr("num_splits: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int num_splits = c->num_inputs() - 2;
      const DimensionHandle dim = LastDim(c, c->input(num_splits + 1));
      for (int s = 0; s < num_splits; ++s) {
        SetOutputShape(c, s, c->Matrix(FirstDim(c, c->input(s)), dim));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithMapIdToEmbedding: rows of `grads` summed per id.
)doc");

REGISTER_OP("MonolithGatherEmbeddingsByInput")
    .Input("ids: int64")
    .Input("embeddings: float")
    .Input("input: int64")
    .Output("output: float")
    .Output("output_index_mapping: int64")
    .Attr("use_multi_threads: bool = false")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle out;
      TF_RETURN_IF_ERROR(WithEmbeddingDim(c, c->input(2), c->input(1), &out));
      c->set_output(0, out);
      c->set_output(1, c->input(2));
      return OkStatus();
    })
    .Doc(R"doc(
The embedding of every id of `input`, and the row of `ids` it was found in.

ids: [n]. embeddings: [n, dim]. input: ids of any shape, all of them in `ids`.
)doc");

REGISTER_OP("MonolithGatherEmbeddingsByInputGradient")
    .Input("ids: int64")
    .Input("grads: float")
    .Input("index_mapping: int64")
    .Output("embedding_grads: float")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      SetOutputShape(c, 0, c->Matrix(FirstDim(c, c->input(0)), LastDim(c, c->input(1))));
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithGatherEmbeddingsByInput: rows of `grads` summed at `index_mapping`.
)doc");

class MapIdToEmbeddingOp : public OpKernel {
 public:
  explicit MapIdToEmbeddingOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_splits", &num_splits_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_multi_threads", &use_multi_threads_));
  }

  void Compute(OpKernelContext* ctx) override {
    int64_t dim = 0, num_ids = 0;
    std::vector<const float*> embeddings(num_splits_);
    for (int s = 0; s < num_splits_; ++s) {
      const Tensor& ids = ctx->input(s);
      const Tensor& rows = ctx->input(num_splits_ + s);
      OP_REQUIRES_OK(ctx, CheckIds(ids));
      OP_REQUIRES_OK(ctx, CheckMatrix("embeddings", rows));
      OP_REQUIRES(ctx, rows.dim_size(0) == ids.dim_size(0),
                  errors::InvalidArgument("embeddings[", s, "] has ", rows.dim_size(0),
                                          " rows, ids[", s, "] has ", ids.dim_size(0), " ids"));
      if (s == 0) dim = rows.dim_size(1);
      OP_REQUIRES(ctx, rows.dim_size(1) == dim,
                  errors::InvalidArgument("embeddings[", s, "] has width ", rows.dim_size(1),
                                          ", embeddings[0] has ", dim));
      embeddings[s] = rows.flat<float>().data();
      num_ids += ids.dim_size(0);
    }
    const Tensor& input = ctx->input(2 * num_splits_);
    TensorShape shape = input.shape();
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(dim));
    IdIndex index(num_ids);
    for (int s = 0; s < num_splits_; ++s) AddIds(ctx->input(s), s, &index);

    const DeviceRunner pool(ctx);
    const InlineRunner in_line;
    const ParallelRunner& parallel = use_multi_threads_
                                         ? static_cast<const ParallelRunner&>(pool)
                                         : static_cast<const ParallelRunner&>(in_line);
    const int64_t n = input.NumElements();
    std::vector<int64_t> rows(n);
    OP_REQUIRES_OK(ctx, FindRows(parallel, index, input.flat<int64_t>().data(), n, rows.data()));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    CopyRows(parallel, rows.data(), n, embeddings, dim, out->flat<float>().data());
  }

 private:
  int num_splits_;
  bool use_multi_threads_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithMapIdToEmbedding").Device(DEVICE_CPU), MapIdToEmbeddingOp);

class MapIdToEmbeddingGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int num_splits = ctx->num_inputs() - 2;
    const Tensor& input = ctx->input(num_splits);
    const Tensor& grads = ctx->input(num_splits + 1);
    int64_t dim;
    OP_REQUIRES_OK(ctx, GradWidth(grads, "input", input.shape(), &dim));
    std::vector<int64_t> num_rows(num_splits);
    int64_t num_ids = 0;
    for (int s = 0; s < num_splits; ++s) {
      OP_REQUIRES_OK(ctx, CheckIds(ctx->input(s)));
      num_rows[s] = ctx->input(s).dim_size(0);
      num_ids += num_rows[s];
    }
    IdIndex index(num_ids);
    for (int s = 0; s < num_splits; ++s) AddIds(ctx->input(s), s, &index);
    const DeviceRunner parallel(ctx);
    const int64_t n = input.NumElements();
    std::vector<int64_t> rows(n);
    OP_REQUIRES_OK(ctx, FindRows(parallel, index, input.flat<int64_t>().data(), n, rows.data()));

    std::vector<float*> outs(num_splits);
    for (int s = 0; s < num_splits; ++s) {
      TensorShape shape;
      OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({num_rows[s], dim}, &shape));
      Tensor* out;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, s, shape, &out));
      outs[s] = out->flat<float>().data();
    }
    ScatterAddRows(parallel, rows.data(), n, grads.flat<float>().data(), dim, outs, num_rows);
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithMapIdToEmbeddingGradient").Device(DEVICE_CPU),
                        MapIdToEmbeddingGradientOp);

class GatherEmbeddingsByInputOp : public OpKernel {
 public:
  explicit GatherEmbeddingsByInputOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_multi_threads", &use_multi_threads_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const Tensor& embeddings = ctx->input(1);
    const Tensor& input = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckIds(ids));
    OP_REQUIRES_OK(ctx, CheckMatrix("embeddings", embeddings));
    OP_REQUIRES(ctx, embeddings.dim_size(0) == ids.dim_size(0),
                errors::InvalidArgument("See unmatched embedding dim ", embeddings.dim_size(0),
                                        " and id dim ", ids.dim_size(0)));
    const int64_t dim = embeddings.dim_size(1);
    TensorShape shape = input.shape();
    OP_REQUIRES_OK(ctx, shape.AddDimWithStatus(dim));
    IdIndex index(ids.dim_size(0));
    AddIds(ids, 0, &index);

    const DeviceRunner pool(ctx);
    const InlineRunner in_line;
    const ParallelRunner& parallel = use_multi_threads_
                                         ? static_cast<const ParallelRunner&>(pool)
                                         : static_cast<const ParallelRunner&>(in_line);
    Tensor *out, *mapping;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, input.shape(), &mapping));
    // With one tensor a packed row is the row itself.
    int64_t* rows = mapping->flat<int64_t>().data();
    const int64_t n = input.NumElements();
    OP_REQUIRES_OK(ctx, FindRows(parallel, index, input.flat<int64_t>().data(), n, rows));
    CopyRows(parallel, rows, n, {embeddings.flat<float>().data()}, dim, out->flat<float>().data());
  }

 private:
  bool use_multi_threads_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithGatherEmbeddingsByInput").Device(DEVICE_CPU),
                        GatherEmbeddingsByInputOp);

class GatherEmbeddingsByInputGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    const Tensor& grads = ctx->input(1);
    const Tensor& mapping = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckIds(ids));
    int64_t dim;
    OP_REQUIRES_OK(ctx, GradWidth(grads, "index_mapping", mapping.shape(), &dim));
    const int64_t num_rows = ids.dim_size(0);
    const auto rows = mapping.flat<int64_t>();
    for (int64_t i = 0; i < rows.size(); ++i) {
      OP_REQUIRES(ctx, rows(i) >= 0 && rows(i) < num_rows,
                  errors::InvalidArgument("index_mapping[", i, "] is ", rows(i),
                                          ", want a value in [0, ", num_rows, ")"));
    }
    TensorShape shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({num_rows, dim}, &shape));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    ScatterAddRows(DeviceRunner(ctx), rows.data(), rows.size(), grads.flat<float>().data(), dim,
                   {out->flat<float>().data()}, {num_rows});
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithGatherEmbeddingsByInputGradient").Device(DEVICE_CPU),
                        GatherEmbeddingsByInputGradientOp);

}  // namespace monolith_tf
}  // namespace tensorflow
