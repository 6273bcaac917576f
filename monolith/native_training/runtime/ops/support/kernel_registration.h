// How every kernel of this library is registered:
//
//   REGISTER_GUARDED_KERNEL(Name("MonolithReduceSum").Device(DEVICE_CPU), ReduceSumOp);
//
// TensorFlow's threads end the process at the first exception that reaches them. The standard
// library throws when memory runs out or a size is beyond all bounds, and what a caller asks for
// decides about both, so here exceptions become the error of the op. Work that a kernel hands to
// other threads has to bring its exceptions back (DeviceRunner does) or to be run by
// `CatchExceptions`.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_KERNEL_REGISTRATION_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_KERNEL_REGISTRATION_H_

#include <type_traits>

#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {

namespace data {
class DatasetOpKernel;
}  // namespace data

namespace monolith_tf {

// A kernel whose exceptions end its op, not the process.
template <typename Kernel>
class GuardedKernel final : public Kernel {
 public:
  using Kernel::Kernel;

  void Compute(OpKernelContext* ctx) override {
    const Status status = CatchExceptions([&] {
      Kernel::Compute(ctx);
      return OkStatus();
    });
    if (!status.ok()) ctx->CtxFailure(__FILE__, __LINE__, status);
  }
};

// Those of the other kinds finish elsewhere, and catch there.
template <typename Kernel>
inline constexpr bool kComputesInPlace =
    !std::is_base_of_v<AsyncOpKernel, Kernel> && !std::is_base_of_v<data::DatasetOpKernel, Kernel>;

template <typename Kernel>
OpKernel* CreateGuardedKernel(OpKernelConstruction* ctx) {
  OpKernel* kernel = nullptr;
  const Status status = CatchExceptions([&] {
    if constexpr (kComputesInPlace<Kernel>) {
      kernel = new GuardedKernel<Kernel>(ctx);
    } else {
      kernel = new Kernel(ctx);
    }
    return OkStatus();
  });
  if (!status.ok()) ctx->CtxFailure(__FILE__, __LINE__, status);
  return kernel;
}

}  // namespace monolith_tf
}  // namespace tensorflow

#define REGISTER_GUARDED_KERNEL_AS(variable, kernel_builder, ...)          \
  static const ::tensorflow::kernel_factory::OpKernelRegistrar variable(   \
      ::tensorflow::register_kernel::kernel_builder.Build(), #__VA_ARGS__, \
      ::tensorflow::monolith_tf::CreateGuardedKernel<__VA_ARGS__>)
#define REGISTER_GUARDED_KERNEL_COUNTED(counter, kernel_builder, ...) \
  REGISTER_GUARDED_KERNEL_AS(guarded_kernel_##counter, kernel_builder, __VA_ARGS__)
#define REGISTER_GUARDED_KERNEL_EXPANDED(counter, kernel_builder, ...) \
  REGISTER_GUARDED_KERNEL_COUNTED(counter, kernel_builder, __VA_ARGS__)
#define REGISTER_GUARDED_KERNEL(kernel_builder, ...) \
  REGISTER_GUARDED_KERNEL_EXPANDED(__COUNTER__, kernel_builder, __VA_ARGS__)

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_KERNEL_REGISTRATION_H_
