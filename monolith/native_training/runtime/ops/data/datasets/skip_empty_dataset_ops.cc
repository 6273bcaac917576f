// MonolithSkipEmptyDataset: the elements of an endless source that have something in them.
#include <memory>
#include <vector>

#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithSkipEmptyDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Elements of the input whose first component is not empty.

Unlike a filter it can be cancelled between elements of the input, however it was asked for: a source
that waits for data gives empty elements meanwhile.
)doc");

class SkipEmptyDataset final : public UnaryDataset {
 public:
  SkipEmptyDataset(OpKernelContext* ctx, const data::DatasetBase* input)
      : UnaryDataset(ctx, "SkipEmptyDataset", input, /*attrs=*/{}) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::SkipEmpty"});
  }

 private:
  class Iterator final : public UnaryIterator<SkipEmptyDataset> {
   public:
    explicit Iterator(const Params& params) : UnaryIterator<SkipEmptyDataset>(params) {}

    Status Initialize(data::IteratorContext* ctx) override {
      TF_RETURN_IF_ERROR(cancellation_.Watch(ctx));
      return dataset()->input()->MakeIterator(ctx, this, prefix(), &input_iterator_);
    }

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      while (!cancellation_.IsCancelled(ctx)) {
        TF_RETURN_IF_ERROR(input_iterator_->GetNext(ctx, out_tensors, end_of_sequence));
        if (*end_of_sequence || out_tensors->empty() || (*out_tensors)[0].NumElements() > 0) {
          return OkStatus();
        }
        out_tensors->clear();
      }
      return errors::Cancelled("the iterator was cancelled");
    }

   protected:
    Status SaveInternal(data::SerializationContext* ctx,
                        data::IteratorStateWriter* writer) override {
      return SaveInput(ctx, writer, input_iterator_);
    }

    Status RestoreInternal(data::IteratorContext* ctx, data::IteratorStateReader* reader) override {
      return RestoreInput(ctx, reader, input_iterator_);
    }

   private:
    IteratorCancellation cancellation_;
    std::unique_ptr<data::IteratorBase> input_iterator_;
  };
};

class SkipEmptyDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  using UnaryDatasetOpKernel::UnaryDatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase* input,
                   data::DatasetBase** output) override {
    *output = new SkipEmptyDataset(ctx, input);
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithSkipEmptyDataset").Device(DEVICE_CPU), SkipEmptyDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
