// Unique keys with the places of all their occurrences, and the shared buffer in which looked-up
// values are spread over those places.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/distribution/unique_offsets.h"
#include "monolith/native_training/runtime/ops/distribution/shared_tensor.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::UniqueOffsets;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

// Floats of one buffer: far beyond any memory, but sums of products stay inside int64.
constexpr int64_t kMaxFloats = int64_t{1} << 50;

Status CheckDims(const std::vector<int64_t>& dims) {
  if (dims.empty()) return errors::InvalidArgument("dims is empty, want one width per row");
  for (size_t r = 0; r < dims.size(); ++r) {
    if (dims[r] <= 0 || dims[r] > std::numeric_limits<int32_t>::max()) {
      return errors::InvalidArgument("dims[", r, "] is ", dims[r], ", want a value in [1, ",
                                     std::numeric_limits<int32_t>::max(), "]");
    }
  }
  return OkStatus();
}

// Floats of all values of a ragged tensor whose row r is dims[r] wide.
Status CountFloats(const char* name, const int64_t* splits, const std::vector<int64_t>& dims,
                   int64_t* floats) {
  *floats = 0;
  for (size_t r = 0; r < dims.size(); ++r) {
    const int64_t count = splits[r + 1] - splits[r];
    if (count > (kMaxFloats - *floats) / dims[r]) {
      return errors::InvalidArgument("row ", r, " of ", name, " has ", count, " values of width ",
                                     dims[r], ": too large");
    }
    *floats += count * dims[r];
  }
  return OkStatus();
}

// The arguments that FillWithOffsetMap and its gradient share, checked.
struct OffsetMap {
  const int64_t* pos = nullptr;
  const int64_t* pos_split = nullptr;
  const int64_t* offsets = nullptr;
  const int64_t* offset_splits = nullptr;
  int64_t num_pos = 0;
  int64_t num_keys = 0;
  int64_t num_floats = 0;       // of all pos entries
  bool keys_are_unique = true;  // no key twice in pos
  std::vector<int64_t> start;   // first float of each row's entries

  Status Read(const Tensor& pos_tensor, const Tensor& pos_split_tensor, const Tensor& map_tensor,
              const Tensor& map_split_tensor, const std::vector<int64_t>& dims) {
    TF_RETURN_IF_ERROR(CheckVector("pos", pos_tensor));
    TF_RETURN_IF_ERROR(CheckVector("pos_split", pos_split_tensor));
    TF_RETURN_IF_ERROR(CheckVector("value_offset_map", map_tensor));
    TF_RETURN_IF_ERROR(CheckVector("value_offset_map_split", map_split_tensor));
    const int64_t num_rows = static_cast<int64_t>(dims.size());
    if (pos_split_tensor.dim_size(0) != num_rows + 1) {
      return errors::InvalidArgument("pos should have ", num_rows, " rows, one per dim. Got ",
                                     pos_split_tensor.dim_size(0) - 1);
    }
    num_pos = pos_tensor.dim_size(0);
    TF_RETURN_IF_ERROR(CheckRowSplits("pos_split", pos_split_tensor.vec<int64_t>(), num_pos));
    TF_RETURN_IF_ERROR(CheckRowSplits("value_offset_map_split", map_split_tensor.vec<int64_t>(),
                                      map_tensor.dim_size(0)));
    pos = pos_tensor.vec<int64_t>().data();
    pos_split = pos_split_tensor.vec<int64_t>().data();
    offsets = map_tensor.vec<int64_t>().data();
    offset_splits = map_split_tensor.vec<int64_t>().data();
    num_keys = map_split_tensor.dim_size(0) - 1;
    std::vector<bool> seen(num_keys, false);
    for (int64_t i = 0; i < num_pos; ++i) {
      if (pos[i] < 0 || pos[i] >= num_keys) {
        return errors::InvalidArgument("pos is bigger than offset size. pos[", i, "] is ", pos[i],
                                       ", want a value in [0, ", num_keys, ")");
      }
      if (seen[pos[i]]) keys_are_unique = false;
      seen[pos[i]] = true;
    }
    TF_RETURN_IF_ERROR(CountFloats("pos", pos_split, dims, &num_floats));
    int64_t floats = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
      start.push_back(floats);
      floats += (pos_split[r + 1] - pos_split[r]) * dims[r];
    }
    return OkStatus();
  }

  // Every offset of every key in pos leaves room for the key's width in `size` floats.
  Status CheckReach(const std::vector<int64_t>& dims, const char* name, int64_t size) const {
    for (size_t r = 0; r < dims.size(); ++r) {
      for (int64_t i = pos_split[r]; i < pos_split[r + 1]; ++i) {
        for (int64_t k = offset_splits[pos[i]]; k < offset_splits[pos[i] + 1]; ++k) {
          if (offsets[k] < 0 || offsets[k] > size - dims[r]) {
            return errors::InvalidArgument("value_offset_map[", k, "] is ", offsets[k],
                                           ", but width ", dims[r], " has to fit into the ", size,
                                           " floats of ", name);
          }
        }
      }
    }
    return OkStatus();
  }

  // fn(entry of pos, its width, first float of the entry), rows in order.
  template <typename Fn>
  void ForEach(const std::vector<int64_t>& dims, int64_t begin, int64_t end, const Fn& fn) const {
    for (size_t r = 0; r < dims.size(); ++r) {
      const int64_t first = std::max(begin, pos_split[r]);
      const int64_t last = std::min(end, pos_split[r + 1]);
      for (int64_t i = first; i < last; ++i) {
        fn(i, dims[r], start[r] + (i - pos_split[r]) * dims[r]);
      }
    }
  }

  int64_t CyclesPerEntry() const {
    return 20 + (num_floats + offset_splits[num_keys] * 10) / std::max<int64_t>(1, num_pos);
  }
};

REGISTER_OP("MonolithUniqueKeyWithValueAndOffset")
    .Input("key: int64")
    .Input("key_split: int64")
    .Output("unique_key: int64")
    .Output("unique_key_split: int64")
    .Output("value_offset: int64")
    .Output("value_offset_split: int64")
    .Output("value_buffer: resource")
    .Attr("dims: list(int)")
    .Attr("generate_buffer: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->input(1));
      c->set_output(2, c->input(0));
      c->set_output(3, c->Vector(c->UnknownDim()));
      c->set_output(4, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Unique keys of each row, and where all their occurrences lie in a flat buffer of values.

key: ragged values; key_split: their row splits, len(dims) + 1 entries.
unique_key: in order of first appearance; unique_key_split: its row splits.
value_offset: for every unique key the start of each of its occurrences; value_offset_split: row splits.
value_buffer: an uninitialised float vector of sum(dims[r] * len(row r)) elements, or an empty handle.
dims: width of the values of each row.
)doc");

REGISTER_OP("MonolithFillWithOffsetMap")
    .Input("pos: int64")
    .Input("pos_split: int64")
    .Input("value: float")
    .Input("value_offset_map: int64")
    .Input("value_offset_map_split: int64")
    .Input("value_buffer: resource")
    .Output("out_value_buffer: resource")
    .Attr("dims: list(int)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Copies each value to every place of its key. Calls that fill different keys may run at once.

pos: ragged values, indices of unique keys; pos_split: their row splits, len(dims) + 1 entries.
value: one slice of width dims[row] per entry of `pos`, one after the other.
)doc");

REGISTER_OP("MonolithFillWithOffsetMapGradient")
    .Input("pos: int64")
    .Input("pos_split: int64")
    .Input("grad: float")
    .Input("grad_offset_map: int64")
    .Input("grad_offset_map_split: int64")
    .Output("backprop_grad: float")
    .Attr("dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc(R"doc(
Gradient of the filled values: the sum of the buffer's gradient over all places of the key.
)doc");

REGISTER_OP("MonolithFinalizeSharedTensor")
    .Input("handle: num_tensors * resource")
    .Output("t: dtype")
    .Attr("shape: shape")
    .Attr("dtype: type")
    .Attr("num_tensors: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      PartialTensorShape shape;
      TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
      ShapeHandle out;
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &out));
      SetOutputShape(c, 0, out);
      return OkStatus();
    })
    .Doc(R"doc(
Returns the tensor behind the first handle and deletes the resource.

handle: the same resource from every op that wrote to it.
)doc");

class UniqueKeyWithValueAndOffsetOp : public OpKernel {
 public:
  explicit UniqueKeyWithValueAndOffsetOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("generate_buffer", &generate_buffer_));
    OP_REQUIRES_OK(ctx, CheckDims(dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& key = ctx->input(0);
    const Tensor& key_split = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckVector("key", key));
    OP_REQUIRES_OK(ctx, CheckVector("key_split", key_split));
    const int64_t num_rows = static_cast<int64_t>(dims_.size());
    OP_REQUIRES(ctx, key_split.dim_size(0) == num_rows + 1,
                errors::InvalidArgument("RaggedKey should have ", num_rows,
                                        " rows, one per dim. Got ", key_split.dim_size(0) - 1));
    const auto splits = key_split.vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("key_split", splits, key.dim_size(0)));
    OP_REQUIRES(ctx, key.dim_size(0) <= UniqueOffsets::kMaxKeys,
                errors::InvalidArgument("key has ", key.dim_size(0), " values, want at most ",
                                        UniqueOffsets::kMaxKeys));
    int64_t num_floats;
    OP_REQUIRES_OK(ctx, CountFloats("key", splits.data(), dims_, &num_floats));

    DeviceRunner parallel(ctx);
    UniqueOffsets unique(parallel, key.vec<int64_t>().data(), splits.data(), num_rows);
    Tensor *unique_key, *unique_split, *offset, *offset_split, *handle;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {unique.num_unique()}, &unique_key));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, key_split.shape(), &unique_split));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, key.shape(), &offset));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 3, {unique.num_unique() + 1}, &offset_split));
    unique.Fill(parallel, dims_, unique_key->vec<int64_t>().data(),
                unique_split->vec<int64_t>().data(), offset->vec<int64_t>().data(),
                offset_split->vec<int64_t>().data());

    AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({}), &handle, on_host));
    handle->scalar<ResourceHandle>()() = ResourceHandle();
    if (!generate_buffer_) return;
    Tensor buffer;
    TensorShape buffer_shape;
    OP_REQUIRES_OK(ctx, TensorShape::BuildTensorShape({num_floats}, &buffer_shape));
    OP_REQUIRES_OK(ctx, AllocateTemp(ctx, DT_FLOAT, buffer_shape, &buffer));
#ifndef NDEBUG
    // Poison: a place that no fill wrote must show.
    std::fill_n(buffer.vec<float>().data(), num_floats, std::numeric_limits<float>::quiet_NaN());
#endif
    handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(
        new SharedTensor(std::move(buffer)), ctx->device()->name());
  }

 private:
  std::vector<int64_t> dims_;
  bool generate_buffer_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithUniqueKeyWithValueAndOffset").Device(DEVICE_CPU),
                        UniqueKeyWithValueAndOffsetOp);

class FillWithOffsetMapOp : public OpKernel {
 public:
  explicit FillWithOffsetMapOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, CheckDims(dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OffsetMap map;
    OP_REQUIRES_OK(ctx,
                   map.Read(ctx->input(0), ctx->input(1), ctx->input(3), ctx->input(4), dims_));
    const Tensor& value = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckVector("value", value));
    OP_REQUIRES(ctx, value.NumElements() >= map.num_floats,
                errors::InvalidArgument(
                    "Value size doesn't match expected size. expected: ", map.num_floats,
                    ", actual: ", value.NumElements(),
                    ". One slice of its row's width is needed per entry of pos."));
    core::RefCountPtr<SharedTensor> shared;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 5, "value_buffer", &shared));
    Tensor buffer;
    OP_REQUIRES_OK(ctx, shared->Get(&buffer));
    OP_REQUIRES_OK(ctx, map.CheckReach(dims_, "value_buffer", buffer.NumElements()));

    const float* from = value.vec<float>().data();
    float* to = buffer.flat<float>().data();
    const auto fill = [&](int64_t begin, int64_t end) {
      map.ForEach(dims_, begin, end, [&](int64_t i, int64_t dim, int64_t start) {
        for (int64_t k = map.offset_splits[map.pos[i]]; k < map.offset_splits[map.pos[i] + 1];
             ++k) {
          std::memcpy(to + map.offsets[k], from + start, dim * sizeof(float));
        }
      });
    };
    if (map.keys_are_unique) {
      DeviceRunner(ctx).For(map.num_pos, map.CyclesPerEntry(), fill);
    } else {
      fill(0, map.num_pos);  // the last entry of a key wins
    }
    ctx->set_output(0, ctx->input(5));
  }

 private:
  std::vector<int64_t> dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFillWithOffsetMap").Device(DEVICE_CPU), FillWithOffsetMapOp);

class FillWithOffsetMapGradientOp : public OpKernel {
 public:
  explicit FillWithOffsetMapGradientOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, CheckDims(dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OffsetMap map;
    OP_REQUIRES_OK(ctx,
                   map.Read(ctx->input(0), ctx->input(1), ctx->input(3), ctx->input(4), dims_));
    const Tensor& grad = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckVector("grad", grad));
    OP_REQUIRES_OK(ctx, map.CheckReach(dims_, "grad", grad.NumElements()));
    Tensor* out;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {map.num_floats}, &out));
    const float* from = grad.vec<float>().data();
    float* to = out->vec<float>().data();
    DeviceRunner(ctx).For(map.num_pos, map.CyclesPerEntry(), [&](int64_t begin, int64_t end) {
      map.ForEach(dims_, begin, end, [&](int64_t i, int64_t dim, int64_t start) {
        float* __restrict__ sum = to + start;
        std::fill_n(sum, dim, 0.0f);
        for (int64_t k = map.offset_splits[map.pos[i]]; k < map.offset_splits[map.pos[i] + 1];
             ++k) {
          const float* slice = from + map.offsets[k];
          for (int64_t j = 0; j < dim; ++j) sum[j] += slice[j];
        }
      });
    });
  }

 private:
  std::vector<int64_t> dims_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFillWithOffsetMapGradient").Device(DEVICE_CPU),
                        FillWithOffsetMapGradientOp);

class FinalizeSharedTensorOp : public OpKernel {
 public:
  explicit FinalizeSharedTensorOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shape", &shape_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<SharedTensor> shared;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &shared));
    Tensor tensor;
    OP_REQUIRES_OK(ctx, shared->Get(&tensor));
    OP_REQUIRES(
        ctx, tensor.dtype() == dtype_,
        errors::InvalidArgument("the shared tensor has dtype ", DataTypeString(tensor.dtype()),
                                ", dtype is ", DataTypeString(dtype_)));
    OP_REQUIRES(
        ctx, shape_.IsCompatibleWith(tensor.shape()),
        errors::InvalidArgument("the shared tensor has shape ", tensor.shape().DebugString(),
                                ", shape is ", shape_.DebugString()));
    OP_REQUIRES_OK(ctx, shared->Take(&tensor));
    ctx->set_output(0, tensor);
  }

 private:
  PartialTensorShape shape_;
  DataType dtype_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithFinalizeSharedTensor").Device(DEVICE_CPU),
                        FinalizeSharedTensorOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
