// MonolithKafkaDataset: messages of Kafka topics, in batches as they come.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/kafka/kafka_reader.h"
#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/kafka/kafka_readers.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::kafka::KafkaFetch;
using ::monolith::kafka::KafkaReader;
using ::monolith::kafka::KafkaSource;
using ::monolith::kafka::Partition;
using ::monolith::kafka::Positions;

REGISTER_OP("MonolithKafkaDataset")
    .Input("topics: string")
    .Input("metadata: string")
    .Input("message_poll_timeout: int64")
    .Input("stream_timeout: int64")
    .Output("handle: variant")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Messages of Kafka topics: elements (message [k], key [k], origin [k], continue_fetch) with k > 0.

An iterator is a consumer of its group and connects when it is asked for its first element. Its
position is that of the next message of every partition it has; an iterator that is restored resumes
there, whatever the group has committed. Saving waits for an element that is being read.

topics: names.
metadata: key=value settings of the consumer, group.id and bootstrap.servers among them.
message_poll_timeout: milliseconds to wait for a message before those that came are handed on.
stream_timeout: the dataset ends when no message came for this many milliseconds; -1: never.
shared_name: iterators of this name share one consumer; their positions cannot be saved.
)doc");

// Members of a group share the partitions: no dispatcher needs to.
class NoSplits final : public data::SplitProvider {
 public:
  Status GetNext(Tensor*, bool* end_of_splits) override {
    *end_of_splits = true;
    return OkStatus();
  }
  Status Reset() override { return OkStatus(); }
  Status Save(std::function<std::string(std::string)>, data::IteratorStateWriter*) override {
    return OkStatus();
  }
  Status Restore(std::function<std::string(std::string)>, data::IteratorStateReader*) override {
    return OkStatus();
  }
};

class KafkaDatasetOp : public data::DatasetOpKernel {
 public:
  explicit KafkaDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  std::string container_;
  std::string shared_name_;
};

class KafkaDatasetOp::Dataset final : public SourceDataset {
 public:
  Dataset(OpKernelContext* ctx, KafkaSource source, int64_t message_poll_timeout,
          int64_t stream_timeout, std::string container, std::string shared_name)
      : SourceDataset(ctx, "KafkaDatasetOp::Dataset", {DT_STRING, DT_STRING, DT_STRING, DT_INT64},
                      {PartialTensorShape({-1}), PartialTensorShape({-1}), PartialTensorShape({-1}),
                       PartialTensorShape({})}),
        source_(std::move(source)),
        message_poll_timeout_(message_poll_timeout),
        stream_timeout_(stream_timeout),
        container_(std::move(container)),
        shared_name_(std::move(shared_name)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override;

  Status MakeSplitProviders(
      std::vector<std::unique_ptr<data::SplitProvider>>* split_providers) const override {
    split_providers->push_back(std::make_unique<NoSplits>());
    return OkStatus();
  }

  int64_t CardinalityInternal(data::CardinalityOptions) const override {
    return data::kUnknownCardinality;
  }

 private:
  class Iterator;

  const KafkaSource source_;
  const int64_t message_poll_timeout_;
  const int64_t stream_timeout_;
  const std::string container_;
  const std::string shared_name_;
};

class KafkaDatasetOp::Dataset::Iterator final : public SourceIterator<Dataset> {
 public:
  explicit Iterator(const Params& params) : SourceIterator<Dataset>(params) {}

  Status Initialize(data::IteratorContext* ctx) override { return cancellation_.Watch(ctx); }

  Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                         bool* end_of_sequence) override {
    mutex_lock lock(mu_);
    if (!is_ended_ && reader_ == nullptr) TF_RETURN_IF_ERROR(Open());
    const auto is_cancelled = [this, ctx] { return cancellation_.IsCancelled(ctx); };
    while (!is_ended_) {
      KafkaFetch fetch;
      const Status status = ReadFetch(reader_.get(), dataset()->message_poll_timeout_,
                                      dataset()->stream_timeout_, is_cancelled, &fetch);
      if (!status.ok()) {
        // The next read starts here, with a consumer of its own.
        Release();
        return status;
      }
      const bool is_last = !fetch.continue_fetch;
      if (!fetch.messages.empty()) {
        std::vector<std::string> origins(fetch.messages.size());
        for (size_t i = 0; i < origins.size(); ++i) origins[i] = fetch.Origin(i);
        out_tensors->push_back(ToTensor(std::move(fetch.messages)));
        out_tensors->push_back(ToTensor(std::move(fetch.keys)));
        out_tensors->push_back(ToTensor(std::move(origins)));
        out_tensors->push_back(Tensor(static_cast<int64_t>(fetch.continue_fetch)));
      }
      if (is_last) {
        is_ended_ = true;
        Release();
      }
      if (!out_tensors->empty()) {
        *end_of_sequence = false;
        return OkStatus();
      }
    }
    *end_of_sequence = true;
    return OkStatus();
  }

 protected:
  Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter* writer) override {
    if (!dataset()->shared_name_.empty()) {
      return errors::Unimplemented("the position of Kafka consumer '", dataset()->shared_name_,
                                   "' cannot be saved: several iterators share it");
    }
    mutex_lock lock(mu_);
    const Positions positions = reader_ == nullptr ? positions_ : reader_->positions();
    const int64_t count = static_cast<int64_t>(positions.size());
    Tensor topics(DT_STRING, TensorShape({count}));
    Tensor partitions(DT_INT64, TensorShape({count}));
    Tensor offsets(DT_INT64, TensorShape({count}));
    int64_t i = 0;
    for (const auto& [partition, offset] : positions) {
      topics.vec<tstring>()(i) = partition.first;
      partitions.vec<int64_t>()(i) = partition.second;
      offsets.vec<int64_t>()(i) = offset;
      ++i;
    }
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "is_ended", static_cast<int64_t>(is_ended_)));
    TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), "topics", topics));
    TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), "partitions", partitions));
    return writer->WriteTensor(prefix(), "offsets", offsets);
  }

  Status RestoreInternal(data::IteratorContext*, data::IteratorStateReader* reader) override {
    if (!dataset()->shared_name_.empty()) {
      return errors::Unimplemented("the position of Kafka consumer '", dataset()->shared_name_,
                                   "' cannot be restored: several iterators share it");
    }
    int64_t is_ended;
    Tensor topics, partitions, offsets;
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "is_ended", &is_ended));
    TF_RETURN_IF_ERROR(reader->ReadTensor(prefix(), "topics", &topics));
    TF_RETURN_IF_ERROR(reader->ReadTensor(prefix(), "partitions", &partitions));
    TF_RETURN_IF_ERROR(reader->ReadTensor(prefix(), "offsets", &offsets));
    if (topics.dtype() != DT_STRING || partitions.dtype() != DT_INT64 ||
        offsets.dtype() != DT_INT64 || topics.dims() != 1 || partitions.shape() != topics.shape() ||
        offsets.shape() != topics.shape()) {
      return errors::DataLoss("the saved position of a Kafka consumer is not one");
    }
    Positions positions;
    for (int64_t i = 0; i < topics.NumElements(); ++i) {
      positions[Partition(topics.vec<tstring>()(i), partitions.vec<int64_t>()(i))] =
          offsets.vec<int64_t>()(i);
    }
    mutex_lock lock(mu_);
    is_ended_ = is_ended != 0;
    reader_.reset();
    positions_ = std::move(positions);
    return OkStatus();
  }

 private:
  Status Open() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    TF_RETURN_IF_ERROR(GetKafkaReader(dataset()->source_, dataset()->container_,
                                      dataset()->shared_name_, &reader_));
    if (dataset()->shared_name_.empty()) reader_->Resume(positions_);
    return OkStatus();
  }

  void Release() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (reader_ == nullptr) return;
    positions_ = reader_->positions();
    reader_.reset();
  }

  IteratorCancellation cancellation_;
  mutex mu_;
  std::shared_ptr<KafkaReader> reader_ TF_GUARDED_BY(mu_);
  Positions positions_ TF_GUARDED_BY(mu_);  // while there is no reader
  bool is_ended_ TF_GUARDED_BY(mu_) = false;
};

std::unique_ptr<data::IteratorBase> KafkaDatasetOp::Dataset::MakeIteratorInternal(
    const string& prefix) const {
  return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::Kafka"});
}

void KafkaDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  std::vector<tstring> topics, metadata;
  int64_t message_poll_timeout = 0, stream_timeout = 0;
  OP_REQUIRES_OK(ctx, data::ParseVectorArgument<tstring>(ctx, "topics", &topics));
  OP_REQUIRES_OK(ctx, data::ParseVectorArgument<tstring>(ctx, "metadata", &metadata));
  OP_REQUIRES_OK(
      ctx, data::ParseScalarArgument<int64_t>(ctx, "message_poll_timeout", &message_poll_timeout));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<int64_t>(ctx, "stream_timeout", &stream_timeout));
  KafkaSource source;
  OP_REQUIRES_OK(
      ctx, ToStatus(::monolith::kafka::ParseSource({topics.begin(), topics.end()},
                                                   {metadata.begin(), metadata.end()}, &source)));
  OP_REQUIRES_OK(ctx,
                 ToStatus(::monolith::kafka::CheckTimeouts(message_poll_timeout, &stream_timeout)));
  *output = new Dataset(ctx, std::move(source), message_poll_timeout, stream_timeout, container_,
                        shared_name_);
}

REGISTER_GUARDED_KERNEL(Name("MonolithKafkaDataset").Device(DEVICE_CPU), KafkaDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
