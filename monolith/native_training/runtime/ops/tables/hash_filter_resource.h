// An occurrence filter as a resource.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_FILTER_RESOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_FILTER_RESOURCE_H_

#include <memory>
#include <string>
#include <utility>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "tensorflow/core/framework/resource_base.h"

namespace tensorflow {
namespace monolith_tf {

class HashFilterResource : public ResourceBase {
 public:
  // `sliding` equals `filter` if that is a sliding filter, the only kind with something to save.
  HashFilterResource(std::unique_ptr<::monolith::engine::OccurrenceFilter> filter,
                     ::monolith::engine::SlidingHashFilter* sliding)
      : filter_(std::move(filter)), sliding_(sliding) {}

  ::monolith::engine::OccurrenceFilter* filter() const { return filter_.get(); }
  ::monolith::engine::SlidingHashFilter* sliding() const { return sliding_; }

  std::string DebugString() const override {
    return sliding_ == nullptr
               ? "occurrence filter without memory"
               : "sliding occurrence filter of " + std::to_string(sliding_->Elements()) + " ids";
  }

 private:
  const std::unique_ptr<::monolith::engine::OccurrenceFilter> filter_;
  ::monolith::engine::SlidingHashFilter* const sliding_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_HASH_FILTER_RESOURCE_H_
