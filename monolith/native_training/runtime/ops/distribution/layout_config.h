// From the serialized FeatureConfigs attribute of the fused layout ops to the engine's plan.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_CONFIG_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_CONFIG_H_

#include <string>

#include "monolith/native_training/runtime/distribution/layout_plan.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// InvalidArgument if `feature_cfgs` is no FeatureConfigs proto or contradicts itself.
Status ParseLayoutPlan(const std::string& feature_cfgs, ::monolith::distribution::LayoutPlan* plan);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_CONFIG_H_
