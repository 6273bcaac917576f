#include "monolith/native_training/runtime/ops/data/datasets/sample_dataset.h"

#include <cstdint>

#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class SampleDataset final : public UnaryDataset {
 public:
  SampleDataset(OpKernelContext *ctx, const data::DatasetBase *input, SampleDatasetOptions options)
      : UnaryDataset(ctx, std::move(options.name), input, std::move(options.attrs),
                     std::move(options.extra)),
        factory_(std::move(options.factory)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string &prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::" + DebugString()});
  }

 private:
  class Iterator final : public UnaryIterator<SampleDataset> {
   public:
    explicit Iterator(const Params &params) : UnaryIterator<SampleDataset>(params) {}

    Status Initialize(data::IteratorContext *ctx) override {
      mutex_lock lock(mu_);
      expander_ = dataset()->factory_();
      return dataset()->input()->MakeIterator(ctx, this, prefix(), &input_iterator_);
    }

    Status GetNextInternal(data::IteratorContext *ctx, std::vector<Tensor> *out_tensors,
                           bool *end_of_sequence) override {
      mutex_lock lock(mu_);
      *end_of_sequence = false;
      while (pending_.empty()) {
        if (input_iterator_ == nullptr) {
          *end_of_sequence = true;
          return OkStatus();
        }
        std::vector<Tensor> element;
        TF_RETURN_IF_ERROR(input_iterator_->GetNext(ctx, &element, end_of_sequence));
        if (*end_of_sequence) {
          input_iterator_.reset();
          return OkStatus();
        }
        TF_RETURN_IF_ERROR(CheckSampleElement(element));
        const Status status =
            CatchExceptions([&] { return expander_->Expand(element[0], &pending_); });
        if (!status.ok()) {
          pending_.clear();  // half of what the sample makes
          return status;
        }
      }
      out_tensors->push_back(std::move(pending_.front()));
      pending_.pop_front();
      return OkStatus();
    }

   protected:
    Status SaveInternal(data::SerializationContext *ctx,
                        data::IteratorStateWriter *writer) override {
      mutex_lock lock(mu_);
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "exhausted",
                                             static_cast<int64_t>(input_iterator_ == nullptr)));
      TF_RETURN_IF_ERROR(
          writer->WriteScalar(prefix(), "pending", static_cast<int64_t>(pending_.size())));
      for (size_t i = 0; i < pending_.size(); ++i) {
        TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), PendingKey(i), pending_[i]));
      }
      return input_iterator_ == nullptr ? OkStatus() : SaveInput(ctx, writer, input_iterator_);
    }

    Status RestoreInternal(data::IteratorContext *ctx, data::IteratorStateReader *reader) override {
      mutex_lock lock(mu_);
      int64_t exhausted, pending;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "exhausted", &exhausted));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "pending", &pending));
      pending_.clear();
      for (int64_t i = 0; i < pending; ++i) {
        Tensor tensor;
        TF_RETURN_IF_ERROR(
            reader->ReadTensor(ctx->flr(), prefix(), PendingKey(static_cast<size_t>(i)), &tensor));
        pending_.push_back(tensor);
      }
      if (exhausted != 0) {
        input_iterator_.reset();
        return OkStatus();
      }
      return RestoreInput(ctx, reader, input_iterator_);
    }

   private:
    static std::string PendingKey(size_t i) { return "pending_" + std::to_string(i); }

    mutex mu_;
    std::unique_ptr<SampleExpander> expander_ TF_GUARDED_BY(mu_);
    std::unique_ptr<data::IteratorBase> input_iterator_ TF_GUARDED_BY(mu_);
    std::deque<Tensor> pending_ TF_GUARDED_BY(mu_);
  };

  const ExpanderFactory factory_;
};

}  // namespace

Status MakeSampleDataset(OpKernelContext *ctx, const data::DatasetBase *input,
                         SampleDatasetOptions options, data::DatasetBase **dataset) {
  TF_RETURN_IF_ERROR(CheckSampleDataset(options.name, *input));
  *dataset = new SampleDataset(ctx, input, std::move(options));
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
