// An engine's LayoutPlan in the form of the C interface.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_PLAN_VIEW_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_PLAN_VIEW_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/distribution/layout_plan.h"
#include "monolith/native_training/runtime/gpu/c_api.h"

namespace monolith {
namespace gpu {

class LayoutPlanView {
 public:
  explicit LayoutPlanView(const distribution::LayoutPlan& plan) {
    for (const auto& feature : plan.features()) {
      features_.push_back({feature.width, feature.positions,
                           static_cast<int64_t>(feature.targets.size()),
                           feature.pooling == distribution::Pooling::kMean,
                           feature.pooling == distribution::Pooling::kFirstN});
      for (const auto& target : feature.targets) {
        targets_.push_back(
            {target.output, target.column, target.step, target.start, target.width, target.add});
      }
    }
    for (const auto& output : plan.outputs()) row_sizes_.push_back(output.row_size);
  }

  // Valid as long as this is.
  MonoGpuLayoutPlan plan() const {
    return {features_.data(), targets_.data(), row_sizes_.data(),
            static_cast<int64_t>(features_.size()), static_cast<int64_t>(row_sizes_.size())};
  }

 private:
  std::vector<MonoGpuLayoutFeature> features_;
  std::vector<MonoGpuLayoutTarget> targets_;
  std::vector<int64_t> row_sizes_;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_PLAN_VIEW_H_
