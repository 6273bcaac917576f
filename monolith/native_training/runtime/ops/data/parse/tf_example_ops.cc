// MonolithTFExampleToExample: tf.train.Example to the library's own format.
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/data/data_op_config.pb.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/example/example.pb.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::MakeFidV2;
using ::monolith::native_training::data::config::TFRecordFeatureDescription;

REGISTER_OP("MonolithTFExampleToExample")
    .Input("serialized: string")
    .Output("example: variant")
    .Attr("feature_description: string")
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Converts a serialized tf.train.Example, a scalar.

feature_description: serialized TFRecordFeatureDescription; other features are dropped.
)doc");

class TFExampleToExampleOp : public OpKernel {
 public:
  explicit TFExampleToExampleOp(OpKernelConstruction *ctx) : OpKernel(ctx) {
    std::string serialized;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_description", &serialized));
    OP_REQUIRES(ctx, description_.ParseFromString(serialized),
                errors::InvalidArgument("feature_description is not a serialized "
                                        "TFRecordFeatureDescription"));
  }

  void Compute(OpKernelContext *ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("serialized", ctx->input(0)));
    const tstring *const bytes = ctx->input(0).scalar<tstring>().data();
    tensorflow::Example from;
    OP_REQUIRES(ctx, from.ParseFromArray(bytes->data(), static_cast<int>(bytes->size())),
                errors::DataLoss("Corrupted data!"));
    Example to;
    to.set_instance_weight(1.0f);
    const auto &features = from.features().feature();
    for (const auto &[name, slot] : description_.sparse_features()) {
      const auto it = features.find(name);
      if (it != features.end()) AddSparse(name, slot, it->second, &to);
    }
    for (const std::string &name : description_.dense_features()) {
      const auto it = features.find(name);
      if (it != features.end()) AddDense(name, it->second, &to);
    }
    const auto label = features.find(description_.label());
    if (label != features.end()) *to.mutable_label() = label->second.float_list().value();
    const auto weight = features.find(description_.instance_weight());
    if (weight != features.end() && weight->second.float_list().value_size() == 1) {
      to.set_instance_weight(weight->second.float_list().value(0));
    }
    ctx->set_output(0, MakeSampleTensor(std::move(to)));
  }

 private:
  static void AddSparse(const std::string &name, int32_t slot, const tensorflow::Feature &from,
                        Example *to) {
    auto *named = to->add_named_feature();
    named->set_name(name);
    named->set_id(slot);
    auto *fids = named->mutable_feature()->mutable_fid_v2_list();
    for (int64_t value : from.int64_list().value()) {
      fids->add_value(MakeFidV2(slot, static_cast<uint64_t>(value)));
    }
    for (float value : from.float_list().value()) {
      const float bucket = std::floor(std::log2(std::abs(value) + 1));
      // NaN and infinity have no bucket of their own.
      fids->add_value(MakeFidV2(slot, std::isfinite(bucket) ? static_cast<uint64_t>(bucket) : 0));
    }
  }

  static void AddDense(const std::string &name, const tensorflow::Feature &from, Example *to) {
    auto *named = to->add_named_feature();
    named->set_name(name);
    auto *feature = named->mutable_feature();
    switch (from.kind_case()) {
      case tensorflow::Feature::kInt64List:
        *feature->mutable_int64_list()->mutable_value() = from.int64_list().value();
        break;
      case tensorflow::Feature::kFloatList:
        *feature->mutable_float_list()->mutable_value() = from.float_list().value();
        break;
      case tensorflow::Feature::kBytesList:
        *feature->mutable_bytes_list()->mutable_value() = from.bytes_list().value();
        break;
      default:
        break;
    }
  }

  TFRecordFeatureDescription description_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithTFExampleToExample").Device(DEVICE_CPU),
                        TFExampleToExampleOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
