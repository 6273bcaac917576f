// The variables of a dense optimizer op, locked for one step.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_LOCKED_VARIABLES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_LOCKED_VARIABLES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {

// The variables an optimizer writes, locked for its whole step so that the step is atomic.
class LockedVariables {
 public:
  // Looks up inputs [0, names.size()) and locks them in the order of their mutexes' addresses.
  Status Lock(OpKernelContext* ctx, const std::vector<const char*>& names) {
    variables_.resize(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const Status status = LookupHandleInput(ctx, static_cast<int>(i), names[i], &variables_[i]);
      // A variable exists from its initialization until it is destroyed.
      if (errors::IsNotFound(status)) return Uninitialized(ctx, i);
      TF_RETURN_IF_ERROR(status);
      for (size_t j = 0; j < i; ++j) {
        if (variables_[i].get() != variables_[j].get()) continue;
        return errors::InvalidArgument(names[i], " and ", names[j], " are the same variable");
      }
    }
    std::vector<mutex*> mutexes;
    for (const auto& variable : variables_) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end(), std::less<mutex*>());
    for (mutex* mu : mutexes) locks_.push_back(std::make_unique<mutex_lock>(*mu));
    return OkStatus();
  }

  Status Check(OpKernelContext* ctx, const std::vector<const char*>& names, const Tensor& grad) {
    for (size_t i = 0; i < names.size(); ++i) {
      if (!variables_[i]->is_initialized || !variables_[i]->tensor()->IsInitialized()) {
        return Uninitialized(ctx, i);
      }
      const DataType dtype = variables_[i]->tensor()->dtype();
      if (dtype != DT_FLOAT) {
        return errors::InvalidArgument(names[i], " has dtype ", DataTypeString(dtype),
                                       ", want float");
      }
    }
    for (size_t i = 1; i < names.size(); ++i) {
      TF_RETURN_IF_ERROR(SameShapeAsVar(names[i], *variables_[i]->tensor()));
    }
    return SameShapeAsVar("grad", grad);
  }

  const float* values(int i) { return variables_[i]->tensor()->flat<float>().data(); }

  // Copies a buffer that readers still hold, so that what they see does not change.
  Status MutableValues(OpKernelContext* ctx, int i, float** values) {
    return MutableValues(
        ctx, i,
        [](const void* from, void* to, int64_t bytes) {
          std::memcpy(to, from, bytes);
          return OkStatus();
        },
        values);
  }

  // The same where memcpy(const void* from, void* to, int64_t bytes) cannot reach: copy_bytes does.
  template <typename CopyBytes>
  Status MutableValues(OpKernelContext* ctx, int i, const CopyBytes& copy_bytes, float** values) {
    Tensor* tensor = variables_[i]->tensor();
    if (!tensor->RefCountIsOne()) {
      Tensor copy;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_FLOAT, tensor->shape(), &copy));
      const int64_t bytes = static_cast<int64_t>(tensor->TotalBytes());
      if (bytes > 0) TF_RETURN_IF_ERROR(copy_bytes(tensor->data(), copy.data(), bytes));
      *tensor = copy;
    }
    *values = tensor->flat<float>().data();
    return OkStatus();
  }

 private:
  static Status Uninitialized(OpKernelContext* ctx, size_t i) {
    return errors::FailedPrecondition("Attempting to use uninitialized variables: ",
                                      ctx->op_kernel().requested_input(static_cast<int>(i)));
  }

  Status SameShapeAsVar(const char* name, const Tensor& tensor) {
    const Tensor& var = *variables_[0]->tensor();
    if (var.shape() == tensor.shape()) return OkStatus();
    return errors::InvalidArgument("var and ", name, " do not have the same shape",
                                   var.shape().DebugString(), " ", tensor.shape().DebugString());
  }

  // Declared before the locks, which point into the variables and must be released first.
  std::vector<core::RefCountPtr<Var>> variables_;
  std::vector<std::unique_ptr<mutex_lock>> locks_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_LOCKED_VARIABLES_H_
