// How kernels of this library get from a handle input to the object behind it.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_RESOURCE_HANDLE_INPUT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_RESOURCE_HANDLE_INPUT_H_

#include <string_view>

#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {

// Errors name the input. InvalidArgument: it is no scalar handle, or of another kind of resource.
// NotFound: the resource was destroyed.
template <typename T>
Status LookupHandleInput(OpKernelContext* ctx, int input, std::string_view name,
                         core::RefCountPtr<T>* resource) {
  TF_RETURN_IF_ERROR(CheckScalar(name, ctx->input(input)));
  const Status status = LookupResource(ctx, HandleFromInput(ctx, input), resource);
  if (status.ok()) return status;
  return Status(status.code(), strings::StrCat(name, ": ", status.message()));
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_RESOURCE_HANDLE_INPUT_H_
