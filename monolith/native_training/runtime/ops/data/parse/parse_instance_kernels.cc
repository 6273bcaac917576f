// Kernels of ParseInstances and ParseInstancesV2.
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/data/parse/instance_table.h"
#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

template <bool returns_protos>
class ParseInstancesOp : public OpKernel {
 public:
  explicit ParseInstancesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> fidv2_features;
    OP_REQUIRES_OK(ctx, spec_.BuildFromAttrs(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fidv1_features", &wanted_.fidv1_slots));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fidv2_features", &fidv2_features));
    OP_REQUIRES_OK(ctx, CheckSlots(wanted_.fidv1_slots));
    const int64_t num_v1 = static_cast<int64_t>(wanted_.fidv1_slots.size());
    OP_REQUIRES_OK(ctx, CheckEqual("number of fidv1_features and fidv2_features",
                                   num_v1 + static_cast<int64_t>(fidv2_features.size()),
                                   "number of sparse names", spec_.num_sparse));
    converts_v1_ = !fidv2_features.empty();
    wanted_.names = fidv2_features;
    for (int64_t i = spec_.num_sparse; i < spec_.num_columns(); ++i) {
      wanted_.names.push_back(spec_.columns[i].name);
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    Tensor input = ctx->input(0);
    if (returns_protos) {
      if (input.dtype() == DT_STRING) {
        OP_REQUIRES_OK(ctx,
                       StringsToVariants<Instance>("pb_input", Tensor(input), parallel, &input));
      }
      ctx->set_output(ctx->num_outputs() - 1, input);
    }
    SampleBatch<Instance> batch;
    OP_REQUIRES_OK(ctx, batch.Load("pb_input", input, parallel));
    const InstanceTable table(batch, wanted_, parallel);
    const int64_t num_v1 = static_cast<int64_t>(wanted_.fidv1_slots.size());
    for (int64_t i = 0; i < spec_.num_columns(); ++i) {
      const ParseSpec::Column& column = spec_.columns[i];
      if (column.kind == ParseSpec::Kind::kSparse) {
        const auto rows = i < num_v1 ? table.FidV1Rows(i) : table.FidV2Rows(i - num_v1);
        OP_REQUIRES_OK(ctx, WriteSparseColumn(ctx, i, spec_.num_columns() + i, rows, /*repeat=*/0,
                                              converts_v1_));
      } else if (column.kind == ParseSpec::Kind::kDense) {
        OP_REQUIRES_OK(
            ctx, WriteDenseColumn(ctx, column, i, batch.size(),
                                  InstanceDenseRow(table, i - num_v1, column.width), parallel));
      } else {
        OP_REQUIRES_OK(ctx, WriteMiscColumn(ctx, column, i, batch, parallel));
      }
    }
  }

 private:
  ParseSpec spec_;
  InstanceColumns wanted_;
  bool converts_v1_;
};

REGISTER_GUARDED_KERNEL(Name("ParseInstances").Device(DEVICE_CPU), ParseInstancesOp<false>);
REGISTER_GUARDED_KERNEL(Name("ParseInstancesV2").Device(DEVICE_CPU), ParseInstancesOp<true>);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
