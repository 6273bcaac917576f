// Kernels on the handles of groups, for groups wherever they live.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_GROUP_HANDLE_KERNELS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_GROUP_HANDLE_KERNELS_H_

#include <string>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tensorflow {
namespace monolith_tf {

// Reads the input of that name.
inline Status ParseGroupConfig(const Tensor& input,
                               ::monolith::hash_table::MultiEmbeddingHashTableConfig* config) {
  TF_RETURN_IF_ERROR(CheckScalar("config", input));
  const auto bytes_scalar = input.scalar<tstring>();
  const tstring& bytes = bytes_scalar();
  if (config->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return OkStatus();
  return errors::InvalidArgument(
      "Unable to parse config. Make sure it is serialized version of "
      "MultiEmbeddingHashTableConfig.");
}

template <typename Group>
class ReadGroupOp : public OpKernel {
 public:
  explicit ReadGroupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &name_));
    if (name_.empty()) name_ = name();
  }

  void Compute(OpKernelContext* ctx) override {
    const std::string& container =
        container_.empty() ? ctx->resource_manager()->default_container() : container_;
    OP_REQUIRES_OK(ctx,
                   MakeResourceHandleToOutput(ctx, 0, container, name_, TypeIndex::Make<Group>()));
  }

 private:
  std::string container_;
  std::string name_;
};

template <typename Group, typename Table>
class IsInitializedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("handle", ctx->input(0)));
    const ResourceHandle& handle = HandleFromInput(ctx, 0);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &out));
    out->scalar<bool>()() = Exists<Group>(ctx, handle) || Exists<Table>(ctx, handle);
  }

 private:
  template <typename T>
  static bool Exists(OpKernelContext* ctx, const ResourceHandle& handle) {
    T* resource = nullptr;
    if (!ctx->resource_manager()->Lookup(handle.container(), handle.name(), &resource).ok()) {
      return false;
    }
    resource->Unref();
    return true;
  }
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_GROUP_HANDLE_KERNELS_H_
