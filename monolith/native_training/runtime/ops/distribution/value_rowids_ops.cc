// MonolithFusedValueRowids: the row of each value of a ragged tensor.
#include <algorithm>
#include <cstdint>

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

// Writes rowids[begin, end). Work is divided by values, not rows: one long row is shared, too.
void FillRowIds(const int64_t* splits, int64_t num_splits, int64_t begin, int64_t end,
                int64_t* rowids) {
  int64_t row = std::upper_bound(splits, splits + num_splits, begin) - splits - 1;
  while (begin < end) {
    const int64_t row_end = std::min(splits[row + 1], end);
    std::fill(rowids + begin, rowids + row_end, row);
    begin = row_end;
    ++row;
  }
}

class FusedValueRowidsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& splits_tensor = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckVector("splits", splits_tensor));
    const auto splits = splits_tensor.vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits", splits, /*num_values=*/-1));
    const int64_t num_values = splits(splits.size() - 1);
    Tensor* rowids;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {num_values}, &rowids));
    int64_t* out = rowids->flat<int64_t>().data();
    constexpr int64_t kGrain = 1 << 16;
    DeviceRunner(ctx).RunRanges(num_values, kGrain, [&splits, out](int64_t begin, int64_t end) {
      FillRowIds(splits.data(), splits.size(), begin, end, out);
    });
  }
};

REGISTER_OP("MonolithFusedValueRowids")
    .Input("splits: int64")
    .Output("rowids: int64")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
The row of each value of a ragged tensor: rowids[j] = i for splits[i] <= j < splits[i + 1].

splits: [rows + 1], starting at 0 and never decreasing.
rowids: [splits[rows]].
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithFusedValueRowids").Device(DEVICE_CPU), FusedValueRowidsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
