// The item pool as a resource, and its files.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ITEM_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ITEM_POOL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "idl/matrix/proto/example.pb.h"
#include "monolith/native_training/runtime/data/item_pool.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {

// Item-side features of a sample: ids of an Instance, features of an Example.
using CachedItem = std::shared_ptr<const ::monolith::io::proto::FeatureData>;
using CachedItemPool = ::monolith::data::ItemPool<CachedItem>;

class ItemPoolResource final : public ResourceBase {
 public:
  ItemPoolResource(int64_t start_num, int64_t max_item_num_per_channel)
      : pool_(start_num, max_item_num_per_channel) {}

  CachedItemPool* pool() { return &pool_; }

  std::string DebugString() const override {
    return strings::StrCat("item pool, at most ", pool_.capacity(), " items per channel");
  }

 private:
  CachedItemPool pool_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ITEM_POOL_H_
