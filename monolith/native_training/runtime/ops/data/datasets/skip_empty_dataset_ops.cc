// MonolithSkipEmptyDataset: the elements of an endless source that have something in them.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
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

class SkipEmptyDataset final : public data::DatasetBase {
 public:
  SkipEmptyDataset(OpKernelContext* ctx, const data::DatasetBase* input)
      : DatasetBase(data::DatasetContext(ctx)), input_(input) {
    input_->Ref();
  }

  ~SkipEmptyDataset() override { input_->Unref(); }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::SkipEmpty"});
  }

  const DataTypeVector& output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return input_->output_shapes();
  }
  string DebugString() const override { return "SkipEmptyDataset"; }
  Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return OkStatus();
  }
  Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  Status AsGraphDefInternal(data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                            Node** output) const override {
    Node* input = nullptr;
    TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, input_, &input));
    return b->AddDataset(this, {input}, output);
  }

 private:
  class Iterator final : public data::DatasetIterator<SkipEmptyDataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<SkipEmptyDataset>(params) {}

    ~Iterator() override {
      if (manager_ != nullptr) manager_->DeregisterCallback(token_);
    }

    // Threads of a data set that reads ahead ask for elements with the context of whoever asked
    // first, which nobody cancels; the one they made this iterator with is cancelled.
    Status Initialize(data::IteratorContext* ctx) override {
      CancellationManager* manager = ctx->cancellation_manager();
      if (manager != nullptr) {
        token_ = manager->get_cancellation_token();
        if (!manager->RegisterCallback(token_, [this] { is_cancelled_ = true; })) {
          return errors::Cancelled("the iterator was cancelled before it began");
        }
        manager_ = manager;
      }
      return dataset()->input_->MakeIterator(ctx, this, prefix(), &input_iterator_);
    }

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      while (!is_cancelled_ && !IsCancelled(ctx)) {
        TF_RETURN_IF_ERROR(input_iterator_->GetNext(ctx, out_tensors, end_of_sequence));
        if (*end_of_sequence || out_tensors->empty() || (*out_tensors)[0].NumElements() > 0) {
          return OkStatus();
        }
        out_tensors->clear();
      }
      return errors::Cancelled("the iterator was cancelled");
    }

   protected:
    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*,
                                                  data::model::Node::Args args) const override {
      return data::model::MakeUnknownRatioNode(std::move(args));
    }

    Status SaveInternal(data::SerializationContext* ctx,
                        data::IteratorStateWriter* writer) override {
      return SaveInput(ctx, writer, input_iterator_);
    }

    Status RestoreInternal(data::IteratorContext* ctx, data::IteratorStateReader* reader) override {
      return RestoreInput(ctx, reader, input_iterator_);
    }

   private:
    static bool IsCancelled(data::IteratorContext* ctx) {
      return ctx->cancellation_manager() != nullptr && ctx->cancellation_manager()->IsCancelled();
    }

    CancellationManager* manager_ = nullptr;
    CancellationToken token_;
    std::atomic<bool> is_cancelled_{false};
    std::unique_ptr<data::IteratorBase> input_iterator_;
  };

  const data::DatasetBase* const input_;
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
