// Argument checks shared by every kernel. Each returns InvalidArgument with the argument's name and
// both values, so that a kernel can validate everything before it touches memory:
//
//   OP_REQUIRES_OK(ctx, CheckVector("ids", ids));
//   OP_REQUIRES_OK(ctx, CheckRowSplits("splits", splits.vec<int64_t>(), values.dim_size(0)));
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_CHECKS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_CHECKS_H_

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "monolith/native_training/runtime/ops/support/tensor_memory.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// More parameter servers than any cluster has; what is sized by their number stays harmless.
inline constexpr int64_t kMaxShards = 1 << 16;
// Lists that one op makes, such as one per table and server.
inline constexpr int64_t kMaxLists = 1 << 26;

// Views of the names stay as std::string_view: they are literals at every call site.
inline Status CheckRank(std::string_view name, const Tensor& tensor, int rank) {
  if (tensor.dims() == rank) return OkStatus();
  return errors::InvalidArgument(name, " has shape ", tensor.shape().DebugString(), ", want rank ",
                                 rank);
}

// The same while a graph is built.
inline Status ScalarInput(shape_inference::InferenceContext* c, int input) {
  shape_inference::ShapeHandle unused;
  return c->WithRank(c->input(input), 0, &unused);
}

inline Status CheckScalar(std::string_view name, const Tensor& tensor) {
  return CheckRank(name, tensor, 0);
}

inline Status CheckVector(std::string_view name, const Tensor& tensor) {
  return CheckRank(name, tensor, 1);
}

inline Status CheckMatrix(std::string_view name, const Tensor& tensor) {
  return CheckRank(name, tensor, 2);
}

// `what` names the quantity: CheckEqual("size of grads", 6, "size of ids * dim", 8).
inline Status CheckEqual(std::string_view what, int64_t value, std::string_view other_what,
                         int64_t other) {
  if (value == other) return OkStatus();
  return errors::InvalidArgument(what, " is ", value, ", want ", other_what, " = ", other);
}

// Counts come from attributes, tensors and messages, and memory is sized by them.
inline Status CheckCount(std::string_view name, int64_t count, int64_t low, int64_t high) {
  if (count >= low && count <= high) return OkStatus();
  return errors::InvalidArgument(name, " is ", count, ", want a value in [", low, ", ", high, "]");
}

inline Status CheckShards(std::string_view name, int64_t num_shards) {
  return CheckCount(name, num_shards, 1, kMaxShards);
}

// Files of one save, and how long it may wait at most to spread the load: an op that is asked for
// more does not come back before its caller gives up on it.
inline constexpr int64_t kMaxSavedFiles = 1024;
inline constexpr int64_t kMaxSaveDelayMs = 20000;

inline Status CheckSaveAttrs(int64_t nshards, int64_t random_sleep_ms) {
  if (nshards > kMaxSavedFiles) {
    return errors::InvalidArgument("nshards is ", nshards, ", want at most ", kMaxSavedFiles);
  }
  if (random_sleep_ms <= kMaxSaveDelayMs) return OkStatus();
  return errors::InvalidArgument("random_sleep_ms is ", random_sleep_ms, ", want at most ",
                                 kMaxSaveDelayMs);
}

// The product of two sizes, neither of which is negative. `what` names it.
inline Status MultiplySizes(std::string_view what, int64_t a, int64_t b, int64_t* product) {
  if (a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product)) return OkStatus();
  return errors::InvalidArgument(what, " is ", a, " * ", b,
                                 ", want sizes whose product is an int64");
}

// Allocates an output whose sizes were computed: TensorShape's constructors end the process where
// sizes are negative or their product is no int64, this returns InvalidArgument.
inline Status AllocateOutput(OpKernelContext* ctx, int64_t index,
                             std::initializer_list<int64_t> sizes, Tensor** output) {
  TensorShape shape;
  TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(sizes, &shape));
  return AllocateOutput(ctx, index, shape, output);
}

inline Status CheckSameShape(std::string_view name, const Tensor& tensor,
                             std::string_view other_name, const Tensor& other) {
  if (tensor.shape() == other.shape()) return OkStatus();
  return errors::InvalidArgument(name, " has shape ", tensor.shape().DebugString(),
                                 ", want that of ", other_name, ": ", other.shape().DebugString());
}

// Row splits start at 0, never decrease and, unless num_values is negative, end at num_values.
template <typename T>
Status CheckRowSplits(std::string_view name, const T* splits, int64_t size, int64_t num_values) {
  if (size < 1) return errors::InvalidArgument(name, " is empty, want at least one element");
  if (splits[0] != 0) {
    return errors::InvalidArgument(name, "[0] is ", splits[0], ", want 0");
  }
  for (int64_t i = 1; i < size; ++i) {
    if (splits[i] < splits[i - 1]) {
      return errors::InvalidArgument(name, " must not decrease, but ", name, "[", i,
                                     "] = ", splits[i], " follows ", splits[i - 1]);
    }
  }
  if (num_values >= 0 && static_cast<int64_t>(splits[size - 1]) != num_values) {
    return errors::InvalidArgument(name, " ends at ", splits[size - 1], ", want ", num_values,
                                   " values");
  }
  return OkStatus();
}

template <typename Vec>
Status CheckRowSplits(std::string_view name, const Vec& splits, int64_t num_values) {
  return CheckRowSplits(name, splits.data(), static_cast<int64_t>(splits.size()), num_values);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OP_CHECKS_H_
