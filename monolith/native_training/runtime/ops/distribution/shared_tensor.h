// A tensor that several ops of one step write into before it is handed out as an ordinary tensor.
//
// The resource belongs to its handle: it dies with the last tensor that holds the handle, so at the
// latest with the step, whether or not it was finalized, and a loop iteration gets a buffer of
// its own.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_SHARED_TENSOR_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_SHARED_TENSOR_H_

#include <string>
#include <utility>

#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"
#include "tensorflow/core/platform/thread_annotations.h"

namespace tensorflow {
namespace monolith_tf {

// Thread-safe. Writers of disjoint parts of the tensor need no further lock.
class SharedTensor : public ResourceBase {
 public:
  explicit SharedTensor(Tensor tensor) : tensor_(std::move(tensor)) {}

  // A second reference to the same memory.
  Status Get(Tensor* tensor) const {
    mutex_lock lock(mutex_);
    if (taken_) return Taken();
    *tensor = tensor_;
    return OkStatus();
  }

  // Gives the tensor away; from then on the resource counts as deleted.
  Status Take(Tensor* tensor) {
    mutex_lock lock(mutex_);
    if (taken_) return Taken();
    taken_ = true;
    *tensor = std::move(tensor_);
    tensor_ = Tensor();
    return OkStatus();
  }

  std::string DebugString() const override { return "shared tensor"; }

 private:
  static Status Taken() {
    return errors::NotFound("The shared tensor was finalized; it cannot be used any more.");
  }

  mutable mutex mutex_;
  Tensor tensor_ TF_GUARDED_BY(mutex_);
  bool taken_ TF_GUARDED_BY(mutex_) = false;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_SHARED_TENSOR_H_
