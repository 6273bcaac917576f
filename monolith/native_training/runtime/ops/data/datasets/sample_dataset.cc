#include "monolith/native_training/runtime/ops/data/datasets/sample_dataset.h"

#include <cstdint>

#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

class SampleDataset final : public data::DatasetBase {
 public:
  SampleDataset(OpKernelContext *ctx, const data::DatasetBase *input, SampleDatasetOptions options)
      : DatasetBase(data::DatasetContext(ctx)), input_(input), options_(std::move(options)) {
    input_->Ref();
  }

  ~SampleDataset() override { input_->Unref(); }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string &prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::" + options_.name});
  }

  const DataTypeVector &output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<PartialTensorShape> &output_shapes() const override {
    return input_->output_shapes();
  }
  string DebugString() const override { return options_.name; }
  Status InputDatasets(std::vector<const DatasetBase *> *inputs) const override {
    inputs->push_back(input_);
    return OkStatus();
  }
  Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  Status AsGraphDefInternal(data::SerializationContext *ctx, DatasetGraphDefBuilder *b,
                            Node **output) const override {
    Node *node = nullptr;
    TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, input_, &node));
    std::vector<Node *> nodes = {node};
    for (const Tensor &tensor : options_.extra) {
      TF_RETURN_IF_ERROR(b->AddDatasetOrTensor(ctx, tensor, &node));
      nodes.push_back(node);
    }
    return b->AddDataset(this, nodes, GraphAttrs(options_.attrs), output);
  }

 private:
  class Iterator final : public data::DatasetIterator<SampleDataset> {
   public:
    explicit Iterator(const Params &params) : DatasetIterator<SampleDataset>(params) {}

    Status Initialize(data::IteratorContext *ctx) override {
      mutex_lock lock(mu_);
      expander_ = dataset()->options_.factory();
      return dataset()->input_->MakeIterator(ctx, this, prefix(), &input_iterator_);
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
    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext *,
                                                  data::model::Node::Args args) const override {
      return data::model::MakeUnknownRatioNode(std::move(args));
    }

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

  const data::DatasetBase *const input_;
  const SampleDatasetOptions options_;
};

}  // namespace

DatasetAttrs AttrsOf(const NodeDef &def) {
  DatasetAttrs attrs;
  for (const auto &[name, value] : def.attr()) {
    if (name[0] != '_') attrs.emplace_back(name, value);
  }
  return attrs;
}

std::vector<std::pair<StringPiece, AttrValue>> GraphAttrs(const DatasetAttrs &attrs) {
  return {attrs.begin(), attrs.end()};
}

Status MakeSampleDataset(OpKernelContext *ctx, const data::DatasetBase *input,
                         SampleDatasetOptions options, data::DatasetBase **dataset) {
  const bool variants = input->output_dtypes() == DataTypeVector{DT_VARIANT} &&
                        input->output_shapes()[0].IsCompatibleWith(PartialTensorShape({}));
  if (!variants) {
    return errors::InvalidArgument("the input of ", options.name, " has elements of type ",
                                   DataTypeVectorString(input->output_dtypes()),
                                   ", want one scalar variant: a sample");
  }
  *dataset = new SampleDataset(ctx, input, std::move(options));
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
