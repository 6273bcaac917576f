// FeatureHash: numbers and text of Examples become ids.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/city_hash.h"
#include "monolith/native_training/runtime/data/fid_hash.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::MakeFidV2;
using ::monolith::io::proto::FidList;
using ::monolith::io::proto::NamedFeature;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

REGISTER_OP("FeatureHash")
    .Input("input: variant")
    .Output("output: variant")
    .Attr("names: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      c->set_output(0, vector);
      return OkStatus();
    })
    .Doc(R"doc(
Hashes integers and text of the features of that name to v2 ids of their slot.

A number becomes the id that ExtractFid makes of it, text the CityHash64 of its bytes. Ids, features
without a value, and all other features stay.

input: Examples, a vector.
names: features to hash. The field `id` of a feature is its slot.
)doc");

class FeatureHashOp : public OpKernel {
 public:
  explicit FeatureHashOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> names;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names));
    names_.insert(names.begin(), names.end());
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& input = ctx->input(0);
    OP_REQUIRES(ctx, input.dims() == 1,
                errors::InvalidArgument("input has shape ", input.shape().DebugString(),
                                        ", want a vector"));
    const auto samples = input.vec<Variant>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, input.shape(), &output));
    auto out = output->vec<Variant>();
    for (int64_t i = 0; i < samples.size(); ++i) {
      const Example* example;
      OP_REQUIRES_OK(ctx, GetSample<Example>(samples(i), &example));
      Example changed = *example;
      for (NamedFeature& named : *changed.mutable_named_feature()) {
        if (names_.contains(named.name())) OP_REQUIRES_OK(ctx, Hash(&named));
      }
      out(i) = SampleVariant<Example>(std::move(changed));
    }
  }

 private:
  static Status Hash(NamedFeature* named) {
    ExampleFeature* feature = named->mutable_feature();
    const int64_t slot = named->id();
    FidList fids;
    switch (feature->type_case()) {
      case ExampleFeature::kFidV1List:
      case ExampleFeature::kFidV2List:
      case ExampleFeature::TYPE_NOT_SET:
        return OkStatus();
      case ExampleFeature::kInt64List:
        TF_RETURN_IF_ERROR(CheckSlot(*named));
        for (const int64_t number : feature->int64_list().value()) {
          const uint64_t hash = ::monolith::data::HashNumber(static_cast<uint64_t>(number));
          fids.add_value(MakeFidV2(slot, hash));
        }
        break;
      case ExampleFeature::kBytesList:
        TF_RETURN_IF_ERROR(CheckSlot(*named));
        for (const std::string& text : feature->bytes_list().value()) {
          fids.add_value(MakeFidV2(slot, ::monolith::data::CityHash64(text)));
        }
        break;
      default:
        return errors::InvalidArgument("feature '", named->name(),
                                       "' holds neither integers nor text, so it has no hash");
    }
    *feature->mutable_fid_v2_list() = std::move(fids);
    return OkStatus();
  }

  static Status CheckSlot(const NamedFeature& named) {
    if (named.id() > 0 && named.id() < ::monolith::engine::kMaxSlotsV2) return OkStatus();
    return errors::InvalidArgument("the id of feature '", named.name(), "' is ", named.id(),
                                   ", want a slot from 1 to ", ::monolith::engine::kMaxSlotsV2 - 1);
  }

  absl::flat_hash_set<std::string> names_;
};

REGISTER_GUARDED_KERNEL(Name("FeatureHash").Device(DEVICE_CPU), FeatureHashOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
