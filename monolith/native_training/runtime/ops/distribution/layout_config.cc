#include "monolith/native_training/runtime/ops/distribution/layout_config.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "idl/matrix/proto/example.pb.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace idl = ::monolith::io::proto;
using ::monolith::distribution::LayoutConfig;
using ::monolith::distribution::LayoutFeatureConfig;
using ::monolith::distribution::LayoutOutConfig;
using ::monolith::distribution::LayoutPlan;
using ::monolith::distribution::OutType;
using ::monolith::distribution::Pooling;

Status ConvertPooling(const std::string& name, int pooling_type, Pooling* pooling) {
  switch (pooling_type) {
    case idl::PoolingType::SUM:
      *pooling = Pooling::kSum;
      return OkStatus();
    case idl::PoolingType::MEAN:
      *pooling = Pooling::kMean;
      return OkStatus();
    case idl::PoolingType::FIRSTN:
      *pooling = Pooling::kFirstN;
      return OkStatus();
    default:
      return errors::InvalidArgument("pooling_type of feature '", name, "' is ", pooling_type,
                                     ", want SUM (0), MEAN (1) or FIRSTN (3)");
  }
}

Status ConvertOutType(const std::string& name, int out_type, OutType* type) {
  switch (out_type) {
    case idl::OutType::CONCAT:
      *type = OutType::kConcat;
      return OkStatus();
    case idl::OutType::STACK:
      *type = OutType::kStack;
      return OkStatus();
    case idl::OutType::ADDN:
      *type = OutType::kAddN;
      return OkStatus();
    case idl::OutType::NONE:
      *type = OutType::kNone;
      return OkStatus();
    default:
      return errors::InvalidArgument("out_type of layout '", name, "' is ", out_type,
                                     ", want CONCAT (0), STACK (1), ADDN (2) or NONE (3)");
  }
}

Status Convert(const idl::FeatureConfigs& proto, LayoutConfig* config) {
  for (const auto& [name, feature] : proto.feature_configs()) {
    LayoutFeatureConfig& to = config->features[name];
    to.table = feature.table();
    to.max_sequence_length = feature.max_sequence_length();
    TF_RETURN_IF_ERROR(ConvertPooling(name, feature.pooling_type(), &to.pooling));
    for (const int64_t dim : feature.slice_dims()) {
      if (dim <= 0) {
        return errors::InvalidArgument("slice_dims of feature '", name, "' hold ", dim,
                                       ", want values above 0");
      }
      to.width += dim;
    }
  }
  for (const auto& [name, out] : proto.out_configs()) {
    LayoutOutConfig& to = config->outs[name];
    TF_RETURN_IF_ERROR(ConvertOutType(name, out.out_type(), &to.type));
    for (const auto& slice : out.slice_configs()) {
      to.slices.push_back({slice.feature_name(), slice.start(), slice.end()});
    }
    for (const auto& shape : out.shape()) {
      to.shapes.emplace_back(shape.dims().begin(), shape.dims().end());
    }
  }
  return OkStatus();
}

}  // namespace

Status ParseLayoutPlan(const std::string& feature_cfgs, LayoutPlan* plan) {
  idl::FeatureConfigs proto;
  if (!proto.ParseFromString(feature_cfgs)) {
    return errors::InvalidArgument("feature_cfgs (", feature_cfgs.size(),
                                   " bytes) is no serialized FeatureConfigs");
  }
  LayoutConfig config;
  TF_RETURN_IF_ERROR(Convert(proto, &config));
  const std::string error = plan->Build(config);
  if (error.empty()) return OkStatus();
  return errors::InvalidArgument("feature_cfgs: ", error);
}

}  // namespace monolith_tf
}  // namespace tensorflow
