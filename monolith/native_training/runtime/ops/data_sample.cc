#include "monolith/native_training/runtime/ops/data_sample.h"

#include <string_view>

#include "tensorflow/core/framework/variant_op_registry.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::FeatureRows;
using ::monolith::io::proto::NamedFeature;
using ::monolith::io::proto::NamedFeatureList;

REGISTER_UNARY_VARIANT_DECODE_FUNCTION(SampleVariant<Instance>,
                                       SampleTraits<Instance>::kVariantName);
REGISTER_UNARY_VARIANT_DECODE_FUNCTION(SampleVariant<Example>, SampleTraits<Example>::kVariantName);
REGISTER_UNARY_VARIANT_DECODE_FUNCTION(SampleVariant<ExampleBatch>,
                                       SampleTraits<ExampleBatch>::kVariantName);

Status ParseSampleType(std::string_view attr, const std::string& name, SampleType* type) {
  if (name == "instance") {
    *type = SampleType::kInstance;
  } else if (name == "example") {
    *type = SampleType::kExample;
  } else if (name == "example_batch" || name == "examplebatch") {
    *type = SampleType::kExampleBatch;
  } else {
    return errors::InvalidArgument(attr, " is '", name,
                                   "', want instance, example or example_batch");
  }
  return OkStatus();
}

Status ExtendExample(Example* example) {
  for (const NamedFeature& named : example->named_feature()) {
    const ExampleFeature& feature = named.feature();
    if (named.name() == kLineIdName) {
      if (feature.bytes_list().value_size() == 0) continue;
      if (!example->mutable_line_id()->ParseFromString(feature.bytes_list().value(0))) {
        return errors::InvalidArgument("Failed to parse the LineId in feature ", kLineIdName);
      }
    } else if (named.name() == kLabelName) {
      example->mutable_label()->MergeFrom(feature.float_list().value());
    } else if (named.name() == kWeightName) {
      const auto& list = feature.float_list();
      example->set_instance_weight(list.value_size() > 0 ? list.value(0) : 1.0f);
    }
  }
  return OkStatus();
}

Status AppendFids(std::string_view name, const ExampleFeature* feature, FeatureRows* rows) {
  if (feature == nullptr) return OkStatus();
  const auto append = [rows](const ::monolith::io::proto::FidList& list, bool is_v1) {
    rows->spans.push_back({list.value().data(), list.value_size(), is_v1});
  };
  switch (feature->type_case()) {
    case ExampleFeature::TYPE_NOT_SET:
      break;
    case ExampleFeature::kFidV1List:
      append(feature->fid_v1_list(), true);
      break;
    case ExampleFeature::kFidV2List:
      append(feature->fid_v2_list(), false);
      break;
    case ExampleFeature::kFidV1Lists:
      for (const auto& list : feature->fid_v1_lists().list()) append(list, true);
      break;
    case ExampleFeature::kFidV2Lists:
      for (const auto& list : feature->fid_v2_lists().list()) append(list, false);
      break;
    default:
      return errors::InvalidArgument("sparse feature '", name, "' holds field ",
                                     static_cast<int>(feature->type_case()),
                                     " of Feature, want a list of fids");
  }
  return OkStatus();
}

Status CheckColumn(const ExampleBatch& batch, const NamedFeatureList& column) {
  if (IsShared(column) ? column.feature_size() >= 1 || batch.batch_size() == 0
                       : column.feature_size() == batch.batch_size()) {
    return OkStatus();
  }
  return errors::OutOfRange("ExampleBatch batch_size should be equal to named_feature size, but ",
                            column.name(), " has ", column.feature_size(),
                            IsShared(column) ? " shared values" : " values", " and batch_size is ",
                            batch.batch_size());
}

}  // namespace monolith_tf
}  // namespace tensorflow
