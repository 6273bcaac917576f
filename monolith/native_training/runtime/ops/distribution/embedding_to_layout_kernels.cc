// Kernels of the fused layout ops: each version's tensors are brought into the engine's form
// (blocks with a start, a stride and a size), then one implementation does the work.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/distribution/embedding_layout.h"
#include "monolith/native_training/runtime/ops/distribution/layout_config.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::LayoutBatch;
using ::monolith::distribution::LayoutBlock;
using ::monolith::distribution::LayoutPlan;
using ::monolith::distribution::LayoutRequest;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// A block starts `offset` floats into tensor `list` of embeddings_list.
struct BlockStart {
  int64_t list;
  int64_t offset;
};

struct Request {
  LayoutRequest layout;
  std::vector<BlockStart> starts;  // of its blocks
  LayoutBatch batch;
  int64_t first_row = 0;  // in the layout tensors
};

// The element i * step of `sizes` for all i is not negative and they add up to `total`.
Status CheckParts(std::string_view name, const Tensor& sizes, int64_t first, int64_t step,
                  std::string_view total_name, int64_t total) {
  const auto size = sizes.flat<int32_t>();
  int64_t sum = 0;
  for (int64_t i = first; i < size.size(); i += step) {
    if (size(i) < 0) {
      return errors::InvalidArgument(name, "[", i, "] is ", size(i), ", want at least 0");
    }
    sum += size(i);
  }
  if (sum == total) return OkStatus();
  return errors::InvalidArgument(name, " adds up to ", sum, ", want the size of ", total_name,
                                 " = ", total);
}

// Reads the inputs that the forward and the backward op share.
class LayoutKernel : public OpKernel {
 public:
  LayoutKernel(OpKernelConstruction* ctx, int version) : OpKernel(ctx), version_(version) {
    std::string feature_cfgs;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_cfgs", &feature_cfgs));
    OP_REQUIRES_OK(ctx, ParseLayoutPlan(feature_cfgs, &plan_));
    if (version_ == 1) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("ps_num", &ps_num_));
    OP_REQUIRES(
        ctx, ps_num_ >= 1 && ps_num_ <= kMaxInt32,
        errors::InvalidArgument("ps_num is ", ps_num_, ", want a value in [1, ", kMaxInt32, "]"));
  }

 protected:
  // Checks all offsets; afterwards the engine may follow them blindly.
  Status ReadRequests(OpKernelContext* ctx, const DeviceRunner& parallel,
                      const OpInputList& embeddings, std::vector<Request>* requests) const {
    const Tensor *fid_offset, *feature_offset, *nfl_offset, *batch_size;
    TF_RETURN_IF_ERROR(ctx->input("fid_offset", &fid_offset));
    TF_RETURN_IF_ERROR(ctx->input("feature_offset", &feature_offset));
    TF_RETURN_IF_ERROR(ctx->input("nfl_offset", &nfl_offset));
    TF_RETURN_IF_ERROR(ctx->input("batch_size", &batch_size));
    TF_RETURN_IF_ERROR(CheckVector("fid_offset", *fid_offset));
    TF_RETURN_IF_ERROR(CheckVector("feature_offset", *feature_offset));
    TF_RETURN_IF_ERROR(CheckVector("nfl_offset", *nfl_offset));
    const int64_t num_requests = version_ == 5 ? batch_size->NumElements() : 1;
    TF_RETURN_IF_ERROR(CheckEqual("number of elements of batch_size", batch_size->NumElements(),
                                  "number of requests", num_requests));

    const Tensor *nfl_size = nullptr, *feature_size = nullptr, *fid_size = nullptr;
    if (version_ == 5) {
      TF_RETURN_IF_ERROR(ReadSizes(ctx, "nfl_size", num_requests, *nfl_offset, &nfl_size));
      TF_RETURN_IF_ERROR(
          ReadSizes(ctx, "feature_size", num_requests, *feature_offset, &feature_size));
      TF_RETURN_IF_ERROR(ReadSizes(ctx, "fid_size", num_requests, *fid_offset, &fid_size));
    }
    requests->resize(num_requests);
    LayoutRequest rest;  // what the requests before left
    rest.ids = fid_offset->vec<uint64_t>().data();
    rest.num_ids = fid_offset->NumElements();
    rest.rows = feature_offset->vec<int32_t>().data();
    rest.num_rows = feature_offset->NumElements();
    rest.starts = nfl_offset->vec<uint32_t>().data();
    rest.num_starts = nfl_offset->NumElements();
    int64_t first_row = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      Request& request = (*requests)[r];
      request.layout = rest;
      if (version_ == 5) {
        request.layout.num_ids = fid_size->flat<int32_t>()(r);
        request.layout.num_rows = feature_size->flat<int32_t>()(r);
        request.layout.num_starts = nfl_size->flat<int32_t>()(r);
        rest.ids += request.layout.num_ids;
        rest.rows += request.layout.num_rows;
        rest.starts += request.layout.num_starts;
      }
      request.layout.batch_size = batch_size->flat<int32_t>()(r);
      request.first_row = first_row;
      TF_RETURN_IF_ERROR(ReadBlocks(ctx, embeddings, r, num_requests, &request));
      const std::string error = request.batch.Build(parallel, plan_, request.layout);
      if (!error.empty()) {
        return errors::InvalidArgument(
            num_requests > 1 ? "request " + std::to_string(r) + ": " : "", error);
      }
      first_row += request.layout.batch_size;
    }
    return OkStatus();
  }

  int64_t TotalBatch(const std::vector<Request>& requests) const {
    int64_t total = 0;
    for (const Request& request : requests) total += request.layout.batch_size;
    return total;
  }

  Status OutputShape(size_t output, int64_t batch, TensorShape* shape) const {
    std::vector<int64_t> dims = plan_.outputs()[output].dims;
    if (dims[0] != -1 && dims[0] != batch) {
      return errors::InvalidArgument("layout '", plan_.outputs()[output].layout,
                                     "' is configured for a batch of ", dims[0], ", got ", batch);
    }
    dims[0] = batch;
    return TensorShape::BuildTensorShape(dims, shape);
  }

  template <typename Float>
  static std::vector<Float*> BlockPointers(const Request& request,
                                           const std::vector<Float*>& lists) {
    std::vector<Float*> pointers;
    for (const BlockStart& start : request.starts) {
      pointers.push_back(lists[start.list] + start.offset);
    }
    return pointers;
  }

  const LayoutPlan& plan() const { return plan_; }

 private:
  static Status ReadSizes(OpKernelContext* ctx, const char* name, int64_t num_requests,
                          const Tensor& total, const Tensor** sizes) {
    TF_RETURN_IF_ERROR(ctx->input(name, sizes));
    TF_RETURN_IF_ERROR(CheckEqual(std::string("number of elements of ") + name,
                                  (*sizes)->NumElements(), "number of requests", num_requests));
    return CheckParts(name, **sizes, 0, 1, "the vector it divides", total.NumElements());
  }

  Status ReadBlocks(OpKernelContext* ctx, const OpInputList& embeddings, int64_t request_index,
                    int64_t num_requests, Request* request) const {
    const int64_t num_tables = static_cast<int64_t>(plan_.tables().size());
    const int64_t num_lists = embeddings.size();
    if (version_ == 2 || version_ == 3 || version_ == 5) {
      TF_RETURN_IF_ERROR(CheckEqual("length of embeddings_list", num_lists,
                                    "number of tables * ps_num", num_tables * ps_num_));
    }
    switch (version_) {
      case 1:
        return MatrixBlocks(embeddings, request);
      case 2:
        return FeatureBlocks(ctx, embeddings, request);
      case 4:
        return PsMajorBlocks(ctx, embeddings, request);
      case 5:
        return RequestBlocks(ctx, embeddings, request_index, num_requests, request);
      default:
        for (int64_t j = 0; j < num_lists; ++j) {
          AddBlock(j, 0, {1, embeddings[j].NumElements()}, request);
        }
        return OkStatus();
    }
  }

  static void AddBlock(int64_t list, int64_t offset, const LayoutBlock& block, Request* request) {
    request->layout.blocks.push_back(block);
    request->starts.push_back({list, offset});
  }

  // V1: a block is a matrix, an id names its row.
  static Status MatrixBlocks(const OpInputList& embeddings, Request* request) {
    for (int j = 0; j < embeddings.size(); ++j) {
      TF_RETURN_IF_ERROR(CheckMatrix("embeddings_list", embeddings[j]));
      const int64_t width = embeddings[j].dim_size(1);
      if (width > kMaxInt32) {
        return errors::InvalidArgument("embeddings_list[", j, "] has ", width,
                                       " columns, want at most ", kMaxInt32);
      }
      AddBlock(j, 0, {width, embeddings[j].NumElements(), width}, request);
    }
    return OkStatus();
  }

  // V2: a block per table, ps and feature; the row splits tell how many rows each has.
  Status FeatureBlocks(OpKernelContext* ctx, const OpInputList& embeddings,
                       Request* request) const {
    OpInputList row_splits;
    TF_RETURN_IF_ERROR(ctx->input_list("fid_list_row_split", &row_splits));
    for (int64_t list = 0; list < embeddings.size(); ++list) {
      const std::vector<int64_t>& features = plan_.tables()[list / ps_num_];
      const Tensor& splits = row_splits[list];
      TF_RETURN_IF_ERROR(CheckVector("fid_list_row_split", splits));
      TF_RETURN_IF_ERROR(CheckEqual("length of fid_list_row_split[" + std::to_string(list) + "]",
                                    splits.NumElements(), "features of the table + 1",
                                    static_cast<int64_t>(features.size()) + 1));
      TF_RETURN_IF_ERROR(CheckRowSplits("fid_list_row_split", splits.vec<int64_t>(), -1));
      const int64_t size = embeddings[list].NumElements();
      int64_t offset = 0;
      for (size_t f = 0; f < features.size(); ++f) {
        const int64_t width = plan_.features()[features[f]].width;
        const int64_t rows = splits.vec<int64_t>()(f + 1) - splits.vec<int64_t>()(f);
        if (rows > (size - offset) / width) {
          return errors::InvalidArgument("feature '", plan_.features()[features[f]].name, "' has ",
                                         rows, " rows of ", width, " floats, but embeddings_list[",
                                         list, "] has only ", size - offset, " of its ", size,
                                         " floats left");
        }
        AddBlock(list, offset, {width, rows * width, width, features[f]}, request);
        offset += rows * width;
      }
      TF_RETURN_IF_ERROR(CheckEqual("size of embeddings_list[" + std::to_string(list) + "]", size,
                                    "floats of its features", offset));
    }
    return OkStatus();
  }

  // V4: one vector; ids count blocks table-major, but they lie ps-major.
  Status PsMajorBlocks(OpKernelContext* ctx, const OpInputList& embeddings,
                       Request* request) const {
    const Tensor* lengths;
    TF_RETURN_IF_ERROR(ctx->input("fid_list_emb_row_lenth", &lengths));
    const int64_t num_tables = static_cast<int64_t>(plan_.tables().size());
    TF_RETURN_IF_ERROR(CheckEqual("length of embeddings_list", embeddings.size(), "one vector", 1));
    TF_RETURN_IF_ERROR(CheckVector("fid_list_emb_row_lenth", *lengths));
    TF_RETURN_IF_ERROR(CheckEqual("length of fid_list_emb_row_lenth", lengths->NumElements(),
                                  "ps_num * number of tables", ps_num_ * num_tables));
    TF_RETURN_IF_ERROR(CheckParts("fid_list_emb_row_lenth", *lengths, 0, 1, "embeddings_list[0]",
                                  embeddings[0].NumElements()));
    const auto length = lengths->vec<int32_t>();
    std::vector<int64_t> start(length.size() + 1, 0);
    for (int64_t i = 0; i < length.size(); ++i) start[i + 1] = start[i] + length(i);
    for (int64_t table = 0; table < num_tables; ++table) {
      for (int64_t ps = 0; ps < ps_num_; ++ps) {
        const int64_t i = ps * num_tables + table;
        AddBlock(0, start[i], {1, length(i)}, request);
      }
    }
    return OkStatus();
  }

  // V5: list j holds the requests' parts one after the other.
  Status RequestBlocks(OpKernelContext* ctx, const OpInputList& embeddings, int64_t request_index,
                       int64_t num_requests, Request* request) const {
    const Tensor* emb_size;
    TF_RETURN_IF_ERROR(ctx->input("emb_size", &emb_size));
    const int64_t num_lists = embeddings.size();
    TF_RETURN_IF_ERROR(CheckEqual("number of elements of emb_size", emb_size->NumElements(),
                                  "requests * length of embeddings_list",
                                  num_requests * num_lists));
    const auto size = emb_size->flat<int32_t>();
    for (int64_t j = 0; j < num_lists; ++j) {
      TF_RETURN_IF_ERROR(CheckParts("emb_size", *emb_size, j, num_lists,
                                    "embeddings_list[" + std::to_string(j) + "]",
                                    embeddings[j].NumElements()));
      int64_t offset = 0;
      for (int64_t r = 0; r < request_index; ++r) offset += size(r * num_lists + j);
      AddBlock(j, offset, {1, size(request_index * num_lists + j)}, request);
    }
    return OkStatus();
  }

  const int version_;
  LayoutPlan plan_;
  int64_t ps_num_ = 1;
};

template <int kVersion>
class EmbeddingToLayoutOp : public LayoutKernel {
 public:
  explicit EmbeddingToLayoutOp(OpKernelConstruction* ctx) : LayoutKernel(ctx, kVersion) {
    OP_REQUIRES_OK(ctx, CheckEqual("num_out", ctx->num_outputs(), "shapes in feature_cfgs",
                                   static_cast<int64_t>(plan().outputs().size())));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    OpInputList embeddings;
    OP_REQUIRES_OK(ctx, ctx->input_list("embeddings_list", &embeddings));
    std::vector<Request> requests;
    OP_REQUIRES_OK(ctx, ReadRequests(ctx, parallel, embeddings, &requests));

    std::vector<float*> outputs;
    for (size_t o = 0; o < plan().outputs().size(); ++o) {
      TensorShape shape;
      OP_REQUIRES_OK(ctx, OutputShape(o, TotalBatch(requests), &shape));
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(o, shape, &out));
      outputs.push_back(out->flat<float>().data());
    }
    std::vector<const float*> lists;
    for (const Tensor& list : embeddings) lists.push_back(list.flat<float>().data());
    for (const Request& request : requests) {
      request.batch.Forward(parallel, BlockPointers(request, lists), request.first_row, outputs);
    }
  }
};

template <int kVersion>
class EmbeddingToLayoutGradOp : public LayoutKernel {
 public:
  explicit EmbeddingToLayoutGradOp(OpKernelConstruction* ctx) : LayoutKernel(ctx, kVersion) {}

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    OpInputList embeddings, layout_grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("embeddings_list", &embeddings));
    OP_REQUIRES_OK(ctx, ctx->input_list("tensors_grad", &layout_grads));
    OP_REQUIRES_OK(
        ctx, CheckEqual("length of tensors_grad", layout_grads.size(), "shapes in feature_cfgs",
                        static_cast<int64_t>(plan().outputs().size())));
    std::vector<Request> requests;
    OP_REQUIRES_OK(ctx, ReadRequests(ctx, parallel, embeddings, &requests));
    std::vector<const float*> grads;
    for (int o = 0; o < layout_grads.size(); ++o) {
      TensorShape want;
      OP_REQUIRES_OK(ctx, OutputShape(o, TotalBatch(requests), &want));
      OP_REQUIRES(ctx, layout_grads[o].shape() == want,
                  errors::InvalidArgument("tensors_grad[", o, "] has shape ",
                                          layout_grads[o].shape().DebugString(), ", want ",
                                          want.DebugString()));
      grads.push_back(layout_grads[o].flat<float>().data());
    }

    std::vector<float*> lists;
    for (int j = 0; j < embeddings.size(); ++j) {
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(j, embeddings[j].shape(), &out));
      float* data = out->flat<float>().data();
      parallel.For(out->NumElements(), 1, [data](int64_t begin, int64_t end) {
        std::fill(data + begin, data + end, 0.0f);
      });
      lists.push_back(data);
    }
    for (const Request& request : requests) {
      request.batch.Backward(parallel, grads, request.first_row, BlockPointers(request, lists));
    }
  }
};

}  // namespace

REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayout").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<1>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV2").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<2>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV3").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV4").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<4>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutV5").Device(DEVICE_CPU),
                        EmbeddingToLayoutOp<5>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGrad").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<1>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV2").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<2>);
// V5 has the gradient interface of V3: no size vectors, so one request.
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV3").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<3>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV4").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<4>);
REGISTER_GUARDED_KERNEL(Name("MonolithEmbeddingToLayoutGradV5").Device(DEVICE_CPU),
                        EmbeddingToLayoutGradOp<3>);

}  // namespace monolith_tf
}  // namespace tensorflow
