// ParquetDataset: samples from the rows of a Parquet file.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/parquet/parquet_columns.h"
#include "monolith/native_training/runtime/ops/data/parquet/parquet_file.h"
#include "monolith/native_training/runtime/ops/data/parse/conversions.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_reader.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("ParquetDataset")
    .Input("file_name: string")
    .Input("output_pb_type: string")
    .Output("handle: variant")
    .Attr("batch_size: int = 512")
    .Attr("select_columns: list(string)")
    .Attr("select_columns_type: list(string)")
    .Attr("drop_remainder: bool = true")
    .Attr("out_type: {variant, string} = DT_VARIANT")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The rows of a Parquet file. Its position, the number of the next row, is saved with an iterator.

file_name: the file, of any file system that TensorFlow knows.
output_pb_type: examplebatch: a batch of rows; plaintext: such a batch, serialized; example or
  instance: one row.
batch_size: rows of a batch; of other types, rows that are decoded at once.
select_columns: names of columns. __LABEL__ is the label, another __XXX__ field xxx of LineId.
select_columns_type: what each becomes: int, fid_v1, fid_v2, float, or for byte arrays bytes.
drop_remainder: leave out a last batch of fewer rows.
out_type: string for plaintext, else variant.
)doc");

class ParquetDatasetOp : public data::DatasetOpKernel {
 public:
  explicit ParquetDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    std::vector<std::string> names, types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("batch_size", &batch_size_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("select_columns", &names));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("select_columns_type", &types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("drop_remainder", &drop_remainder_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_type", &out_type_));
    OP_REQUIRES(ctx, batch_size_ >= 1 && batch_size_ <= INT32_MAX,
                errors::InvalidArgument("batch_size is ", batch_size_,
                                        ", want at least 1 and at most ", INT32_MAX));
    OP_REQUIRES_OK(ctx, columns_.Init(names, types));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  int64_t batch_size_;
  bool drop_remainder_;
  DataType out_type_;
  ParquetColumns columns_;
};

class ParquetDatasetOp::Dataset final : public SourceDataset {
 public:
  Dataset(OpKernelContext* ctx, const ParquetDatasetOp& op, std::string file_name,
          PbType output_type)
      : SourceDataset(ctx, "ParquetDatasetOp::Dataset", {op.out_type_}, {PartialTensorShape({})}),
        file_name_(std::move(file_name)),
        output_type_(output_type),
        batch_size_(op.batch_size_),
        drop_remainder_(op.drop_remainder_),
        columns_(op.columns_) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::Parquet"});
  }

 private:
  class Iterator final : public SourceIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : SourceIterator<Dataset>(params) {}

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      mutex_lock lock(mu_);
      if (file_ == nullptr) TF_RETURN_IF_ERROR(Open(ctx, 0));
      const bool is_row = dataset()->output_type_ == PbType::kExample ||
                          dataset()->output_type_ == PbType::kInstance;
      if (!is_row || next_row_ >= batch_.batch_size()) {
        TF_RETURN_IF_ERROR(ReadBatch(end_of_sequence));
        if (*end_of_sequence) return OkStatus();
      }
      *end_of_sequence = false;
      Tensor element;
      if (is_row) {
        TF_RETURN_IF_ERROR(TakeRow(&element));
      } else {
        if (dataset()->output_type_ == PbType::kPlaintext) {
          element = Tensor(tstring(batch_.SerializeAsString()));
        } else {
          element = MakeSampleTensor(std::move(batch_));
        }
        ForgetBatch();
      }
      out_tensors->push_back(std::move(element));
      return OkStatus();
    }

   protected:
    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter* writer) override {
      mutex_lock lock(mu_);
      return writer->WriteScalar(prefix(), "row", batch_begin_ + next_row_);
    }

    Status RestoreInternal(data::IteratorContext* ctx, data::IteratorStateReader* reader) override {
      mutex_lock lock(mu_);
      int64_t row;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), "row", &row));
      file_.reset();
      return Open(ctx, row);
    }

   private:
    Status Open(data::IteratorContext* ctx, int64_t row) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      std::unique_ptr<ParquetFile> file;
      const ParquetColumns& columns = dataset()->columns_;
      TF_RETURN_IF_ERROR(
          ParquetFile::Open(ctx->env(), dataset()->file_name_, columns.names(), &file));
      TF_RETURN_IF_ERROR(columns.CheckFile(*file));
      TF_RETURN_IF_ERROR(file->Seek(row));
      file_ = std::move(file);
      batch_end_ = row;
      ForgetBatch();
      return OkStatus();
    }

    // The next row is the one after the batch.
    void ForgetBatch() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      batch_.Clear();
      batch_begin_ = batch_end_;
      next_row_ = 0;
    }

    Status ReadBatch(bool* end) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      ForgetBatch();
      int64_t num_rows = 0;
      Status status = file_->Read(dataset()->batch_size_, &num_rows);
      const bool has_batches = dataset()->output_type_ == PbType::kExampleBatch ||
                               dataset()->output_type_ == PbType::kPlaintext;
      *end = status.ok() && (num_rows == 0 || (has_batches && dataset()->drop_remainder_ &&
                                               num_rows < dataset()->batch_size_));
      if (status.ok() && !*end) {
        status = dataset()->columns_.MakeBatch(*file_, num_rows, batch_begin_, &batch_);
      }
      if (*end || !status.ok()) {
        // Asking again gives the same answer.
        batch_.Clear();
        Status sought = file_->Seek(batch_begin_);
        status.Update(sought);
        return status;
      }
      batch_end_ = batch_begin_ + num_rows;
      return OkStatus();
    }

    Status TakeRow(Tensor* element) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      Example example;
      TF_RETURN_IF_ERROR(ExampleBatchRow(batch_, next_row_, &example));
      if (dataset()->output_type_ == PbType::kInstance) {
        Instance instance;
        TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
        *element = MakeSampleTensor(std::move(instance));
      } else {
        *element = MakeSampleTensor(std::move(example));
      }
      ++next_row_;
      return OkStatus();
    }

    mutex mu_;
    std::unique_ptr<ParquetFile> file_ TF_GUARDED_BY(mu_);
    // Rows batch_begin_ to batch_end_ of the file; before batch_begin_ + next_row_ all were given.
    ExampleBatch batch_ TF_GUARDED_BY(mu_);
    int64_t batch_begin_ TF_GUARDED_BY(mu_) = 0;
    int64_t batch_end_ TF_GUARDED_BY(mu_) = 0;
    int64_t next_row_ TF_GUARDED_BY(mu_) = 0;
  };

  const std::string file_name_;
  const PbType output_type_;
  const int64_t batch_size_;
  const bool drop_remainder_;
  const ParquetColumns columns_;
};

void ParquetDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  tstring file_name, output_pb_type;
  PbType output_type;
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "file_name", &file_name));
  OP_REQUIRES_OK(ctx, data::ParseScalarArgument<tstring>(ctx, "output_pb_type", &output_pb_type));
  OP_REQUIRES_OK(ctx, ParsePbType("output_pb_type", output_pb_type, &output_type));
  const DataType want = output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
  OP_REQUIRES(ctx, out_type_ == want,
              errors::InvalidArgument("out_type is ", DataTypeString(out_type_), ", want ",
                                      DataTypeString(want), " for this output_pb_type"));
  *output = new Dataset(ctx, *this, file_name, output_type);
}

REGISTER_GUARDED_KERNEL(Name("ParquetDataset").Device(DEVICE_CPU), ParquetDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
