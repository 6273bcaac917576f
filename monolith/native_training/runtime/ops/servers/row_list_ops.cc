// MonolithSpreadRows and MonolithSumRows are the worker's ends of a lookup and of an update on
// servers: rows of the distinct ids of all servers become one tensor per table, a row for each id,
// and gradients of these tensors sums for each distinct id and server.
//
//   ids of a batch  a: [7, 8, 7]  b: [7]        distinct  7 8 | 7
//   two servers     pos       [1]               [0, 2]            places among the distinct ids
//                   rows      [row of 8]        [row of 7 in a | row of 7 in b]
//   offsets         [[0, 2 * dim], [dim], [3 * dim]]              in the floats of all tables
//   embeddings      a: [row of 7, row of 8, row of 7]  b: [row of 7 in b]
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::PrefetchForRead;
using ::monolith::engine::PrefetchForWrite;
using shape_inference::InferenceContext;

constexpr int64_t kFetchedAhead = 12;

// Where a float would lie, also outside of its array.
const void* AddressOf(const float* floats, int64_t at) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(floats) + at * sizeof(float));
}

// The arguments that both ops share, checked but for the offsets.
class RowPlaces {
 public:
  // `num_ids` has a size for each table.
  Status Read(OpKernelContext* ctx, const std::vector<int64_t>& dims,
              const std::vector<int64_t>& num_ids) {
    OpInputList pos, pos_split;
    TF_RETURN_IF_ERROR(ctx->input_list("pos", &pos));
    TF_RETURN_IF_ERROR(ctx->input_list("pos_split", &pos_split));
    const Tensor *offset, *offset_split;
    TF_RETURN_IF_ERROR(ctx->input("value_offset", &offset));
    TF_RETURN_IF_ERROR(ctx->input("value_offset_split", &offset_split));
    TF_RETURN_IF_ERROR(CheckVector("value_offset", *offset));
    TF_RETURN_IF_ERROR(CheckVector("value_offset_split", *offset_split));
    TF_RETURN_IF_ERROR(
        CheckRowSplits("value_offset_split", offset_split->vec<int64_t>(), offset->NumElements()));
    offsets_ = offset->vec<int64_t>().data();
    offset_splits_ = offset_split->vec<int64_t>().data();
    num_keys_ = offset_split->NumElements() - 1;
    for (int64_t key = 0; key < num_keys_; ++key) {
      if (offset_splits_[key] == offset_splits_[key + 1]) {
        return errors::InvalidArgument("value_offset has no place for key ", key);
      }
    }
    dims_ = dims;
    base_.assign(1, 0);
    for (size_t t = 0; t < dims.size(); ++t) {
      int64_t floats = 0;
      TF_RETURN_IF_ERROR(MultiplySizes("size of ids * dimension", num_ids[t], dims[t], &floats));
      if (floats > std::numeric_limits<int64_t>::max() / 2 - base_.back()) {
        return errors::InvalidArgument("all tables together have too many floats");
      }
      base_.push_back(base_.back() + floats);
    }
    // Each key once, so that all places are filled, and none by two threads.
    std::vector<char> is_seen(static_cast<size_t>(num_keys_), 0);
    int64_t num_seen = 0;
    for (int s = 0; s < pos.size(); ++s) {
      const std::string name = strings::StrCat("pos[", s, "]");
      const std::string split_name = strings::StrCat("pos_split[", s, "]");
      TF_RETURN_IF_ERROR(CheckVector(name, pos[s]));
      TF_RETURN_IF_ERROR(CheckVector(split_name, pos_split[s]));
      TF_RETURN_IF_ERROR(CheckEqual(strings::StrCat("size of ", split_name),
                                    pos_split[s].NumElements(), "number of tables + 1",
                                    static_cast<int64_t>(dims.size()) + 1));
      TF_RETURN_IF_ERROR(
          CheckRowSplits(split_name, pos_split[s].vec<int64_t>(), pos[s].NumElements()));
      const int64_t* const keys = pos[s].vec<int64_t>().data();
      for (int64_t i = 0; i < pos[s].NumElements(); ++i) {
        if (keys[i] < 0 || keys[i] >= num_keys_ || is_seen[static_cast<size_t>(keys[i])]) {
          return errors::InvalidArgument(name, "[", i, "] is ", keys[i], ", want each of [0, ",
                                         num_keys_, ") once in all of pos");
        }
        is_seen[static_cast<size_t>(keys[i])] = 1;
      }
      num_seen += pos[s].NumElements();
      const int64_t* const splits = pos_split[s].vec<int64_t>().data();
      Shard shard{keys, splits, {0}};
      for (size_t t = 0; t < dims.size(); ++t) {
        int64_t floats = 0;
        TF_RETURN_IF_ERROR(
            MultiplySizes("size of pos * dimension", splits[t + 1] - splits[t], dims[t], &floats));
        if (floats > std::numeric_limits<int64_t>::max() / 2 - shard.first.back()) {
          return errors::InvalidArgument(name, " has too many floats");
        }
        shard.first.push_back(shard.first.back() + floats);
      }
      shards_.push_back(std::move(shard));
    }
    return CheckEqual("number of all pos", num_seen, "number of keys", num_keys_);
  }

  int num_shards() const { return static_cast<int>(shards_.size()); }
  int64_t num_floats(int shard) const { return shards_[shard].first.back(); }

  // Calls fn(shard, table, first float of an entry in the shard, float of one of its places in the
  // table, whether it is the first place) for all places, those of an entry in one thread, and
  // fetch(table, float of a place) some places ahead, where the float is checked by nobody yet.
  template <typename Fetch, typename Fn>
  Status ForEach(const DeviceRunner& runner, const Fetch& fetch, const Fn& fn) const {
    std::atomic<int64_t> bad{-1};
    const int64_t num_offsets = offset_splits_[num_keys_];
    for (size_t s = 0; s < shards_.size(); ++s) {
      const Shard& shard = shards_[s];
      const int64_t n = shard.splits[dims_.size()];
      const int64_t cycles = 40 + 2 * base_.back() / std::max<int64_t>(1, num_keys_);
      runner.For(n, cycles, [&](int64_t begin, int64_t end) {
        for (size_t t = 0; t < dims_.size(); ++t) {
          const int64_t base = base_[t], room = base_[t + 1] - base - dims_[t];
          const int64_t last = std::min(end, shard.splits[t + 1]);
          for (int64_t i = std::max(begin, shard.splits[t]); i < last; ++i) {
            const int64_t key = shard.keys[i];
            const int64_t row = shard.first[t] + (i - shard.splits[t]) * dims_[t];
            for (int64_t k = offset_splits_[key]; k < offset_splits_[key + 1]; ++k) {
              // Places of one key after another: they lie anywhere in the table's floats.
              if (k + kFetchedAhead < num_offsets) fetch(t, offsets_[k + kFetchedAhead] - base);
              const int64_t at = offsets_[k] - base;
              if (at < 0 || at > room) {
                bad.store(k);
                return;
              }
              fn(s, t, row, at, k == offset_splits_[key]);
            }
          }
        }
      });
    }
    const int64_t k = bad.load();
    if (k < 0) return OkStatus();
    return errors::InvalidArgument("value_offset[", k, "] is ", offsets_[k],
                                   ", want a place for a row within its table's floats");
  }

 private:
  struct Shard {
    const int64_t* keys;
    const int64_t* splits;
    std::vector<int64_t> first;  // float of each table's first entry, and the number of all
  };

  const int64_t* offsets_ = nullptr;
  const int64_t* offset_splits_ = nullptr;
  int64_t num_keys_ = 0;
  std::vector<int64_t> dims_;
  std::vector<int64_t> base_;  // first float of each table in what `offsets_` count
  std::vector<Shard> shards_;
};

class SpreadRowsOp : public OpKernel {
 public:
  explicit SpreadRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList rows;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &rows));
    const Tensor* key_split;
    OP_REQUIRES_OK(ctx, ctx->input("key_split", &key_split));
    OP_REQUIRES_OK(ctx, CheckVector("key_split", *key_split));
    OP_REQUIRES_OK(ctx, CheckEqual("size of key_split", key_split->NumElements(),
                                   "number of tables + 1", static_cast<int64_t>(dims_.size()) + 1));
    OP_REQUIRES_OK(ctx, CheckRowSplits("key_split", key_split->vec<int64_t>(), -1));
    std::vector<int64_t> num_ids;
    for (size_t t = 0; t < dims_.size(); ++t) {
      num_ids.push_back(key_split->vec<int64_t>()(t + 1) - key_split->vec<int64_t>()(t));
    }
    RowPlaces places;
    OP_REQUIRES_OK(ctx, places.Read(ctx, dims_, num_ids));
    std::vector<const float*> from;
    for (int s = 0; s < rows.size(); ++s) {
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("rows[", s, "]"), rows[s]));
      OP_REQUIRES_OK(ctx,
                     CheckEqual(strings::StrCat("size of rows[", s, "]"), rows[s].NumElements(),
                                "floats of its pos", places.num_floats(s)));
      from.push_back(rows[s].vec<float>().data());
    }
    std::vector<float*> to;
    for (size_t t = 0; t < dims_.size(); ++t) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(ctx,
                     AllocateOutput(ctx, static_cast<int64_t>(t), {num_ids[t], dims_[t]}, &out));
      to.push_back(out->flat<float>().data());
    }
    const auto copy = [&](size_t s, size_t t, int64_t row, int64_t at, bool) {
      std::memcpy(to[t] + at, from[s] + row, dims_[t] * sizeof(float));
    };
    const auto fetch = [&](size_t t, int64_t at) { PrefetchForWrite(AddressOf(to[t], at)); };
    OP_REQUIRES_OK(ctx, places.ForEach(DeviceRunner(ctx), fetch, copy));
  }

 private:
  std::vector<int64_t> dims_;
};

class SumRowsOp : public OpKernel {
 public:
  explicit SumRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    std::vector<int64_t> num_ids;
    std::vector<const float*> from;
    for (int t = 0; t < grads.size(); ++t) {
      OP_REQUIRES(ctx, grads[t].NumElements() % dims_[t] == 0,
                  errors::InvalidArgument("grads[", t, "] has ", grads[t].NumElements(),
                                          " elements, want a multiple of ", dims_[t]));
      num_ids.push_back(grads[t].NumElements() / dims_[t]);
      from.push_back(grads[t].flat<float>().data());
    }
    RowPlaces places;
    OP_REQUIRES_OK(ctx, places.Read(ctx, dims_, num_ids));
    std::vector<float*> to;
    for (int s = 0; s < places.num_shards(); ++s) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(ctx, AllocateOutput(ctx, s, {places.num_floats(s)}, &out));
      to.push_back(out->vec<float>().data());
    }
    const auto add = [&](size_t s, size_t t, int64_t row, int64_t at, bool is_first) {
      float* const sum = to[s] + row;
      const float* const grad = from[t] + at;
      const int64_t dim = dims_[t];
      if (is_first) {
        std::memcpy(sum, grad, dim * sizeof(float));
      } else {
        for (int64_t d = 0; d < dim; ++d) sum[d] += grad[d];
      }
    };
    const auto fetch = [&](size_t t, int64_t at) { PrefetchForRead(AddressOf(from[t], at)); };
    OP_REQUIRES_OK(ctx, places.ForEach(DeviceRunner(ctx), fetch, add));
  }

 private:
  std::vector<int64_t> dims_;
};

// A dimension for each of `num_tables`.
Status CheckDims(InferenceContext* c, const char* num_tables, std::vector<int64_t>* dims) {
  int64_t want = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", dims));
  TF_RETURN_IF_ERROR(c->GetAttr(num_tables, &want));
  TF_RETURN_IF_ERROR(
      CheckEqual("length of dims", static_cast<int64_t>(dims->size()), "number of tables", want));
  for (size_t t = 0; t < dims->size(); ++t) {
    TF_RETURN_IF_ERROR(CheckCount(strings::StrCat("dims[", t, "]"), (*dims)[t], 1,
                                  std::numeric_limits<int32_t>::max()));
  }
  return OkStatus();
}

REGISTER_OP("MonolithSpreadRows")
    .Input("rows: num_shards * float")
    .Input("pos: num_shards * int64")
    .Input("pos_split: num_shards * int64")
    .Input("value_offset: int64")
    .Input("value_offset_split: int64")
    .Input("key_split: int64")
    .Output("embeddings: num_tables * float")
    .Attr("num_shards: int >= 1")
    .Attr("num_tables: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(CheckDims(c, "num_tables", &dims));
      for (int t = 0; t < c->num_outputs(); ++t) {
        SetOutputShape(c, t, c->Matrix(InferenceContext::kUnknownDim, dims[t]));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Rows of the distinct ids of all servers, as a tensor per table with a row for every id.

rows: From each server the rows of its ids, end to end.
pos: Places of a server's ids among the distinct ones; pos_split: row splits, a row for each table.
value_offset: For each distinct id the first floats of its rows, counted over all tables.
value_offset_split: Row splits of value_offset.
key_split: Row splits of all ids, a row for each table.
dims: Dimensions of the tables.
embeddings: [ids of the table, dim].
)doc");

REGISTER_OP("MonolithSumRows")
    .Input("grads: num_tables * float")
    .Input("pos: num_shards * int64")
    .Input("pos_split: num_shards * int64")
    .Input("value_offset: int64")
    .Input("value_offset_split: int64")
    .Output("sums: num_shards * float")
    .Attr("num_shards: int >= 1")
    .Attr("num_tables: int >= 1")
    .Attr("dims: list(int) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(CheckDims(c, "num_tables", &dims));
      for (int s = 0; s < c->num_outputs(); ++s) {
        c->set_output(s, c->Vector(InferenceContext::kUnknownDim));
      }
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of MonolithSpreadRows: for each server the sums of the gradients of its ids, end to end.

grads: [ids of the table, dim], or as many floats, for each table.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithSpreadRows").Device(DEVICE_CPU), SpreadRowsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithSumRows").Device(DEVICE_CPU), SumRowsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
