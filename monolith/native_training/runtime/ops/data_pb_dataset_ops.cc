// PBDataset and InstanceDataset: samples from one file of framed records, or from standard input.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data_conversions.h"
#include "monolith/native_training/runtime/ops/data_record_source.h"
#include "monolith/native_training/runtime/ops/data_sample.h"
#include "monolith/native_training/runtime/ops/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::ByteSource;
using ::monolith::data::HeaderFlags;
using ::monolith::data::ReadResult;
using ::monolith::data::RecordReader;

REGISTER_OP("PBDataset")
    .Input("file_name: string")
    .Input("use_snappy: bool")
    .Input("has_sort_id: bool")
    .Input("kafka_dump: bool")
    .Input("kafka_dump_prefix: bool")
    .Input("buffer_size: int64")
    .Input("lagrangex_header: bool")
    .Input("input_pb_type: string")
    .Input("output_pb_type: string")
    .Input("feature_pruning_type: int32")
    .Input("feature_name_list: string")
    .Input("feature_id_list: int32")
    .Output("handle: variant")
    .Attr("out_type: {variant, string}")
    .Attr("compression_type: int = 0")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The samples of a file.

file_name: the file; empty: standard input.
buffer_size: bytes to read ahead; standard input ends at a larger record.
input_pb_type: instance, example, examplebatch or plaintext: what a record is.
output_pb_type: what an element is.
feature_pruning_type: 0: keep all; 1: drop features; 2: drop raw features.
feature_name_list: columns of an ExampleBatch to keep; empty: all.
feature_id_list: their ids; not needed to read.
out_type: string for plaintext elements, else variant.
compression_type: 0 unknown, 1 none, 2 snappy, 3 zstd, 4 zlib, 5 gzip.
)doc");

REGISTER_OP("InstanceDataset")
    .Input("file_name: string")
    .Input("use_snappy: bool")
    .Input("has_sort_id: bool")
    .Input("kafka_dump: bool")
    .Input("kafka_dump_prefix: bool")
    .Output("handle: variant")
    .Attr("compression_type: int = 0")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The serialized Instances of a file; see PBDataset.
)doc");

constexpr int64_t kDefaultBuffer = 64 << 20;

enum class PbType { kInstance, kExample, kExampleBatch, kPlaintext };

Status ParsePbType(const char* name, const std::string& text, PbType* type) {
  if (text == "plaintext") {
    *type = PbType::kPlaintext;
    return OkStatus();
  }
  SampleType sample_type;
  const Status status = ParseSampleType(name, text, &sample_type);
  if (!status.ok()) {
    return errors::InvalidArgument(name, " is '", text,
                                   "', want instance, example, examplebatch or plaintext");
  }
  *type = sample_type == SampleType::kInstance  ? PbType::kInstance
          : sample_type == SampleType::kExample ? PbType::kExample
                                                : PbType::kExampleBatch;
  return OkStatus();
}

struct ReadOptions {
  std::string file_name;
  HeaderFlags flags;
  Compression compression = Compression::kUnknown;
  int64_t buffer_size = kDefaultBuffer;
  PbType input_type = PbType::kInstance;
  PbType output_type = PbType::kPlaintext;
  Pruning pruning = Pruning::kRawFeature;
  std::vector<std::string> columns;
};

// Turns records into elements. One ExampleBatch may give many.
class SampleReader {
 public:
  explicit SampleReader(const ReadOptions& options)
      : options_(options), columns_(options.columns.begin(), options.columns.end()) {}

  Status Open(Env* env, int64_t offset, int64_t row) {
    TF_RETURN_IF_ERROR(OpenRecordSource(env, options_.file_name, options_.compression,
                                        options_.buffer_size, offset, &source_));
    reader_ = std::make_unique<RecordReader>(source_.get(), options_.flags);
    reader_->set_offset(offset);
    batch_rows_ = 0;
    if (row == 0) return OkStatus();
    bool end;
    TF_RETURN_IF_ERROR(ReadBatch(&end));
    if (end || row > batch_rows_) {
      return errors::DataLoss(Name(), ": cannot resume at row ", row, " of the record at offset ",
                              offset, ", which has ", batch_rows_);
    }
    next_row_ = row;
    return OkStatus();
  }

  // Where Open has to continue.
  int64_t offset() const {
    return next_row_ < batch_rows_ ? reader_->record_offset() : reader_->offset();
  }
  int64_t row() const { return next_row_ < batch_rows_ ? next_row_ : 0; }

  Status Next(Tensor* element, bool* end) {
    const bool splits =
        options_.input_type == PbType::kExampleBatch &&
        (options_.output_type == PbType::kExample || options_.output_type == PbType::kInstance);
    if (splits) return NextRow(element, end);
    std::string payload;
    uint32_t key;
    TF_RETURN_IF_ERROR(ReadRecord(&payload, &key, end));
    if (*end) return OkStatus();
    if (options_.output_type == PbType::kPlaintext) {
      *element = Tensor(tstring(payload));
      return OkStatus();
    }
    switch (options_.input_type) {
      case PbType::kInstance:
        return FromInstance(payload, key, element);
      case PbType::kExample:
        return FromExample(payload, key, element);
      default:
        return FromBatch(payload, key, element);
    }
  }

 private:
  std::string Name() const { return options_.file_name.empty() ? "stdin" : options_.file_name; }

  Status ReadRecord(std::string* payload, uint32_t* key, bool* end) {
    const ReadResult result = reader_->Next(payload, key);
    *end = result == ReadResult::kEnd;
    return RecordError(Name(), *reader_, result);
  }

  template <typename Proto>
  Status Parse(const std::string& payload, uint32_t key, Proto* proto) const {
    if (!proto->ParseFromString(payload)) {
      return errors::FailedPrecondition("Failed to parse the ", SampleTraits<Proto>::kName, ". ",
                                        Name(), ", record at offset ", reader_->record_offset());
    }
    proto->set_data_source_key(key);
    return OkStatus();
  }

  Status FromInstance(const std::string& payload, uint32_t key, Tensor* element) const {
    Instance instance;
    TF_RETURN_IF_ERROR(Parse(payload, key, &instance));
    if (options_.output_type == PbType::kExample) {
      *element = MakeSampleTensor(InstanceToExample(instance));
    } else {
      *element = MakeSampleTensor(std::move(instance));
    }
    return OkStatus();
  }

  Status FromExample(const std::string& payload, uint32_t key, Tensor* element) const {
    Example example;
    TF_RETURN_IF_ERROR(Parse(payload, key, &example));
    if (options_.output_type == PbType::kInstance) {
      Instance instance;
      TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
      *element = MakeSampleTensor(std::move(instance));
      return OkStatus();
    }
    TF_RETURN_IF_ERROR(ExtendExample(&example));
    Prune(options_.pruning, &example);
    *element = MakeSampleTensor(std::move(example));
    return OkStatus();
  }

  Status ParseBatch(const std::string& payload, uint32_t key, ExampleBatch* batch) const {
    TF_RETURN_IF_ERROR(Parse(payload, key, batch));
    if (batch->batch_size() < 0) {
      return errors::FailedPrecondition("Failed to parse the ExampleBatch. ", Name(),
                                        ": batch_size is ", batch->batch_size());
    }
    Prune(options_.pruning, batch);
    if (columns_.empty()) return OkStatus();
    auto* columns = batch->mutable_named_feature_list();
    int kept = 0;
    for (int i = 0; i < columns->size(); ++i) {
      const std::string& name = columns->Get(i).name();
      const bool reserved = name == kLineIdName || name == kLabelName || name == kWeightName;
      if (reserved || columns_.contains(name)) columns->SwapElements(kept++, i);
    }
    columns->DeleteSubrange(kept, columns->size() - kept);
    return OkStatus();
  }

  Status FromBatch(const std::string& payload, uint32_t key, Tensor* element) const {
    ExampleBatch batch;
    TF_RETURN_IF_ERROR(ParseBatch(payload, key, &batch));
    *element = MakeSampleTensor(std::move(batch));
    return OkStatus();
  }

  Status ReadBatch(bool* end) {
    std::string payload;
    uint32_t key;
    TF_RETURN_IF_ERROR(ReadRecord(&payload, &key, end));
    if (*end) return OkStatus();
    batch_.Clear();
    TF_RETURN_IF_ERROR(ParseBatch(payload, key, &batch_));
    batch_rows_ = batch_.batch_size();
    next_row_ = 0;
    return OkStatus();
  }

  Status NextRow(Tensor* element, bool* end) {
    *end = false;
    while (next_row_ >= batch_rows_) {
      TF_RETURN_IF_ERROR(ReadBatch(end));
      if (*end) return OkStatus();
    }
    Example example;
    TF_RETURN_IF_ERROR(ExampleBatchRow(batch_, next_row_, &example));
    ++next_row_;
    if (options_.output_type == PbType::kInstance) {
      Instance instance;
      TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
      *element = MakeSampleTensor(std::move(instance));
    } else {
      *element = MakeSampleTensor(std::move(example));
    }
    return OkStatus();
  }

  const ReadOptions& options_;
  const absl::flat_hash_set<std::string> columns_;
  std::unique_ptr<ByteSource> source_;
  std::unique_ptr<RecordReader> reader_;
  ExampleBatch batch_;
  int64_t batch_rows_ = 0;
  int64_t next_row_ = 0;
};

Status CheckTypes(const ReadOptions& options) {
  if (options.output_type == PbType::kPlaintext || options.output_type == options.input_type) {
    return OkStatus();
  }
  if (options.input_type == PbType::kPlaintext || options.output_type == PbType::kExampleBatch) {
    return errors::InvalidArgument(
        "output_pb_type: plaintext cannot become a sample, and only an ExampleBatch can be "
        "returned as one");
  }
  return OkStatus();
}

class PBDatasetOp final : public data::DatasetOpKernel {
 public:
  explicit PBDatasetOp(OpKernelConstruction* ctx)
      : DatasetOpKernel(ctx), instances_only_(ctx->def().op() == "InstanceDataset") {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("compression_type", &compression_type_));
    out_type_ = DT_STRING;
    if (!instances_only_) OP_REQUIRES_OK(ctx, ctx->GetAttr("out_type", &out_type_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  static Status ParseSampleArguments(OpKernelContext* ctx, ReadOptions* options) {
    tstring input_type, output_type;
    int32_t pruning = 0;
    std::vector<tstring> columns;
    TF_RETURN_IF_ERROR(
        data::ParseScalarArgument<int64_t>(ctx, "buffer_size", &options->buffer_size));
    TF_RETURN_IF_ERROR(
        data::ParseScalarArgument<bool>(ctx, "lagrangex_header", &options->flags.lagrangex_header));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<tstring>(ctx, "input_pb_type", &input_type));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<tstring>(ctx, "output_pb_type", &output_type));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<int32_t>(ctx, "feature_pruning_type", &pruning));
    TF_RETURN_IF_ERROR(data::ParseVectorArgument<tstring>(ctx, "feature_name_list", &columns));
    TF_RETURN_IF_ERROR(ParsePbType("input_pb_type", input_type, &options->input_type));
    TF_RETURN_IF_ERROR(ParsePbType("output_pb_type", output_type, &options->output_type));
    if (pruning < 0 || pruning > 2) {
      return errors::InvalidArgument("feature_pruning_type is ", pruning, ", want 0 to 2");
    }
    if (options->buffer_size <= 0) {
      return errors::InvalidArgument("buffer_size is ", options->buffer_size, ", want more than 0");
    }
    options->pruning = static_cast<Pruning>(pruning);
    options->columns.assign(columns.begin(), columns.end());
    return OkStatus();
  }

  const bool instances_only_;
  int64_t compression_type_;
  DataType out_type_;
};

class PBDatasetOp::Dataset final : public data::DatasetBase {
 public:
  Dataset(OpKernelContext* ctx, ReadOptions options, std::vector<Tensor> inputs, DataType out_type,
          int64_t compression_type, bool instances_only)
      : DatasetBase(data::DatasetContext(ctx)),
        options_(std::move(options)),
        inputs_(std::move(inputs)),
        compression_type_(compression_type),
        instances_only_(instances_only),
        dtypes_({out_type}),
        shapes_({PartialTensorShape({})}) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::PB"});
  }

  const DataTypeVector& output_dtypes() const override { return dtypes_; }
  const std::vector<PartialTensorShape>& output_shapes() const override { return shapes_; }
  string DebugString() const override { return "PBDatasetOp::Dataset"; }
  Status InputDatasets(std::vector<const DatasetBase*>*) const override { return OkStatus(); }
  Status CheckExternalState() const override {
    if (!options_.file_name.empty()) return OkStatus();
    return errors::FailedPrecondition("standard input cannot be read twice");
  }

 protected:
  Status AsGraphDefInternal(data::SerializationContext*, DatasetGraphDefBuilder* b,
                            Node** output) const override {
    std::vector<Node*> nodes;
    for (const Tensor& input : inputs_) {
      Node* node;
      TF_RETURN_IF_ERROR(b->AddTensor(input, &node));
      nodes.push_back(node);
    }
    std::vector<std::pair<StringPiece, AttrValue>> attrs(1);
    attrs[0].first = "compression_type";
    b->BuildAttrValue(compression_type_, &attrs[0].second);
    if (!instances_only_) {
      attrs.emplace_back("out_type", AttrValue());
      b->BuildAttrValue(dtypes_[0], &attrs[1].second);
    }
    return b->AddDataset(this, nodes, attrs, output);
  }

 private:
  class Iterator final : public data::DatasetIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Dataset>(params) {}

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      if (reader_ == nullptr) TF_RETURN_IF_ERROR(Open(ctx, 0, 0));
      Tensor element;
      TF_RETURN_IF_ERROR(reader_->Next(&element, end_of_sequence));
      if (*end_of_sequence) return OkStatus();
      ++num_samples_;
      out_tensors->push_back(std::move(element));
      return OkStatus();
    }

   protected:
    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*,
                                                  data::model::Node::Args args) const override {
      return data::model::MakeSourceNode(std::move(args));
    }

    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter* writer) override {
      mutex_lock lock(mu_);
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "num_random_samples", num_samples_));
      TF_RETURN_IF_ERROR(
          writer->WriteScalar(prefix(), "offset", reader_ == nullptr ? 0 : reader_->offset()));
      return writer->WriteScalar(prefix(), "row", reader_ == nullptr ? 0 : reader_->row());
    }

    Status RestoreInternal(data::IteratorContext* ctx, data::IteratorStateReader* reader) override {
      mutex_lock lock(mu_);
      int64_t offset, row;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "num_random_samples", &num_samples_));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "offset", &offset));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "row", &row));
      // Nothing of standard input can be read again.
      const bool seekable = !dataset()->options_.file_name.empty();
      return Open(ctx, seekable ? offset : 0, seekable ? row : 0);
    }

   private:
    Status Open(data::IteratorContext* ctx, int64_t offset, int64_t row)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      auto reader = std::make_unique<SampleReader>(dataset()->options_);
      TF_RETURN_IF_ERROR(reader->Open(ctx->env(), offset, row));
      reader_ = std::move(reader);
      return OkStatus();
    }

    mutex mu_;
    std::unique_ptr<SampleReader> reader_ TF_GUARDED_BY(mu_);
    int64_t num_samples_ TF_GUARDED_BY(mu_) = 0;
  };

  const ReadOptions options_;
  const std::vector<Tensor> inputs_;
  const int64_t compression_type_;
  const bool instances_only_;
  const DataTypeVector dtypes_;
  const std::vector<PartialTensorShape> shapes_;
};

void PBDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  ReadOptions options;
  tstring file_name;
  bool use_snappy;
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "file_name", &file_name));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<bool>(ctx, "use_snappy", &use_snappy));
  OP_REQUIRES_OK(ctx,
                 data::ParseScalarArgument<bool>(ctx, "has_sort_id", &options.flags.has_sort_id));
  OP_REQUIRES_OK(ctx,
                 data::ParseScalarArgument<bool>(ctx, "kafka_dump", &options.flags.kafka_dump));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<bool>(ctx, "kafka_dump_prefix",
                                                      &options.flags.kafka_dump_prefix));
  options.file_name = file_name;
  OP_REQUIRES_OK(ctx, ResolveCompression(use_snappy, compression_type_, &options.compression));
  if (!instances_only_) OP_REQUIRES_OK(ctx, ParseSampleArguments(ctx, &options));
  OP_REQUIRES_OK(ctx, CheckTypes(options));
  const DataType want = options.output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
  OP_REQUIRES(ctx, out_type_ == want,
              errors::InvalidArgument("out_type is ", DataTypeString(out_type_), ", want ",
                                      DataTypeString(want), " for this output_pb_type"));
  std::vector<Tensor> inputs;
  for (int i = 0; i < ctx->num_inputs(); ++i) inputs.push_back(ctx->input(i));
  *output = new Dataset(ctx, std::move(options), std::move(inputs), out_type_, compression_type_,
                        instances_only_);
}

REGISTER_KERNEL_BUILDER(Name("PBDataset").Device(DEVICE_CPU), PBDatasetOp);
REGISTER_KERNEL_BUILDER(Name("InstanceDataset").Device(DEVICE_CPU), PBDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
