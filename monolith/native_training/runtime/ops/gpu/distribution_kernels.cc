// GPU kernels of the distribution ops: fused gather, segment sums, reduce-and-split.
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/ops/distribution/fused_gather_checks.h"
#include "monolith/native_training/runtime/ops/distribution/fused_segment_checks.h"
#include "monolith/native_training/runtime/ops/gpu/gpu_kernel.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// A copy of a tensor in the host's memory.
template <typename T>
Status ToHost(const GpuCall& call, const Tensor& tensor, Tensor* on_host) {
  *on_host = Tensor(DataTypeToEnum<T>::v(), tensor.shape());
  return call.ReadNow(tensor.data(), on_host->data(), static_cast<int64_t>(tensor.TotalBytes()));
}

class FusedGatherGpuOpBase : public CheckedGpuKernel {
 public:
  explicit FusedGatherGpuOpBase(OpKernelConstruction* ctx) : CheckedGpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("embedding_dims", &dims_));
    int num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("M", &num_tables));
    OP_REQUIRES_OK(ctx, CheckDims(dims_, num_tables));
  }

 protected:
  int64_t num_tables() const { return static_cast<int64_t>(dims_.size()); }

  // Inputs [first, first + num_tables()) are the offsets; their values are not looked at.
  Status ReadOffsets(OpKernelContext* ctx, int64_t first) {
    for (int64_t m = 0; m < num_tables(); ++m) {
      TF_RETURN_IF_ERROR(CheckVector("embedding_offsets", ctx->input(static_cast<int>(first + m))));
    }
    return OkStatus();
  }

  static const int32_t* Offsets(OpKernelContext* ctx, int64_t input) {
    return static_cast<const int32_t*>(ctx->input(static_cast<int>(input)).data());
  }

  // Gives the values of the offsets to the check of the CPU kernel.
  Describe DescribeOffsets(int64_t first, int64_t size) const {
    return [this, first, size](const GpuCall& call) {
      for (int64_t m = 0; m < num_tables(); ++m) {
        Tensor offsets;
        TF_RETURN_IF_ERROR(
            ToHost<int32_t>(call, call.ctx()->input(static_cast<int>(first + m)), &offsets));
        TF_RETURN_IF_ERROR(CheckOffsets(offsets, m, dims_[m], size));
      }
      return OkStatus();
    };
  }

  std::vector<int64_t> dims_;
};

class FusedGatherGpuOp : public FusedGatherGpuOpBase {
 public:
  using FusedGatherGpuOpBase::FusedGatherGpuOpBase;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    const Tensor& fused = ctx->input(0);
    TF_RETURN_IF_ERROR(CheckVector("fused_embeddings", fused));
    TF_RETURN_IF_ERROR(ReadOffsets(ctx, 1));
    std::vector<TensorShape> shapes(num_tables());
    std::vector<const int32_t*> offsets;
    std::vector<int64_t> counts;
    for (int64_t m = 0; m < num_tables(); ++m) {
      counts.push_back(ctx->input(static_cast<int>(1 + m)).NumElements());
      offsets.push_back(Offsets(ctx, 1 + m));
      TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({counts[m], dims_[m]}, &shapes[m]));
    }
    Tensor whole;
    std::vector<int64_t> starts;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, shapes, &whole, &starts));
    std::vector<float*> outputs;
    for (int64_t m = 0; m < num_tables(); ++m) outputs.push_back(MutableFloats(whole) + starts[m]);
    *describe = DescribeOffsets(1, fused.NumElements());
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_gather(call->stream(), num_tables(), Floats(fused),
                                       fused.NumElements(), offsets.data(), counts.data(),
                                       dims_.data(), outputs.data(), workspace, bytes);
    });
  }
};

class FusedGatherGradGpuOp : public FusedGatherGpuOpBase {
 public:
  using FusedGatherGpuOpBase::FusedGatherGpuOpBase;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    const Tensor& size_tensor = ctx->input(0);
    const Tensor& scale = ctx->input(static_cast<int>(1 + 2 * num_tables()));
    TF_RETURN_IF_ERROR(CheckScalar("fused_embeddings_size", size_tensor));
    TF_RETURN_IF_ERROR(CheckScalar("scale", scale));
    const int64_t size = size_tensor.scalar<int32_t>()();
    if (size < 0) {
      return errors::InvalidArgument("fused_embeddings_size is ", size, ", want at least 0");
    }
    TF_RETURN_IF_ERROR(ReadOffsets(ctx, 1 + num_tables()));
    std::vector<const float*> grads;
    std::vector<const int32_t*> offsets;
    std::vector<int64_t> counts;
    for (int64_t m = 0; m < num_tables(); ++m) {
      const Tensor& grad = ctx->input(static_cast<int>(1 + m));
      counts.push_back(ctx->input(static_cast<int>(1 + num_tables() + m)).NumElements());
      if (grad.dims() != 2 || grad.dim_size(0) != counts[m] || grad.dim_size(1) != dims_[m]) {
        return errors::InvalidArgument("grads[", m, "] has shape ", grad.shape().DebugString(),
                                       ", want [", counts[m], ",", dims_[m], "]");
      }
      grads.push_back(Floats(grad));
      offsets.push_back(Offsets(ctx, 1 + num_tables() + m));
    }
    Tensor* out;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {size}, &out));
    *describe = DescribeOffsets(1 + num_tables(), size);
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_gather_grad(
          call->stream(), num_tables(), grads.data(), offsets.data(), counts.data(), dims_.data(),
          Floats(scale), MutableFloats(*out), size, workspace, bytes);
    });
  }
};

template <typename Index>
class FusedSegmentSumGpuOp : public CheckedGpuKernel {
 public:
  using CheckedGpuKernel::CheckedGpuKernel;

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    OpInputList indices, updates, shapes;
    TF_RETURN_IF_ERROR(ctx->input_list("indices", &indices));
    TF_RETURN_IF_ERROR(ctx->input_list("updates", &updates));
    TF_RETURN_IF_ERROR(ctx->input_list("shape", &shapes));
    const int n = indices.size();
    std::vector<TensorShape> out_shapes(n);
    std::vector<const void*> index_pointers;
    std::vector<const float*> update_pointers;
    std::vector<int64_t> counts, rows, dims;
    for (int i = 0; i < n; ++i) {
      TF_RETURN_IF_ERROR(
          CheckSegmentSum<Index>(i, indices[i], updates[i], shapes[i], &out_shapes[i]));
      index_pointers.push_back(indices[i].data());
      update_pointers.push_back(Floats(updates[i]));
      counts.push_back(indices[i].NumElements());
      rows.push_back(out_shapes[i].dim_size(0));
      // Without elements there are indices to check, but nothing to add.
      const int64_t elements = out_shapes[i].num_elements();
      dims.push_back(elements == 0 ? 0 : elements / rows[i]);
    }
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, out_shapes, &whole, &offsets));
    *describe = [this](const GpuCall& done) { return DescribeIndices(done); };
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_segment_sum(call->stream(), n, sizeof(Index), index_pointers.data(),
                                            counts.data(), update_pointers.data(), rows.data(),
                                            dims.data(), MutableFloats(whole), offsets.data(),
                                            workspace, bytes);
    });
  }

 private:
  static Status DescribeIndices(const GpuCall& call) {
    OpInputList indices, shapes;
    TF_RETURN_IF_ERROR(call.ctx()->input_list("indices", &indices));
    TF_RETURN_IF_ERROR(call.ctx()->input_list("shape", &shapes));
    for (int i = 0; i < indices.size(); ++i) {
      const int64_t rows = static_cast<int64_t>(shapes[i].vec<Index>()(0));
      Tensor host;
      TF_RETURN_IF_ERROR(ToHost<Index>(call, indices[i], &host));
      const auto index = host.flat<Index>();
      for (int64_t k = 0; k < index.size(); ++k) {
        if (index(k) < 0 || index(k) >= rows) {
          return errors::InvalidArgument("indices[", i, "][", k, "] is ", index(k),
                                         ", want a value in [0, ", rows, ")");
        }
        if (k > 0 && index(k) < index(k - 1)) {
          return errors::InvalidArgument("indices[", i, "] must not decrease on a GPU, but ",
                                         index(k), " follows ", index(k - 1), " at ", k);
        }
      }
    }
    return OkStatus();
  }
};

// Holds the parts that the reduction and its gradient share: the splits, and how columns are cut.
class FusedReduceGpuOpBase : public CheckedGpuKernel {
 public:
  FusedReduceGpuOpBase(OpKernelConstruction* ctx, const char* slices, const char* tables)
      : CheckedGpuKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slice_dims", &slice_dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_split_splits", &row_split_splits_));
    int num_slices, num_tables;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(slices, &num_slices));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(tables, &num_tables));
    OP_REQUIRES_OK(ctx, CheckSliceDims(slice_dims_, num_slices));
    OP_REQUIRES_OK(ctx, CheckStarts(row_split_splits_, num_tables, &batch_));
  }

 protected:
  // Sizes of the tables, from shapes alone.
  Status ReadSizes(OpKernelContext* ctx, const OpInputList& updates, std::vector<int64_t>* rows,
                   std::vector<int64_t>* num_slices) {
    std::vector<SplitTable> tables;
    TF_RETURN_IF_ERROR(ReadTables(ctx->input(0), row_split_splits_, slice_dims_, updates, &tables));
    for (int i = 0; i < updates.size(); ++i) {
      rows->push_back(updates[i].dim_size(0));
      num_slices->push_back(tables[i].num_slices);
    }
    return OkStatus();
  }

  Status ReadSliceGradients(const OpInputList& slices, std::vector<const float*>* grads) const {
    for (int s = 0; s < slices.size(); ++s) {
      if (slices[s].dims() != 2 || slices[s].dim_size(0) != batch_ ||
          slices[s].dim_size(1) != slice_dims_[s]) {
        return errors::InvalidArgument("slices[", s, "] has shape ",
                                       slices[s].shape().DebugString(), ", want [", batch_, ",",
                                       slice_dims_[s], "]");
      }
      grads->push_back(Floats(slices[s]));
    }
    return OkStatus();
  }

  Describe DescribeSplits() const {
    return [this](const GpuCall& call) {
      OpInputList updates;
      TF_RETURN_IF_ERROR(call.ctx()->input_list("updates", &updates));
      Tensor splits;
      TF_RETURN_IF_ERROR(ToHost<int32_t>(call, call.ctx()->input(0), &splits));
      return CheckTableSplits(splits.vec<int32_t>().data(), row_split_splits_, updates);
    };
  }

  static const int32_t* Splits(OpKernelContext* ctx) {
    return static_cast<const int32_t*>(ctx->input(0).data());
  }

  std::vector<int64_t> slice_dims_;
  std::vector<int64_t> row_split_splits_;
  int64_t batch_;
};

class FusedReduceAndSplitGpuOp : public FusedReduceGpuOpBase {
 public:
  explicit FusedReduceAndSplitGpuOp(OpKernelConstruction* ctx)
      : FusedReduceGpuOpBase(ctx, "num_slices", "N") {}

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    OpInputList updates;
    TF_RETURN_IF_ERROR(ctx->input_list("updates", &updates));
    std::vector<int64_t> rows, num_slices;
    TF_RETURN_IF_ERROR(ReadSizes(ctx, updates, &rows, &num_slices));
    std::vector<TensorShape> shapes(slice_dims_.size());
    for (size_t s = 0; s < shapes.size(); ++s) {
      TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape({batch_, slice_dims_[s]}, &shapes[s]));
    }
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, shapes, &whole, &offsets));
    std::vector<float*> slices;
    for (size_t s = 0; s < shapes.size(); ++s) slices.push_back(MutableFloats(whole) + offsets[s]);
    std::vector<const float*> tables;
    for (const Tensor& update : updates) tables.push_back(Floats(update));
    *describe = DescribeSplits();
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_reduce_split(call->stream(), updates.size(), batch_, Splits(ctx),
                                             tables.data(), rows.data(), num_slices.data(),
                                             slice_dims_.data(), slices.data(), workspace, bytes);
    });
  }
};

class FusedReduceAndSplitGradGpuOp : public FusedReduceGpuOpBase {
 public:
  explicit FusedReduceAndSplitGradGpuOp(OpKernelConstruction* ctx)
      : FusedReduceGpuOpBase(ctx, "N", "M") {}

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe* describe) override {
    OpInputList updates, slices;
    TF_RETURN_IF_ERROR(ctx->input_list("updates", &updates));
    TF_RETURN_IF_ERROR(ctx->input_list("slices", &slices));
    std::vector<int64_t> rows, num_slices;
    TF_RETURN_IF_ERROR(ReadSizes(ctx, updates, &rows, &num_slices));
    std::vector<const float*> grads;
    TF_RETURN_IF_ERROR(ReadSliceGradients(slices, &grads));
    std::vector<TensorShape> shapes;
    for (const Tensor& update : updates) shapes.push_back(update.shape());
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, shapes, &whole, &offsets));
    std::vector<float*> outputs;
    for (size_t i = 0; i < shapes.size(); ++i) outputs.push_back(MutableFloats(whole) + offsets[i]);
    *describe = DescribeSplits();
    return call->Run([&](void* workspace, int64_t* bytes) {
      return call->library().op_reduce_split_grad(
          call->stream(), updates.size(), batch_, Splits(ctx), grads.data(), rows.data(),
          num_slices.data(), slice_dims_.data(), outputs.data(), workspace, bytes);
    });
  }
};

// Tables whose rows go through as they are, and the stretches of others between them. Those of a
// stretch have their row splits next to one another, so that one launch does them.
class PassedTables {
 public:
  // Tables whose bit in has_one_each is set and that have one slice are passed.
  Status Read(const Tensor& has_one_each, int64_t batch, const std::vector<int64_t>& rows,
              const std::vector<int64_t>& num_slices) {
    const int64_t n = static_cast<int64_t>(rows.size());
    TF_RETURN_IF_ERROR(CheckVector("has_one_each", has_one_each));
    TF_RETURN_IF_ERROR(CheckEqual("size of has_one_each", has_one_each.NumElements(), "tables", n));
    int64_t slice = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool has_one = has_one_each.vec<bool>()(i);
      if (has_one && rows[i] != batch) {
        return errors::InvalidArgument("has_one_each[", i, "] is true, but updates[", i, "] has ",
                                       rows[i], " rows, want ", batch);
      }
      if (has_one && num_slices[i] == 1) {
        passed.push_back({i, i + 1, slice, slice + 1});
      } else if (!stretches.empty() && stretches.back().end == i) {
        stretches.back().end = i + 1;
        stretches.back().slice_end = slice + num_slices[i];
      } else {
        stretches.push_back({i, i + 1, slice, slice + num_slices[i]});
      }
      slice += num_slices[i];
    }
    return OkStatus();
  }

  struct Stretch {
    int64_t begin, end;
    int64_t slice_begin, slice_end;
  };
  std::vector<Stretch> passed;
  std::vector<Stretch> stretches;
};

// Numbers [begin, end) of every stretch, where `Begin` and `End` say which those are.
std::vector<int> NumbersOf(const std::vector<PassedTables::Stretch>& stretches,
                           int64_t PassedTables::Stretch::*begin,
                           int64_t PassedTables::Stretch::*end) {
  std::vector<int> numbers;
  for (const PassedTables::Stretch& stretch : stretches) {
    for (int64_t i = stretch.*begin; i < stretch.*end; ++i) numbers.push_back(static_cast<int>(i));
  }
  return numbers;
}

class PoolPackedIdsGpuOp : public FusedReduceGpuOpBase {
 public:
  explicit PoolPackedIdsGpuOp(OpKernelConstruction* ctx)
      : FusedReduceGpuOpBase(ctx, "num_slices", "N") {}

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe*) override {
    OpInputList updates;
    TF_RETURN_IF_ERROR(ctx->input_list("updates", &updates));
    std::vector<int64_t> rows, num_slices;
    TF_RETURN_IF_ERROR(ReadSizes(ctx, updates, &rows, &num_slices));
    PassedTables tables;
    TF_RETURN_IF_ERROR(tables.Read(ctx->input(ctx->num_inputs() - 1), batch_, rows, num_slices));
    for (const PassedTables::Stretch& one : tables.passed) {
      ctx->set_output(static_cast<int>(one.slice_begin), updates[static_cast<int>(one.begin)]);
    }
    const std::vector<int> outputs = NumbersOf(
        tables.stretches, &PassedTables::Stretch::slice_begin, &PassedTables::Stretch::slice_end);
    if (outputs.empty()) return OkStatus();
    std::vector<TensorShape> shapes(outputs.size());
    for (size_t s = 0; s < shapes.size(); ++s) {
      TF_RETURN_IF_ERROR(
          TensorShape::BuildTensorShape({batch_, slice_dims_[outputs[s]]}, &shapes[s]));
    }
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, outputs, shapes, &whole, &offsets));
    std::vector<float*> slices(slice_dims_.size());
    for (size_t s = 0; s < shapes.size(); ++s) {
      slices[outputs[s]] = MutableFloats(whole) + offsets[s];
    }
    std::vector<const float*> floats;
    for (const Tensor& update : updates) floats.push_back(Floats(update));
    for (const PassedTables::Stretch& stretch : tables.stretches) {
      TF_RETURN_IF_ERROR(call->Run([&](void* workspace, int64_t* bytes) {
        return call->library().op_reduce_split(
            call->stream(), stretch.end - stretch.begin, batch_,
            Splits(ctx) + row_split_splits_[stretch.begin], floats.data() + stretch.begin,
            rows.data() + stretch.begin, num_slices.data() + stretch.begin,
            slice_dims_.data() + stretch.slice_begin, slices.data() + stretch.slice_begin,
            workspace, bytes);
      }));
    }
    return OkStatus();
  }
};

class PoolPackedIdsGradGpuOp : public FusedReduceGpuOpBase {
 public:
  explicit PoolPackedIdsGradGpuOp(OpKernelConstruction* ctx)
      : FusedReduceGpuOpBase(ctx, "N", "M") {}

 protected:
  Status Launch(OpKernelContext* ctx, GpuCall* call, Describe*) override {
    OpInputList updates, slices;
    TF_RETURN_IF_ERROR(ctx->input_list("updates", &updates));
    TF_RETURN_IF_ERROR(ctx->input_list("slices", &slices));
    std::vector<int64_t> rows, num_slices;
    TF_RETURN_IF_ERROR(ReadSizes(ctx, updates, &rows, &num_slices));
    std::vector<const float*> grads;
    TF_RETURN_IF_ERROR(ReadSliceGradients(slices, &grads));
    PassedTables tables;
    TF_RETURN_IF_ERROR(tables.Read(ctx->input(ctx->num_inputs() - 1), batch_, rows, num_slices));
    for (const PassedTables::Stretch& one : tables.passed) {
      ctx->set_output(static_cast<int>(one.begin), slices[static_cast<int>(one.slice_begin)]);
    }
    const std::vector<int> outputs =
        NumbersOf(tables.stretches, &PassedTables::Stretch::begin, &PassedTables::Stretch::end);
    if (outputs.empty()) return OkStatus();
    std::vector<TensorShape> shapes;
    for (const int i : outputs) shapes.push_back(updates[i].shape());
    Tensor whole;
    std::vector<int64_t> offsets;
    TF_RETURN_IF_ERROR(AllocateSlices(ctx, outputs, shapes, &whole, &offsets));
    std::vector<float*> floats(rows.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      floats[outputs[i]] = MutableFloats(whole) + offsets[i];
    }
    for (const PassedTables::Stretch& stretch : tables.stretches) {
      TF_RETURN_IF_ERROR(call->Run([&](void* workspace, int64_t* bytes) {
        return call->library().op_reduce_split_grad(
            call->stream(), stretch.end - stretch.begin, batch_,
            Splits(ctx) + row_split_splits_[stretch.begin], grads.data() + stretch.slice_begin,
            rows.data() + stretch.begin, num_slices.data() + stretch.begin,
            slice_dims_.data() + stretch.slice_begin, floats.data() + stretch.begin, workspace,
            bytes);
      }));
    }
    return OkStatus();
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithFusedGatherEmbeddingsByInput").Device(DEVICE_GPU),
                        FusedGatherGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithFusedGatherEmbeddingsByInputGradient")
                            .Device(DEVICE_GPU)
                            .HostMemory("fused_embeddings_size"),
                        FusedGatherGradGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithFusedSegmentSum")
                            .Device(DEVICE_GPU)
                            .HostMemory("shape")
                            .TypeConstraint<float>("T")
                            .TypeConstraint<int32_t>("Tindices"),
                        FusedSegmentSumGpuOp<int32_t>);
REGISTER_GUARDED_KERNEL(Name("MonolithFusedSegmentSum")
                            .Device(DEVICE_GPU)
                            .HostMemory("shape")
                            .TypeConstraint<float>("T")
                            .TypeConstraint<int64_t>("Tindices"),
                        FusedSegmentSumGpuOp<int64_t>);
REGISTER_GUARDED_KERNEL(
    Name("MonolithFusedReduceAndSplitGPU").Device(DEVICE_GPU).TypeConstraint<float>("T"),
    FusedReduceAndSplitGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithFusedReduceAndSplitGPUGrad").Device(DEVICE_GPU).TypeConstraint<float>("T"),
    FusedReduceAndSplitGradGpuOp);
REGISTER_GUARDED_KERNEL(Name("MonolithPoolPackedIds").Device(DEVICE_GPU).HostMemory("has_one_each"),
                        PoolPackedIdsGpuOp);
REGISTER_GUARDED_KERNEL(
    Name("MonolithPoolPackedIdsGrad").Device(DEVICE_GPU).HostMemory("has_one_each"),
    PoolPackedIdsGradGpuOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
