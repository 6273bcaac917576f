// FileRowsDataset: the lines or TFRecords of a file.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/data/row_reader.h"
#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/samples/record_source.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::ByteSource;
using ::monolith::data::ReadResult;
using ::monolith::data::RowFormat;
using ::monolith::data::RowReader;

REGISTER_OP("FileRowsDataset")
    .Input("file_name: string")
    .Input("compression_type: string")
    .Input("skip_rows: int64")
    .Input("buffer_size: int64")
    .Output("handle: variant")
    .Attr("format: {'lines', 'tfrecord'}")
    .Attr("block_rows: int = 0")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The rows of a file. One that is torn or corrupt is an error with its name and the row's number.

file_name: the file, of any file system that TensorFlow knows.
compression_type: empty, ZLIB or GZIP.
skip_rows: rows at the beginning to leave out.
buffer_size: bytes to read ahead.
format: lines, without their ends; or tfrecord: their payloads.
block_rows: 0: an element is one row; otherwise a vector of this many, the last one of fewer.
)doc");

constexpr int64_t kMaxBlockRows = 1 << 20;

struct RowOptions {
  std::string file_name;
  Compression compression = Compression::kNone;
  int64_t skip_rows = 0;
  int64_t buffer_size = 0;
  RowFormat format = RowFormat::kLines;
  int64_t block_rows = 0;
};

Status ParseCompression(const std::string& name, Compression* compression) {
  if (name.empty()) {
    *compression = Compression::kNone;
  } else if (name == "ZLIB") {
    *compression = Compression::kZlib;
  } else if (name == "GZIP") {
    *compression = Compression::kGzip;
  } else {
    return errors::InvalidArgument("compression_type is '", name, "', want '', 'ZLIB' or 'GZIP'");
  }
  return OkStatus();
}

class FileRowsDatasetOp : public data::DatasetOpKernel {
 public:
  explicit FileRowsDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    std::string format;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("format", &format));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("block_rows", &block_rows_));
    format_ = format == "lines" ? RowFormat::kLines : RowFormat::kTfRecords;
    OP_REQUIRES(
        ctx, block_rows_ >= 0 && block_rows_ <= kMaxBlockRows,
        errors::InvalidArgument("block_rows is ", block_rows_, ", want 0 to ", kMaxBlockRows));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  RowFormat format_;
  int64_t block_rows_;
};

class FileRowsDatasetOp::Dataset final : public SourceDataset {
 public:
  Dataset(OpKernelContext* ctx, RowOptions options)
      : SourceDataset(
            ctx, "FileRowsDatasetOp::Dataset", {DT_STRING},
            {options.block_rows == 0 ? PartialTensorShape({}) : PartialTensorShape({-1})}),
        options_(std::move(options)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::FileRows"});
  }

 private:
  class Iterator final : public SourceIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : SourceIterator<Dataset>(params) {}

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      return CatchExceptions([&]() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        if (reader_ == nullptr) {
          TF_RETURN_IF_ERROR(Open(ctx, 0, 0));
          TF_RETURN_IF_ERROR(SkipRows());
        }
        Tensor element;
        TF_RETURN_IF_ERROR(dataset()->options_.block_rows == 0 ? ReadRow(&element)
                                                               : ReadBlock(&element));
        *end_of_sequence = element.NumElements() == 0;
        if (!*end_of_sequence) out_tensors->push_back(std::move(element));
        return OkStatus();
      });
    }

   protected:
    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter* writer) override {
      mutex_lock lock(mu_);
      const bool is_open = reader_ != nullptr;
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "is_open", int64_t{is_open}));
      if (!is_open) return OkStatus();
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), "offset", reader_->offset()));
      return writer->WriteScalar(prefix(), "row", reader_->row());
    }

    Status RestoreInternal(data::IteratorContext* ctx, data::IteratorStateReader* reader) override {
      mutex_lock lock(mu_);
      int64_t is_open, offset, row;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "is_open", &is_open));
      reader_.reset();
      if (is_open == 0) return OkStatus();
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "offset", &offset));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "row", &row));
      return Open(ctx, offset, row);
    }

   private:
    Status Open(data::IteratorContext* ctx, int64_t offset, int64_t row)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const RowOptions& options = dataset()->options_;
      std::unique_ptr<ByteSource> source;
      TF_RETURN_IF_ERROR(OpenRecordSource(ctx->env(), options.file_name, options.compression,
                                          options.buffer_size, offset, &source));
      reader_ = std::make_unique<RowReader>(source.get(), options.format, offset, row);
      source_ = std::move(source);
      return OkStatus();
    }

    // Reads one row; *end where there is none.
    Status Next(std::string_view* row, bool* end) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const ReadResult result = reader_->Next(row);
      *end = result == ReadResult::kEnd;
      if (*end || result == ReadResult::kRecord) return OkStatus();
      return errors::DataLoss(dataset()->options_.file_name, ":", reader_->row() + 1, ": ",
                              reader_->Explain(result));
    }

    Status SkipRows() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      std::string_view row;
      bool end = false;
      for (int64_t i = 0; i < dataset()->options_.skip_rows && !end; ++i) {
        TF_RETURN_IF_ERROR(Next(&row, &end));
      }
      return OkStatus();
    }

    // An element without values is the end.
    Status ReadRow(Tensor* element) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      std::string_view row;
      bool end;
      TF_RETURN_IF_ERROR(Next(&row, &end));
      *element = end ? Tensor(DT_STRING, {0}) : Tensor(DT_STRING, {});
      if (!end) element->scalar<tstring>()().assign(row.data(), row.size());
      return OkStatus();
    }

    Status ReadBlock(Tensor* element) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const int64_t block_rows = dataset()->options_.block_rows;
      Tensor block(DT_STRING, {block_rows});
      auto rows = block.vec<tstring>();
      int64_t size = 0;
      bool end = false;
      while (size < block_rows) {
        std::string_view row;
        const Status status = Next(&row, &end);
        // The rows before are given first; asking again gives the same error.
        if (!status.ok() && size == 0) return status;
        if (!status.ok() || end) break;
        rows(size++).assign(row.data(), row.size());
      }
      if (size == block_rows) {
        *element = std::move(block);
        return OkStatus();
      }
      *element = Tensor(DT_STRING, {size});
      auto left = element->vec<tstring>();
      for (int64_t i = 0; i < size; ++i) left(i) = std::move(rows(i));
      return OkStatus();
    }

    mutex mu_;
    std::unique_ptr<ByteSource> source_ TF_GUARDED_BY(mu_);
    std::unique_ptr<RowReader> reader_ TF_GUARDED_BY(mu_);
  };

  const RowOptions options_;
};

void FileRowsDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  RowOptions options;
  tstring file_name, compression;
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "file_name", &file_name));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "compression_type", &compression));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<int64_t>(ctx, "skip_rows", &options.skip_rows));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<int64_t>(ctx, "buffer_size", &options.buffer_size));
  OP_REQUIRES_OK(ctx, ParseCompression(compression, &options.compression));
  // OpenRecordSource reads standard input for it.
  OP_REQUIRES(ctx, !file_name.empty(), errors::NotFound("file_name is empty, want a file"));
  OP_REQUIRES(ctx, options.skip_rows >= 0,
              errors::InvalidArgument("skip_rows is ", options.skip_rows, ", want at least 0"));
  OP_REQUIRES(
      ctx, options.buffer_size > 0,
      errors::InvalidArgument("buffer_size is ", options.buffer_size, ", want more than 0"));
  options.file_name = file_name;
  options.format = format_;
  options.block_rows = block_rows_;
  *output = new Dataset(ctx, std::move(options));
}

REGISTER_GUARDED_KERNEL(Name("FileRowsDataset").Device(DEVICE_CPU), FileRowsDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
