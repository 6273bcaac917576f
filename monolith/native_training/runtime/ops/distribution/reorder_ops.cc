// De-duplicating ids and grouping them by server for one transfer.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "monolith/native_training/runtime/distribution/id_index.h"
#include "monolith/native_training/runtime/distribution/id_sharding.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::IdSharder;
using ::monolith::distribution::NumberIds;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

int64_t KeyOf(int64_t value) { return value; }

// Equal floats have equal keys: both zeros are one value, NaNs are told apart by their bits.
int64_t KeyOf(float value) {
  if (value == 0.0f) return 0;
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace

REGISTER_OP("MonolithReorderByIndices")
    .Input("input: T")
    .Input("shard_ids: int32")
    .Output("reordered_tensor: T")
    .Output("shard_sizes: int32")
    .Attr("num_of_shards: int >= 1")
    .Attr("T: {float, int64}")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_of_shards;
      TF_RETURN_IF_ERROR(c->GetAttr("num_of_shards", &num_of_shards));
      TF_RETURN_IF_ERROR(CheckShards("num_of_shards", num_of_shards));
      ShapeHandle input = c->input(0), out = c->UnknownShape();
      if (c->RankKnown(input)) {
        TF_RETURN_IF_ERROR(c->WithRankAtLeast(input, 1, &input));
        TF_RETURN_IF_ERROR(c->ReplaceDim(input, 0, c->UnknownDim(), &out));
      }
      c->set_output(0, out);
      c->set_output(1, c->Vector(num_of_shards));
      return OkStatus();
    })
    .Doc(R"doc(
Drops repeated elements and groups the rest by shard; inside a shard in reverse order of first appearance.

input: [n] or [n, d]; rows of a matrix are compared by their first column and the first one is kept.
shard_ids: [n], each in [0, num_of_shards).
shard_sizes: number of elements kept per shard.
)doc");

REGISTER_OP("FusedReorderByIndices")
    .Input("input: M * T")
    .Output("output: T")
    .Output("shard_sizes: int32")
    .Output("sharded_slot_sizes: int32")
    .Output("emb_offset_sz: int32")
    .Output("fused_emb_offset: int32")
    .Attr("num_of_shards: int >= 1")
    .Attr("slot_embedding_dims: list(int)")
    .Attr("rank0_empty: bool")
    .Attr("M: int >= 1")
    .Attr("T: {int64}")
    .SetShapeFn([](InferenceContext* c) {
      int64_t num_of_shards;
      TF_RETURN_IF_ERROR(c->GetAttr("num_of_shards", &num_of_shards));
      TF_RETURN_IF_ERROR(CheckShards("num_of_shards", num_of_shards));
      ShapeHandle first;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &first));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(num_of_shards));
      c->set_output(2, c->Vector(num_of_shards * c->num_inputs()));
      c->set_output(3, c->Vector(c->num_inputs()));
      c->set_output(4, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc(R"doc(
Drops repeated ids of each table and orders all of them by shard, then table, then first appearance.

input: M vectors of ids, one per table.
shard_sizes: [num_of_shards], ids per shard.
sharded_slot_sizes: [num_of_shards * M], ids per shard and table.
emb_offset_sz: [M], lengths of the inputs.
fused_emb_offset: for every input id, where its embedding starts in the looked-up `output`.
slot_embedding_dims: embedding width of each table.
rank0_empty: shard 0 gets no ids.
)doc");

template <typename T>
class ReorderByIndicesOp : public OpKernel {
 public:
  explicit ReorderByIndicesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_shards_));
    OP_REQUIRES_OK(ctx, CheckShards("num_of_shards", num_shards_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    const Tensor& shard_ids = ctx->input(1);
    OP_REQUIRES(ctx, input.dims() == 1 || input.dims() == 2,
                errors::InvalidArgument("input has shape ", input.shape().DebugString(),
                                        ", want a vector or a matrix"));
    OP_REQUIRES_OK(ctx, CheckVector("shard_ids", shard_ids));
    const int64_t n = input.dim_size(0);
    OP_REQUIRES_OK(ctx, CheckEqual("length of shard_ids", shard_ids.dim_size(0),
                                   "number of rows of input", n));
    const int64_t width = input.dims() == 1 ? 1 : input.dim_size(1);
    OP_REQUIRES(ctx, width > 0 || n == 0,
                errors::InvalidArgument("input has shape ", input.shape().DebugString(),
                                        ", want at least one column"));
    OP_REQUIRES(ctx, n <= std::numeric_limits<int32_t>::max(),
                errors::InvalidArgument("input has ", n, " rows, shard_sizes holds at most ",
                                        std::numeric_limits<int32_t>::max()));
    const int32_t* shards = shard_ids.vec<int32_t>().data();
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES(ctx, shards[i] >= 0 && shards[i] < num_shards_,
                  errors::InvalidArgument("shard_ids[", i, "] is ", shards[i],
                                          ", want a value in [0, ", num_shards_, ")"));
    }

    const T* from = input.flat<T>().data();
    std::vector<int32_t> kept;  // rows of first appearances
    std::vector<int32_t> shard_sizes(num_shards_, 0);
    NumberIds(
        n, [&](int64_t i) { return KeyOf(from[i * width]); },
        [&](int64_t i, int64_t, int64_t, bool is_new) {
          if (!is_new) return;
          kept.push_back(static_cast<int32_t>(i));
          ++shard_sizes[shards[i]];
        });

    TensorShape shape = input.shape();
    shape.set_dim(0, kept.size());
    Tensor *out, *sizes_out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &out));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {num_shards_}, &sizes_out));
    std::copy(shard_sizes.begin(), shard_sizes.end(), sizes_out->vec<int32_t>().data());
    T* to = out->flat<T>().data();
    // Filled from the end of each shard, which gives the reverse order.
    std::vector<int64_t> next(num_shards_);
    int64_t end = 0;
    for (int s = 0; s < num_shards_; ++s) next[s] = end += shard_sizes[s];
    for (const int64_t i : kept) {
      std::memcpy(to + --next[shards[i]] * width, from + i * width, width * sizeof(T));
    }
  }

 private:
  int num_shards_;
};

REGISTER_GUARDED_KERNEL(
    Name("MonolithReorderByIndices").Device(DEVICE_CPU).TypeConstraint<float>("T"),
    ReorderByIndicesOp<float>);
REGISTER_GUARDED_KERNEL(
    Name("MonolithReorderByIndices").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
    ReorderByIndicesOp<int64_t>);

class FusedReorderByIndicesOp : public OpKernel {
 public:
  explicit FusedReorderByIndicesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_of_shards", &num_shards_));
    OP_REQUIRES_OK(ctx, CheckShards("num_of_shards", num_shards_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot_embedding_dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank0_empty", &rank0_empty_));
    int num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &num_tables));
    OP_REQUIRES_OK(ctx, CheckEqual("length of slot_embedding_dims", dims_.size(),
                                   "number of inputs", num_tables));
    OP_REQUIRES_OK(ctx, CheckCount("num_of_shards * number of inputs", num_shards_ * num_tables, 1,
                                   kMaxLists));
    for (const int64_t dim : dims_) {
      OP_REQUIRES(ctx, dim > 0 && dim <= kMaxInt32,
                  errors::InvalidArgument("slot_embedding_dims holds ", dim,
                                          ", want values in [1, ", kMaxInt32, "]"));
    }
    OP_REQUIRES(ctx, !rank0_empty_ || num_shards_ >= 2,
                errors::InvalidArgument("num_of_shards is ", num_shards_,
                                        ", rank0_empty wants at least 2"));
  }

  void Compute(OpKernelContext* ctx) override {
    const int64_t num_tables = static_cast<int64_t>(dims_.size());
    std::vector<Table> tables(num_tables);
    int64_t total = 0;
    for (int64_t m = 0; m < num_tables; ++m) {
      const Tensor& ids = ctx->input(m);
      OP_REQUIRES_OK(ctx, CheckVector("input", ids));
      tables[m].ids = ids.vec<int64_t>().data();
      tables[m].size = ids.dim_size(0);
      total += ids.dim_size(0);
    }
    OP_REQUIRES(
        ctx, total <= kMaxInt32,
        errors::InvalidArgument("input holds ", total, " ids, sizes are limited to ", kMaxInt32));

    DeviceRunner parallel(ctx);
    parallel.For(num_tables, 40 * (total / num_tables + 1), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) Unique(&tables[m]);
    });

    Tensor *out, *shard_sizes_out, *slot_sizes_out, *offset_sizes_out, *offsets_out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {num_shards_}, &shard_sizes_out));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 2, {num_shards_ * num_tables}, &slot_sizes_out));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 3, {num_tables}, &offset_sizes_out));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 4, {total}, &offsets_out));
    auto shard_sizes = shard_sizes_out->vec<int32_t>();
    auto slot_sizes = slot_sizes_out->vec<int32_t>();
    auto offset_sizes = offset_sizes_out->vec<int32_t>();

    // Where each (shard, table) part starts, in ids and in floats.
    std::vector<int64_t> id_start(num_shards_ * num_tables), float_start(num_shards_ * num_tables);
    int64_t num_ids = 0, num_floats = 0;
    for (int64_t s = 0; s < num_shards_; ++s) {
      const int64_t before = num_ids;
      for (int64_t m = 0; m < num_tables; ++m) {
        const int64_t count = tables[m].shard_counts[s];
        id_start[s * num_tables + m] = num_ids;
        float_start[s * num_tables + m] = num_floats;
        slot_sizes(s * num_tables + m) = static_cast<int32_t>(count);
        num_ids += count;
        num_floats += count * dims_[m];
      }
      shard_sizes(s) = static_cast<int32_t>(num_ids - before);
    }
    OP_REQUIRES(ctx, num_floats <= kMaxInt32,
                errors::InvalidArgument("the looked-up embeddings hold ", num_floats,
                                        " floats, fused_emb_offset reaches ", kMaxInt32));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {num_ids}, &out));
    int64_t* to = out->vec<int64_t>().data();
    int32_t* offsets = offsets_out->vec<int32_t>().data();

    std::vector<int64_t> input_start(num_tables + 1, 0);
    for (int64_t m = 0; m < num_tables; ++m) {
      offset_sizes(m) = static_cast<int32_t>(tables[m].size);
      input_start[m + 1] = input_start[m] + tables[m].size;
    }
    parallel.For(num_tables, 10 * (total / num_tables + 1), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        const Table& table = tables[m];
        std::vector<int64_t> next(num_shards_, 0);
        std::vector<int32_t> offset_of(table.unique.size());
        for (size_t u = 0; u < table.unique.size(); ++u) {
          const int64_t part = table.shard[u] * num_tables + m;
          const int64_t position = next[table.shard[u]]++;
          to[id_start[part] + position] = table.unique[u];
          offset_of[u] = static_cast<int32_t>(float_start[part] + position * dims_[m]);
        }
        int32_t* offset = offsets + input_start[m];
        for (int64_t i = 0; i < table.size; ++i) offset[i] = offset_of[table.number[i]];
      }
    });
  }

 private:
  static constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

  struct Table {
    const int64_t* ids;
    int64_t size;
    std::vector<int32_t> number;        // of each id among the distinct ones
    std::vector<int64_t> unique;        // distinct ids in order of first appearance
    std::vector<int32_t> shard;         // of the distinct ids
    std::vector<int64_t> shard_counts;  // distinct ids per shard
  };

  void Unique(Table* table) const {
    table->number.resize(table->size);
    table->shard_counts.assign(num_shards_, 0);
    const IdSharder shard_of(rank0_empty_ ? num_shards_ - 1 : num_shards_);
    NumberIds(
        table->size, [table](int64_t i) { return table->ids[i]; },
        [&](int64_t i, int64_t id, int64_t number, bool is_new) {
          table->number[i] = static_cast<int32_t>(number);
          if (!is_new) return;
          const int64_t shard = shard_of(id) + (rank0_empty_ ? 1 : 0);
          table->unique.push_back(id);
          table->shard.push_back(static_cast<int32_t>(shard));
          ++table->shard_counts[shard];
        });
  }

  int64_t num_shards_;
  std::vector<int64_t> dims_;
  bool rank0_empty_;
};

REGISTER_GUARDED_KERNEL(
    Name("FusedReorderByIndices").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
    FusedReorderByIndicesOp);

}  // namespace monolith_tf
}  // namespace tensorflow
