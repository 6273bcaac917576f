// Kernels that find or create a resource by (container, shared_name) from their inputs.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_NAMED_RESOURCE_OP_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_NAMED_RESOURCE_OP_H_

#include <string>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tensorflow {
namespace monolith_tf {

// ResourceOpKernel of TensorFlow creates its resource without inputs; this one hands them over. The
// first run creates, later runs and other nodes of the same name find it.
template <typename T>
class NamedResourceOp : public OpKernel {
 public:
  explicit NamedResourceOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  ~NamedResourceOp() override {
    if (initialized_ && cinfo_.resource_is_private_to_kernel()) {
      cinfo_.resource_manager()
          ->template Delete<T>(cinfo_.container(), cinfo_.name())
          .IgnoreError();
    }
  }

  void Compute(OpKernelContext* ctx) override {
    mutex_lock lock(mu_);
    if (!initialized_) {
      OP_REQUIRES_OK(ctx, cinfo_.Init(ctx->resource_manager(), def(),
                                      /*use_node_name_as_default=*/true));
      handle_ = Tensor(DT_RESOURCE, TensorShape({}));
      handle_.scalar<ResourceHandle>()() =
          MakeResourceHandle<T>(ctx, cinfo_.container(), cinfo_.name());
      initialized_ = true;
    }
    OP_REQUIRES_OK(ctx, FindOrCreate(ctx));
    ctx->set_output(0, handle_);
  }

 protected:
  // Returns a new resource with one reference.
  virtual Status Create(OpKernelContext* ctx, const std::string& name, T** resource) = 0;

 private:
  // Not ResourceMgr::LookupOrCreate: it holds its lock while it creates, and creating looks up what
  // the resource depends on. Of two nodes that create at the same time the slower one gives way.
  Status FindOrCreate(OpKernelContext* ctx) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    ResourceMgr* const manager = cinfo_.resource_manager();
    T* found = nullptr;
    Status status = manager->Lookup(cinfo_.container(), cinfo_.name(), &found);
    if (status.ok()) found->Unref();
    if (!errors::IsNotFound(status)) return status;
    T* created = nullptr;
    TF_RETURN_IF_ERROR(Create(ctx, cinfo_.name(), &created));
    status = manager->Create(cinfo_.container(), cinfo_.name(), created);
    return errors::IsAlreadyExists(status) ? OkStatus() : status;
  }

  mutex mu_;
  ContainerInfo cinfo_;
  Tensor handle_ TF_GUARDED_BY(mu_);  // made once: a step runs this op for every table
  bool initialized_ TF_GUARDED_BY(mu_) = false;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_NAMED_RESOURCE_OP_H_
