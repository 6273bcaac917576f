// PBDataset and InstanceDataset: samples from one file of framed records, or from standard input.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/samples/record_source.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_reader.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::ByteSource;

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

struct ReadOptions {
  std::string file_name;
  Compression compression = Compression::kUnknown;
  int64_t buffer_size = kDefaultBuffer;
  SampleReadOptions samples;
};

class PBDatasetOp : public data::DatasetOpKernel {
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
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<bool>(ctx, "lagrangex_header",
                                                       &options->samples.flags.lagrangex_header));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<tstring>(ctx, "input_pb_type", &input_type));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<tstring>(ctx, "output_pb_type", &output_type));
    TF_RETURN_IF_ERROR(data::ParseScalarArgument<int32_t>(ctx, "feature_pruning_type", &pruning));
    TF_RETURN_IF_ERROR(data::ParseVectorArgument<tstring>(ctx, "feature_name_list", &columns));
    TF_RETURN_IF_ERROR(ParsePbType("input_pb_type", input_type, &options->samples.input_type));
    TF_RETURN_IF_ERROR(ParsePbType("output_pb_type", output_type, &options->samples.output_type));
    if (pruning < 0 || pruning > 2) {
      return errors::InvalidArgument("feature_pruning_type is ", pruning, ", want 0 to 2");
    }
    if (options->buffer_size <= 0) {
      return errors::InvalidArgument("buffer_size is ", options->buffer_size, ", want more than 0");
    }
    options->samples.pruning = static_cast<Pruning>(pruning);
    options->samples.columns.assign(columns.begin(), columns.end());
    return OkStatus();
  }

  const bool instances_only_;
  int64_t compression_type_;
  DataType out_type_;
};

class PBDatasetOp::Dataset final : public SourceDataset {
 public:
  Dataset(OpKernelContext* ctx, ReadOptions options, DataType out_type)
      : SourceDataset(ctx, "PBDatasetOp::Dataset", {out_type}, {PartialTensorShape({})}),
        options_(std::move(options)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::PB"});
  }

  Status CheckExternalState() const override {
    if (!options_.file_name.empty()) return OkStatus();
    return errors::FailedPrecondition("standard input cannot be read twice");
  }

 private:
  class Iterator final : public SourceIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : SourceIterator<Dataset>(params) {}

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      if (reader_ == nullptr) TF_RETURN_IF_ERROR(Open(ctx, 0, 0));
      Tensor element;
      TF_RETURN_IF_ERROR(CatchExceptions([&]() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return reader_->Next(&element, end_of_sequence);
      }));
      if (*end_of_sequence) return OkStatus();
      ++num_samples_;
      out_tensors->push_back(std::move(element));
      return OkStatus();
    }

   protected:
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
      const ReadOptions& options = dataset()->options_;
      std::unique_ptr<ByteSource> source;
      TF_RETURN_IF_ERROR(OpenRecordSource(ctx->env(), options.file_name, options.compression,
                                          options.buffer_size, offset, &source));
      auto reader = std::make_unique<SampleReader>(
          options.samples, options.file_name.empty() ? "stdin" : options.file_name);
      TF_RETURN_IF_ERROR(reader->Open(std::move(source), offset, row));
      reader_ = std::move(reader);
      return OkStatus();
    }

    mutex mu_;
    std::unique_ptr<SampleReader> reader_ TF_GUARDED_BY(mu_);
    int64_t num_samples_ TF_GUARDED_BY(mu_) = 0;
  };

  const ReadOptions options_;
};

void PBDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  ReadOptions options;
  tstring file_name;
  bool use_snappy;
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "file_name", &file_name));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<bool>(ctx, "use_snappy", &use_snappy));
  OP_REQUIRES_OK(
      ctx, data::ParseScalarArgument<bool>(ctx, "has_sort_id", &options.samples.flags.has_sort_id));
  OP_REQUIRES_OK(
      ctx, data::ParseScalarArgument<bool>(ctx, "kafka_dump", &options.samples.flags.kafka_dump));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<bool>(ctx, "kafka_dump_prefix",
                                                      &options.samples.flags.kafka_dump_prefix));
  options.file_name = file_name;
  OP_REQUIRES_OK(ctx, ResolveCompression(use_snappy, compression_type_, &options.compression));
  if (!instances_only_) OP_REQUIRES_OK(ctx, ParseSampleArguments(ctx, &options));
  OP_REQUIRES_OK(ctx, CheckTypes(options.samples));
  const DataType want = options.samples.output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
  OP_REQUIRES(ctx, out_type_ == want,
              errors::InvalidArgument("out_type is ", DataTypeString(out_type_), ", want ",
                                      DataTypeString(want), " for this output_pb_type"));
  *output = new Dataset(ctx, std::move(options), out_type_);
}

REGISTER_GUARDED_KERNEL(Name("PBDataset").Device(DEVICE_CPU), PBDatasetOp);
REGISTER_GUARDED_KERNEL(Name("InstanceDataset").Device(DEVICE_CPU), PBDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
