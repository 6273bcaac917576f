// The inputs of the fused layout ops, brought into the engine's form (blocks with a start, a stride
// and a size), whatever the version and the device.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_READER_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/distribution/embedding_layout.h"
#include "monolith/native_training/runtime/ops/distribution/layout_config.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {

// A block starts `offset` floats into tensor `list` of embeddings_list.
struct LayoutBlockStart {
  int64_t list;
  int64_t offset;
};

// The tensors of one request; their values are not looked at.
struct LayoutInput {
  ::monolith::distribution::LayoutRequest layout;
  std::vector<LayoutBlockStart> starts;  // of its blocks
  int64_t first_row = 0;                 // in the layout tensors
};

// The element i * step of `sizes` for all i is not negative and they add up to `total`.
inline Status CheckParts(std::string_view name, const Tensor& sizes, int64_t first, int64_t step,
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

// Reads the inputs that the forward and the backward op share. Sizes, which lie in the host's
// memory on every device, are checked here; offsets are not looked at.
class LayoutReader {
 public:
  explicit LayoutReader(int version) : version_(version) {}

  Status Init(OpKernelConstruction* ctx) {
    std::string feature_cfgs;
    TF_RETURN_IF_ERROR(ctx->GetAttr("feature_cfgs", &feature_cfgs));
    TF_RETURN_IF_ERROR(ParseLayoutPlan(feature_cfgs, &plan_));
    if (version_ == 1) return OkStatus();
    TF_RETURN_IF_ERROR(ctx->GetAttr("ps_num", &ps_num_));
    return CheckCount("ps_num", ps_num_, 1, std::numeric_limits<int32_t>::max());
  }

  Status ReadRequests(OpKernelContext* ctx, const OpInputList& embeddings,
                      std::vector<LayoutInput>* requests) const {
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
    ::monolith::distribution::LayoutRequest rest;  // what the requests before left
    rest.ids = static_cast<const uint64_t*>(fid_offset->data());
    rest.num_ids = fid_offset->NumElements();
    rest.rows = static_cast<const int32_t*>(feature_offset->data());
    rest.num_rows = feature_offset->NumElements();
    rest.starts = static_cast<const uint32_t*>(nfl_offset->data());
    rest.num_starts = nfl_offset->NumElements();
    int64_t first_row = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      LayoutInput& request = (*requests)[r];
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
      if (request.layout.batch_size < 0) {  // outputs of that shape would be refused in other words
        return RequestError(
            r, num_requests,
            "batch_size is " + std::to_string(request.layout.batch_size) + ", want >= 0");
      }
      request.first_row = first_row;
      TF_RETURN_IF_ERROR(ReadBlocks(ctx, embeddings, r, num_requests, &request));
      first_row += request.layout.batch_size;
    }
    return OkStatus();
  }

  // The error of request r, as the engine's LayoutBatch::Build words it; OK if that is empty.
  static Status RequestError(size_t r, size_t num_requests, const std::string& error) {
    if (error.empty()) return OkStatus();
    return errors::InvalidArgument(num_requests > 1 ? "request " + std::to_string(r) + ": " : "",
                                   error);
  }

  static int64_t TotalBatch(const std::vector<LayoutInput>& requests) {
    int64_t total = 0;
    for (const LayoutInput& request : requests) total += request.layout.batch_size;
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
  static std::vector<Float*> BlockPointers(const LayoutInput& request,
                                           const std::vector<Float*>& lists) {
    std::vector<Float*> pointers;
    for (const LayoutBlockStart& start : request.starts) {
      pointers.push_back(lists[start.list] + start.offset);
    }
    return pointers;
  }

  const ::monolith::distribution::LayoutPlan& plan() const { return plan_; }

 private:
  static Status ReadSizes(OpKernelContext* ctx, const char* name, int64_t num_requests,
                          const Tensor& total, const Tensor** sizes) {
    TF_RETURN_IF_ERROR(ctx->input(name, sizes));
    TF_RETURN_IF_ERROR(CheckEqual(std::string("number of elements of ") + name,
                                  (*sizes)->NumElements(), "number of requests", num_requests));
    return CheckParts(name, **sizes, 0, 1, "the vector it divides", total.NumElements());
  }

  Status ReadBlocks(OpKernelContext* ctx, const OpInputList& embeddings, int64_t request_index,
                    int64_t num_requests, LayoutInput* request) const {
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

  static void AddBlock(int64_t list, int64_t offset,
                       const ::monolith::distribution::LayoutBlock& block, LayoutInput* request) {
    request->layout.blocks.push_back(block);
    request->starts.push_back({list, offset});
  }

  // V1: a block is a matrix, an id names its row.
  static Status MatrixBlocks(const OpInputList& embeddings, LayoutInput* request) {
    for (int j = 0; j < embeddings.size(); ++j) {
      TF_RETURN_IF_ERROR(CheckMatrix("embeddings_list", embeddings[j]));
      const int64_t width = embeddings[j].dim_size(1);
      if (width > std::numeric_limits<int32_t>::max()) {
        return errors::InvalidArgument("embeddings_list[", j, "] has ", width,
                                       " columns, want at most ",
                                       std::numeric_limits<int32_t>::max());
      }
      AddBlock(j, 0, {width, embeddings[j].NumElements(), width}, request);
    }
    return OkStatus();
  }

  // V2: a block per table, ps and feature; the row splits tell how many rows each has.
  Status FeatureBlocks(OpKernelContext* ctx, const OpInputList& embeddings,
                       LayoutInput* request) const {
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
                       LayoutInput* request) const {
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
                       int64_t num_requests, LayoutInput* request) const {
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
  ::monolith::distribution::LayoutPlan plan_;
  int64_t ps_num_ = 1;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_LAYOUT_READER_H_
