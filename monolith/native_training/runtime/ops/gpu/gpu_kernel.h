// Helps GPU kernels: the stream, the workspace of a call, outputs in one allocation, and
// errors that only the device can see.
//
// These kernels are plain C++: they hand pointers and a stream to libmonolith_cuda.so. A kernel
// checks what the host knows (shapes, sizes, attributes) as its CPU twin does. Values that lie on
// the device are checked there; such a kernel is a CheckedGpuKernel, which ends when the device has
// told that all is well. If not, the values are copied back and given to the CPU twin's check, so
// that the message is the same.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_KERNEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_KERNEL_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/gpu/gpu_library.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {

// Unlike Tensor::flat this does not demand alignment, which kernels look after themselves.
inline const float* Floats(const Tensor& tensor) {
  return static_cast<const float*>(tensor.data());
}
inline float* MutableFloats(const Tensor& tensor) { return static_cast<float*>(tensor.data()); }

inline const int64_t* DeviceIds(const Tensor& tensor) {
  return static_cast<const int64_t*>(tensor.data());
}

// One run of a kernel.
class GpuCall {
 public:
  // FailedPrecondition: the library is missing, or the op does not run on a CUDA device.
  Status Init(OpKernelContext* ctx);

  const GpuLibrary& library() const { return *library_; }
  void* stream() const { return stream_; }

  // A call without a workspace.
  Status Check(int code) const { return GpuStatus(*library_, code); }

  // Runs call(workspace, &bytes) the two times it takes.
  Status Run(const std::function<int(void*, int64_t*)>& call);

  // Copies device memory to the host now; for the way of errors.
  Status ReadNow(const void* from, void* to, int64_t bytes) const {
    return Check(library_->read_now(from, to, bytes));
  }
  template <typename T>
  Status ReadNow(const T* from, int64_t count, std::vector<T>* to) const {
    to->resize(count);
    return ReadNow(from, to->data(), count * static_cast<int64_t>(sizeof(T)));
  }

  // Copies to the host when the stream has come so far, and waits for that.
  Status ReadInOrder(const void* from, void* to, int64_t bytes) const;

  // Copies `bytes` to the host memory of `to` in the order of the stream, then calls `then` from
  // another thread.
  Status ReadThen(const void* from, const Tensor& to, int64_t bytes, std::function<void()> then);

  OpKernelContext* ctx() const { return ctx_; }
  const Tensor& workspace() const { return workspace_; }

 private:
  OpKernelContext* ctx_ = nullptr;
  const GpuLibrary* library_ = nullptr;
  void* stream_ = nullptr;
  Tensor workspace_;
};

// Sets outputs 0 ... shapes.size() - 1 to slices of one new float buffer, which start on 64-byte
// boundaries: offsets, in floats, are those of MonolithAlignedFlatConcat. Hundreds of allocations
// would take longer than the work.
Status AllocateSlices(OpKernelContext* ctx, const std::vector<TensorShape>& shapes, Tensor* whole,
                      std::vector<int64_t>* offsets);
// The same for the outputs of these numbers, one for each shape.
Status AllocateSlices(OpKernelContext* ctx, const std::vector<int>& outputs,
                      const std::vector<TensorShape>& shapes, Tensor* whole,
                      std::vector<int64_t>* offsets);

// A kernel whose arguments the host can check.
class GpuKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override;

 protected:
  virtual Status Launch(OpKernelContext* ctx, GpuCall* call) = 0;
};

// A kernel some of whose arguments the device checks.
class CheckedGpuKernel : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) final;

 protected:
  // Says what is wrong, by looking at the values on the device. It runs when they are complete, and
  // only if the device found something.
  using Describe = std::function<Status(const GpuCall&)>;

  virtual Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) = 0;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_KERNEL_H_
