#include "monolith/native_training/runtime/ops/data/samples/sample.h"

#include <algorithm>
#include <string_view>

#include "tensorflow/core/framework/variant_op_registry.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::FeatureRows;
using ::monolith::io::proto::NamedFeature;
using ::monolith::io::proto::NamedFeatureList;

namespace {

// Rows that a batch may have although nothing in it is that long.
constexpr int64_t kUnprovenRows = 4096;
constexpr int64_t kMaxExpandedBytes = int64_t{1} << 30;

}  // namespace

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

Status GetRowType(OpKernelConstruction* ctx, SampleType* type) {
  std::string name;
  TF_RETURN_IF_ERROR(ctx->GetAttr("variant_type", &name));
  TF_RETURN_IF_ERROR(ParseSampleType("variant_type", name, type));
  if (*type != SampleType::kExampleBatch) return OkStatus();
  return errors::InvalidArgument("variant_type is '", name, "', want instance or example");
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

Status CheckBatchSize(const ExampleBatch& batch) {
  if (batch.batch_size() < 0) {
    return errors::InvalidArgument("batch_size of the ExampleBatch is ", batch.batch_size(),
                                   ", want 0 or more");
  }
  if (batch.batch_size() <= kUnprovenRows) return OkStatus();
  for (const NamedFeatureList& column : batch.named_feature_list()) {
    if (!IsShared(column) && column.feature_size() == batch.batch_size()) return OkStatus();
  }
  const int64_t bytes = static_cast<int64_t>(batch.ByteSizeLong());
  if (batch.batch_size() <= bytes) return OkStatus();
  return errors::InvalidArgument("batch_size of the ExampleBatch is ", batch.batch_size(),
                                 ", but no column has that many values and all of it are ", bytes,
                                 " bytes");
}

Status CheckExpandedSize(const ExampleBatch& batch) {
  TF_RETURN_IF_ERROR(CheckBatchSize(batch));
  int64_t shared_bytes = 0;
  for (const NamedFeatureList& column : batch.named_feature_list()) {
    if (IsShared(column)) shared_bytes += static_cast<int64_t>(column.ByteSizeLong());
  }
  if (shared_bytes <= kMaxExpandedBytes / std::max(1, batch.batch_size())) return OkStatus();
  return errors::InvalidArgument(
      "Each of the ", batch.batch_size(), " rows of the ExampleBatch has ", shared_bytes,
      " bytes of shared features, want at most ", kMaxExpandedBytes, " bytes together");
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
