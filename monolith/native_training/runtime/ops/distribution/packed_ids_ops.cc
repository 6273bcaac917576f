// MonolithPackIds and MonolithUnpackIds carry many vectors of int64 to a device in one tensor,
// since each copy costs more than what it carries.
//
//   vectors [7 9 7]                [4]  [7 9 7]            places [[0 3] [8 1] [0 3]]
//   packed  |7 9 7 0 0 0 0 0|4 0 0 0 0 0 0 0|              every vector starts on 64 bytes
//
// Vectors that are equal lie there once: features with one id for each example have the same row
// splits, which would be half of all bytes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
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

// Rarely does the same at both ends and in the middle differ elsewhere, so that a batch of many
// vectors of one size is not compared in full with each of them.
bool AreEqual(const int64_t* a, const int64_t* b, int64_t size) {
  if (a == b || size == 0) return true;
  for (const int64_t at : {int64_t{0}, size / 2, size - 1}) {
    if (a[at] != b[at]) return false;
  }
  return std::memcmp(a, b, static_cast<size_t>(size) * sizeof(int64_t)) == 0;
}

class PackIdsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int n = ctx->num_inputs();
    Tensor* places = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, {n, 2}, &places));
    auto place = places->matrix<int64_t>();
    std::unordered_map<int64_t, std::vector<int>> size_to_distinct;
    std::vector<int> distinct;
    int64_t end = 0;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("vectors[", i, "]"), ctx->input(i)));
      const int64_t size = ctx->input(i).NumElements();
      std::vector<int>& others = size_to_distinct[size];
      const auto same = std::find_if(others.begin(), others.end(), [&](int other) {
        return AreEqual(Data(ctx, i), Data(ctx, other), size);
      });
      place(i, 1) = size;
      place(i, 0) = same == others.end() ? end : place(*same, 0);
      if (same != others.end()) continue;
      others.push_back(i);
      distinct.push_back(i);
      end += Padded(size);
    }
    // A copy to a GPU takes memory that is not page-locked through a buffer of its own, and waits.
    // TensorFlow's allocator may be asked for no more than the inputs have.
    AllocatorAttributes attributes;
    attributes.set_gpu_compatible(true);
    Tensor* packed = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({end}), &packed, attributes));
    int64_t* const out = packed->vec<int64_t>().data();
    const int64_t num_distinct = static_cast<int64_t>(distinct.size());
    const int64_t grain = 1 + num_distinct * kGrain / (end + 1);
    DeviceRunner(ctx).RunRanges(num_distinct, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int vector = distinct[static_cast<size_t>(i)];
        const int64_t size = place(vector, 1);
        int64_t* const begin = out + place(vector, 0);
        std::copy_n(Data(ctx, vector), size, begin);
        std::fill(begin + size, begin + Padded(size), int64_t{0});
      }
    });
  }

 private:
  static const int64_t* Data(OpKernelContext* ctx, int i) {
    return ctx->input(i).vec<int64_t>().data();
  }
};

class HasOneEachOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OpInputList ids, row_splits;
    OP_REQUIRES_OK(ctx, ctx->input_list("ids", &ids));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    const int64_t n = ids.size();
    Tensor* result = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {n}, &result));
    int64_t total = 0;
    for (int i = 0; i < ids.size(); ++i) {
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("ids[", i, "]"), ids[i]));
      OP_REQUIRES_OK(ctx, CheckVector(strings::StrCat("row_splits[", i, "]"), row_splits[i]));
      total += row_splits[i].NumElements();
    }
    std::vector<Status> statuses(static_cast<size_t>(n));
    bool* const has_one_each = result->vec<bool>().data();
    DeviceRunner(ctx).RunRanges(n, 1 + n * kGrain / (total + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Tensor& splits = row_splits[static_cast<int>(i)];
        const int64_t* const split = splits.vec<int64_t>().data();
        const int64_t size = splits.NumElements();
        statuses[static_cast<size_t>(i)] =
            CheckRowSplits(strings::StrCat("row_splits[", i, "]"), split, size,
                           ids[static_cast<int>(i)].NumElements());
        int64_t ones = 0;
        for (int64_t k = 0; k < size; ++k) ones += split[k] == k;
        has_one_each[i] = ones == size;
      }
    });
    for (const Status& status : statuses) OP_REQUIRES_OK(ctx, status);
  }
};

// Views, wherever the buffer lies: there is nothing for a device to do.
class UnpackIdsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& packed = ctx->input(0);
    const Tensor& places = ctx->input(1);
    const int n = ctx->num_outputs();
    OP_REQUIRES_OK(ctx, CheckVector("packed", packed));
    OP_REQUIRES_OK(ctx, CheckMatrix("places", places));
    OP_REQUIRES_OK(ctx, CheckEqual("places.shape[0]", places.dim_size(0), "number of vectors",
                                   static_cast<int64_t>(n)));
    OP_REQUIRES_OK(ctx, CheckEqual("places.shape[1]", places.dim_size(1), "begin and size", 2));
    const auto place = places.matrix<int64_t>();
    for (int i = 0; i < n; ++i) {
      const int64_t begin = place(i, 0);
      const int64_t size = place(i, 1);
      OP_REQUIRES(
          ctx,
          begin >= 0 && begin <= packed.NumElements() && begin % kAlignment == 0 && size >= 0 &&
              size <= packed.NumElements() - begin,
          errors::InvalidArgument("places[", i, "] is ", begin, " and ", size,
                                  ", want a multiple of ", kAlignment, " and a size within the ",
                                  packed.NumElements(), " elements of packed"));
      ctx->set_output(i, packed.Slice(begin, begin + size));
    }
  }
};

REGISTER_OP("MonolithPackIds")
    .Input("vectors: N * int64")
    .Output("packed: int64")
    .Output("places: int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Matrix(c->num_inputs(), 2));
      return OkStatus();
    })
    .Doc(R"doc(
Lays vectors end to end, each padded with zeros to a multiple of 8 elements. Equal ones lie there
once.

places: where each vector begins, and how many elements it has.
)doc");

REGISTER_OP("MonolithHasOneEach")
    .Input("ids: N * int64")
    .Input("row_splits: N * int64")
    .Output("has_one_each: bool")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs() / 2));
      return OkStatus();
    })
    .Doc(R"doc(
Checks that row splits fit their ids, and tells which of them have one id in each row.

has_one_each: [N].
)doc");

REGISTER_OP("MonolithUnpackIds")
    .Input("packed: int64")
    .Input("places: int64")
    .Output("vectors: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &unused));
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return OkStatus();
    })
    .Doc("Undoes MonolithPackIds without copying.");

REGISTER_GUARDED_KERNEL(Name("MonolithPackIds").Device(DEVICE_CPU), PackIdsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithHasOneEach").Device(DEVICE_CPU), HasOneEachOp);
REGISTER_GUARDED_KERNEL(Name("MonolithUnpackIds").Device(DEVICE_CPU), UnpackIdsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithUnpackIds").Device(DEVICE_GPU).HostMemory("places"),
                        UnpackIdsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
