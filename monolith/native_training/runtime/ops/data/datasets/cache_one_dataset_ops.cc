// MonolithCacheOneDataset: adds to every element whether it is the last one.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithCacheOneDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(
        "Elements of the input, followed by a bool that is true for the last "
        "one.");

class CacheOneDataset final : public UnaryDataset {
 public:
  CacheOneDataset(OpKernelContext *ctx, const data::DatasetBase *input)
      : UnaryDataset(ctx, "CacheOneDataset", input, /*attrs=*/{}),
        dtypes_(input->output_dtypes()),
        shapes_(input->output_shapes()) {
    dtypes_.push_back(DT_BOOL);
    shapes_.push_back(PartialTensorShape({}));
  }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string &prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::CacheOne"});
  }

  const DataTypeVector &output_dtypes() const override { return dtypes_; }
  const std::vector<PartialTensorShape> &output_shapes() const override { return shapes_; }
  int64_t CardinalityInternal(data::CardinalityOptions options) const override {
    return input()->Cardinality(options);
  }

 private:
  class Iterator final : public data::DatasetIterator<CacheOneDataset> {
   public:
    explicit Iterator(const Params &params) : DatasetIterator<CacheOneDataset>(params) {}

    Status Initialize(data::IteratorContext *ctx) override {
      return dataset()->input()->MakeIterator(ctx, this, prefix(), &input_iterator_);
    }

    Status GetNextInternal(data::IteratorContext *ctx, std::vector<Tensor> *out_tensors,
                           bool *end_of_sequence) override {
      mutex_lock lock(mu_);
      if (!started_) {
        TF_RETURN_IF_ERROR(input_iterator_->GetNext(ctx, &next_, &ended_));
        started_ = true;
      }
      *end_of_sequence = ended_;
      if (ended_) return OkStatus();
      std::vector<Tensor> following;
      bool ended;
      TF_RETURN_IF_ERROR(input_iterator_->GetNext(ctx, &following, &ended));
      *out_tensors = std::move(next_);
      out_tensors->push_back(Tensor(ended));
      next_ = std::move(following);
      ended_ = ended;
      return OkStatus();
    }

   protected:
    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext *,
                                                  data::model::Node::Args args) const override {
      return data::model::MakeKnownRatioNode(std::move(args), /*ratio=*/1);
    }

    Status SaveInternal(data::SerializationContext *ctx,
                        data::IteratorStateWriter *writer) override {
      mutex_lock lock(mu_);
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "started", static_cast<int64_t>(started_)));
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "ended", static_cast<int64_t>(ended_)));
      TF_RETURN_IF_ERROR(
          writer->WriteScalar(prefix(), "tensors", static_cast<int64_t>(next_.size())));
      for (size_t i = 0; i < next_.size(); ++i) {
        TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), Key(i), next_[i]));
      }
      return SaveInput(ctx, writer, input_iterator_);
    }

    Status RestoreInternal(data::IteratorContext *ctx, data::IteratorStateReader *reader) override {
      mutex_lock lock(mu_);
      int64_t started, ended, tensors;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "started", &started));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "ended", &ended));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "tensors", &tensors));
      started_ = started != 0;
      ended_ = ended != 0;
      next_.resize(static_cast<size_t>(tensors));
      for (size_t i = 0; i < next_.size(); ++i) {
        TF_RETURN_IF_ERROR(reader->ReadTensor(ctx->flr(), prefix(), Key(i), &next_[i]));
      }
      return RestoreInput(ctx, reader, input_iterator_);
    }

   private:
    static std::string Key(size_t i) { return "next_" + std::to_string(i); }

    mutex mu_;
    std::unique_ptr<data::IteratorBase> input_iterator_;
    std::vector<Tensor> next_ TF_GUARDED_BY(mu_);
    bool started_ TF_GUARDED_BY(mu_) = false;
    bool ended_ TF_GUARDED_BY(mu_) = false;
  };

  DataTypeVector dtypes_;
  std::vector<PartialTensorShape> shapes_;
};

class CacheOneDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  using UnaryDatasetOpKernel::UnaryDatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext *ctx, data::DatasetBase *input,
                   data::DatasetBase **output) override {
    *output = new CacheOneDataset(ctx, input);
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithCacheOneDataset").Device(DEVICE_CPU), CacheOneDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
