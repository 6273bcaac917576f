// MonolithKafkaStreamDataset: batches of samples from Kafka, each with the positions after it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/kafka/kafka_reader.h"
#include "monolith/native_training/runtime/kafka/recent_ids.h"
#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/kafka/kafka_readers.h"
#include "monolith/native_training/runtime/ops/data/samples/message_decoder.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/hash.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::kafka::KafkaFetch;
using ::monolith::kafka::KafkaReader;
using ::monolith::kafka::KafkaSource;
using ::monolith::kafka::kEndless;
using ::monolith::kafka::Partition;
using ::monolith::kafka::Positions;
using ::monolith::kafka::RecentIds;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

REGISTER_OP("MonolithKafkaStreamDataset")
    .Input("topics: string")
    .Input("metadata: string")
    .Input("positions: int64")
    .Input("batch_size: int64")
    .Input("linger_millis: int64")
    .Input("idle_millis: int64")
    .Input("stream_timeout: int64")
    .Input("num_workers: int64")
    .Input("worker_index: int64")
    .Input("history: int64")
    .Output("handle: variant") MONOLITH_MESSAGE_DECODER_ATTRS.SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Batches of samples from Kafka topics: elements (counts [4], positions [m, 2], samples [k]).

A worker reads the partitions p with p % num_workers == worker_index, joins no group and commits
nothing. positions of an element are pairs (i, next offset) of all partitions it reads, i the index
into a topic's row of the input of that name, as they are after the samples of this element. Servers
that the input has at different positions have applied different messages: an element has only such
as the same servers lack. counts are: samples,
messages that could not be decoded, samples left out because one with the same req_id came before,
and the newest req_time. A message that cannot be decoded is named in the log and left out. When no
message comes the dataset gives an empty element every idle_millis.

topics: names.
metadata: key=value settings of the consumer, group.id and bootstrap.servers among them.
positions: [servers, topics, partitions], where each server stands. Reading begins at the smallest;
  -1: where the group stands, else where auto.offset.reset says.
batch_size: most messages of an element.
linger_millis: how long an element may wait for more messages after its first.
idle_millis: how long to wait for a message before an empty element is given.
stream_timeout: the dataset ends when no message came for this many milliseconds; -1: never.
history: how many messages before its position a partition is read again to learn their req_id, and
  among how many of the last messages of a partition a repeated one is found.
)doc");

constexpr int64_t kMaxSliceMillis = 200;  // how often reading looks whether it is cancelled
constexpr int64_t kMaxNamedBad = 100;     // after this many, one bad message in a thousand is named
constexpr int64_t kMaxMillis = std::numeric_limits<int32_t>::max();

struct StreamOptions {
  KafkaSource source;
  Positions start;
  // Where each server stands in the partitions in which not all stand at the start.
  std::map<Partition, std::vector<int64_t>> servers;
  int64_t num_slots = 0;  // partitions of a topic in `positions`
  int64_t linger_millis = 0;
  int64_t idle_millis = 0;
  int64_t stream_timeout = kEndless;
};

// Cuts messages into runs that the same servers have applied already.
//
// After a kill some servers may have applied what others have not. A server applies a batch as a
// whole or not at all, so none may have messages of both kinds.
class AppliedRuns {
 public:
  explicit AppliedRuns(const std::map<Partition, std::vector<int64_t>>& servers)
      : servers_(servers) {}

  // Returns the end of the run that begins with message `begin`; messages that are read again to
  // learn their ids belong to any.
  size_t End(const KafkaFetch& fetch, size_t begin) const {
    const size_t size = fetch.messages.size();
    if (servers_.empty()) return size;
    size_t end = begin;
    while (end < size && fetch.is_history[end]) ++end;
    if (end == size) return size;
    const std::vector<bool> applied = AppliedBy(fetch, end);
    while (end < size && (fetch.is_history[end] || AppliedBy(fetch, end) == applied)) ++end;
    return end;
  }

 private:
  // Tells for each server whether it has applied the message; empty if none has.
  std::vector<bool> AppliedBy(const KafkaFetch& fetch, size_t i) const {
    std::vector<bool> applied;
    const auto found = servers_.find(fetch.partitions[i]);
    if (found == servers_.end()) return applied;
    bool any = false;
    for (const int64_t position : found->second) {
      applied.push_back(fetch.offsets[i] < position);
      any |= applied.back();
    }
    if (!any) applied.clear();
    return applied;
  }

  const std::map<Partition, std::vector<int64_t>>& servers_;
};

const LineId* LineIdOf(const Tensor& sample) {
  if (sample.dtype() != DT_VARIANT) return nullptr;
  const auto variant_scalar = sample.scalar<Variant>();
  const Variant& variant = variant_scalar();
  if (const auto* held = variant.get<SampleVariant<Example>>()) return &held->proto().line_id();
  if (const auto* held = variant.get<SampleVariant<Instance>>()) return &held->proto().line_id();
  return nullptr;
}

class KafkaStreamDatasetOp : public data::DatasetOpKernel {
 public:
  explicit KafkaStreamDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, decoder_.InitWithOptions(ctx));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  MessageDecoder decoder_;
};

class KafkaStreamDatasetOp::Dataset final : public SourceDataset {
 public:
  Dataset(OpKernelContext* ctx, StreamOptions options, MessageDecoder decoder)
      : SourceDataset(
            ctx, "KafkaStreamDatasetOp::Dataset", {DT_INT64, DT_INT64, decoder.out_type()},
            {PartialTensorShape({4}), PartialTensorShape({-1, 2}), PartialTensorShape({-1})}),
        options_(std::move(options)),
        decoder_(std::move(decoder)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override;

  int64_t CardinalityInternal(data::CardinalityOptions) const override {
    return data::kUnknownCardinality;
  }

 private:
  class Iterator;

  const StreamOptions options_;
  const MessageDecoder decoder_;
};

class KafkaStreamDatasetOp::Dataset::Iterator final : public SourceIterator<Dataset> {
 public:
  explicit Iterator(const Params& params) : SourceIterator<Dataset>(params) {}

  Status Initialize(data::IteratorContext* ctx) override { return cancellation_.Watch(ctx); }

  Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                         bool* end_of_sequence) override {
    mutex_lock lock(mu_);
    *end_of_sequence = true;
    if (is_ended_) return OkStatus();
    const StreamOptions& options = dataset()->options_;
    if (reader_ == nullptr) {
      TF_RETURN_IF_ERROR(GetKafkaReader(options.source, "", "", &reader_));
      reader_->Resume(options.start);
      last_message_ = Clock::now();
    }
    std::vector<Tensor> samples;
    int64_t newest = 0;
    if (next_ == fetch_.messages.size()) {
      fetch_ = {};
      next_ = 0;
      TF_RETURN_IF_ERROR(Collect(ctx, &fetch_));
    }
    const bool is_silent = fetch_.messages.empty();
    const size_t end = AppliedRuns(options.servers).End(fetch_, next_);
    for (; next_ < end; ++next_) Decode(next_, &samples, &newest);
    if (!is_silent) {
      last_message_ = Clock::now();
    } else if (options.stream_timeout != kEndless &&
               Clock::now() - last_message_ >= milliseconds(options.stream_timeout)) {
      is_ended_ = true;
      reader_.reset();
      return OkStatus();
    }
    const int64_t num_samples = static_cast<int64_t>(samples.size());
    Tensor batch = dataset()->decoder_.Batch(std::move(samples));
    Tensor positions;
    TF_RETURN_IF_ERROR(PositionsTensor(&positions));
    Tensor counts(DT_INT64, TensorShape({4}));
    counts.vec<int64_t>()(0) = num_samples;
    counts.vec<int64_t>()(1) = num_bad_;
    counts.vec<int64_t>()(2) = num_repeated_;
    counts.vec<int64_t>()(3) = newest;
    // An empty element is not trained on, so the next one says where it has got to, and this too.
    if (num_samples > 0) num_bad_ = num_repeated_ = 0;
    *out_tensors = {std::move(counts), std::move(positions), std::move(batch)};
    *end_of_sequence = false;
    return OkStatus();
  }

 protected:
  Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter*) override {
    return errors::Unimplemented(
        "the iterator of a Kafka stream is not saved: its positions travel with the elements");
  }

  Status RestoreInternal(data::IteratorContext*, data::IteratorStateReader*) override {
    return errors::Unimplemented("the iterator of a Kafka stream cannot be restored");
  }

 private:
  // Waits for a first message until the stream counts as idle, and a little for more.
  Status Collect(data::IteratorContext* ctx, KafkaFetch* fetch) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const StreamOptions& options = dataset()->options_;
    const auto millis_until = [](Clock::time_point deadline) {
      return static_cast<int64_t>(
          std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count());
    };
    Clock::time_point deadline = Clock::now() + milliseconds(options.idle_millis);
    while (true) {
      if (cancellation_.IsCancelled(ctx)) return errors::Cancelled("reading Kafka was cancelled");
      const bool was_empty = fetch->messages.empty();
      const int64_t left = millis_until(deadline);
      if (left <= 0) return OkStatus();
      const int64_t room = options.source.batch_size - static_cast<int64_t>(fetch->messages.size());
      TF_RETURN_IF_ERROR(ToStatus(reader_->Collect(room, std::min(left, kMaxSliceMillis), fetch)));
      if (static_cast<int64_t>(fetch->messages.size()) >= options.source.batch_size) {
        return OkStatus();
      }
      if (was_empty && !fetch->messages.empty()) {
        deadline = Clock::now() + milliseconds(options.linger_millis);
      }
    }
  }

  // Appends the samples of message `i`, which is used up.
  void Decode(size_t i, std::vector<Tensor>* samples, int64_t* newest)
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    decoded_.clear();
    // The log names the origin.
    const Status status =
        dataset()->decoder_.Decode(std::move(fetch_.messages[i]), "message", &decoded_);
    const bool is_history = fetch_.is_history[i];
    if (!status.ok()) {
      if (is_history) return;
      ++num_bad_;
      ++total_bad_;
      if (total_bad_ <= kMaxNamedBad || total_bad_ % 1000 == 0) {
        LOG(WARNING) << "Skipped a message that cannot be read, the " << total_bad_
                     << ". of this reader: " << fetch_.Origin(i) << ": " << status.message();
      }
      return;
    }
    const int64_t limit = dataset()->options_.source.history;
    RecentIds& recent = recent_.try_emplace(fetch_.partitions[i], limit).first->second;
    for (Tensor& sample : decoded_) {
      const LineId* const line_id = LineIdOf(sample);
      if (limit > 0 && line_id != nullptr && !line_id->req_id().empty() &&
          !recent.Add(Hash64(line_id->req_id()))) {
        num_repeated_ += !is_history;
        continue;
      }
      if (is_history) continue;
      if (line_id != nullptr) *newest = std::max(*newest, line_id->req_time());
      samples->push_back(std::move(sample));
    }
  }

  Status PositionsTensor(Tensor* tensor) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Positions positions = reader_->positions();
    const StreamOptions& options = dataset()->options_;
    // Messages that wait for the next element count as not read.
    for (size_t i = fetch_.messages.size(); i-- > next_;) {
      const auto position = positions.find(fetch_.partitions[i]);
      if (position != positions.end() && !fetch_.is_history[i]) {
        position->second = fetch_.offsets[i];
      }
    }
    *tensor = Tensor(DT_INT64, TensorShape({static_cast<int64_t>(positions.size()), 2}));
    auto matrix = tensor->matrix<int64_t>();
    int64_t row = 0;
    for (const auto& [partition, offset] : positions) {
      if (partition.second >= options.num_slots) {
        return errors::InvalidArgument("topic ", partition.first, " has a partition ",
                                       partition.second, ", want less than ", options.num_slots);
      }
      const auto topic =
          std::find(options.source.topics.begin(), options.source.topics.end(), partition.first);
      matrix(row, 0) =
          (topic - options.source.topics.begin()) * options.num_slots + partition.second;
      matrix(row, 1) = offset;
      ++row;
    }
    return OkStatus();
  }

  IteratorCancellation cancellation_;
  mutex mu_;
  std::shared_ptr<KafkaReader> reader_ TF_GUARDED_BY(mu_);
  KafkaFetch fetch_ TF_GUARDED_BY(mu_);
  size_t next_ TF_GUARDED_BY(mu_) = 0;  // message of `fetch_`
  std::map<Partition, RecentIds> recent_ TF_GUARDED_BY(mu_);
  std::vector<Tensor> decoded_ TF_GUARDED_BY(mu_);  // of one message
  Clock::time_point last_message_ TF_GUARDED_BY(mu_);
  int64_t total_bad_ TF_GUARDED_BY(mu_) = 0;
  // Since the last element that has samples.
  int64_t num_bad_ TF_GUARDED_BY(mu_) = 0;
  int64_t num_repeated_ TF_GUARDED_BY(mu_) = 0;
  bool is_ended_ TF_GUARDED_BY(mu_) = false;
};

std::unique_ptr<data::IteratorBase> KafkaStreamDatasetOp::Dataset::MakeIteratorInternal(
    const string& prefix) const {
  return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::KafkaStream"});
}

Status ParseNumber(OpKernelContext* ctx, const char* name, int64_t low, int64_t high,
                   int64_t* number) {
  TF_RETURN_IF_ERROR(data::ParseScalarArgument<int64_t>(ctx, name, number));
  if (*number < low || *number > high) {
    return errors::InvalidArgument(name, " is ", *number, ", want ", low, " to ", high);
  }
  return OkStatus();
}

Status ParseOptions(OpKernelContext* ctx, StreamOptions* options) {
  std::vector<tstring> topics, metadata;
  TF_RETURN_IF_ERROR(data::ParseVectorArgument<tstring>(ctx, "topics", &topics));
  TF_RETURN_IF_ERROR(data::ParseVectorArgument<tstring>(ctx, "metadata", &metadata));
  KafkaSource* const source = &options->source;
  TF_RETURN_IF_ERROR(ToStatus(::monolith::kafka::ParseSource(
      {topics.begin(), topics.end()}, {metadata.begin(), metadata.end()}, source)));
  source->settings["enable.auto.commit"] = "false";
  constexpr int64_t kMaxCount = int64_t{1} << 31;
  TF_RETURN_IF_ERROR(ParseNumber(ctx, "batch_size", 1, 1 << 24, &source->batch_size));
  TF_RETURN_IF_ERROR(ParseNumber(ctx, "linger_millis", 0, kMaxMillis, &options->linger_millis));
  TF_RETURN_IF_ERROR(ParseNumber(ctx, "idle_millis", 1, kMaxMillis, &options->idle_millis));
  TF_RETURN_IF_ERROR(
      ParseNumber(ctx, "stream_timeout", kEndless, kMaxMillis, &options->stream_timeout));
  TF_RETURN_IF_ERROR(ParseNumber(ctx, "num_workers", 1, kMaxCount, &source->num_workers));
  TF_RETURN_IF_ERROR(
      ParseNumber(ctx, "worker_index", 0, source->num_workers - 1, &source->worker_index));
  TF_RETURN_IF_ERROR(ParseNumber(ctx, "history", 0, kMaxCount, &source->history));
  const Tensor* positions;
  TF_RETURN_IF_ERROR(ctx->input("positions", &positions));
  if (positions->dims() != 3 || positions->dim_size(0) < 1 ||
      positions->dim_size(1) != static_cast<int64_t>(topics.size())) {
    return errors::InvalidArgument("positions has shape ", positions->shape().DebugString(),
                                   ", want [servers, ", topics.size(), ", partitions]");
  }
  options->num_slots = positions->dim_size(2);
  const auto cube = positions->tensor<int64_t, 3>();
  std::vector<int64_t> servers(static_cast<size_t>(cube.dimension(0)));
  for (int64_t i = 0; i < cube.dimension(1); ++i) {
    for (int64_t j = 0; j < cube.dimension(2); ++j) {
      for (size_t s = 0; s < servers.size(); ++s) servers[s] = cube(s, i, j);
      const auto [low, high] = std::minmax_element(servers.begin(), servers.end());
      const Partition partition(source->topics[i], static_cast<int32_t>(j));
      if (*low >= 0) options->start[partition] = *low;
      if (*low < *high) options->servers[partition] = servers;
    }
  }
  return OkStatus();
}

void KafkaStreamDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  StreamOptions options;
  OP_REQUIRES_OK(ctx, ParseOptions(ctx, &options));
  *output = new Dataset(ctx, std::move(options), decoder_);
}

REGISTER_GUARDED_KERNEL(Name("MonolithKafkaStreamDataset").Device(DEVICE_CPU),
                        KafkaStreamDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
