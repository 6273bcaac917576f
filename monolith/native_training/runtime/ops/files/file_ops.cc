// A writable file as a resource, with ops that append text, append EntryDump records and close it.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/files/output_file.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/io/record_writer.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/file_system.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::hash_table::EntryDump;
using shape_inference::InferenceContext;

// Thread-safe: every call holds the mutex, so that appends never interleave.
class WritableFileResource : public ResourceBase {
 public:
  WritableFileResource(std::string filename, std::unique_ptr<WritableFile> file)
      : filename_(std::move(filename)), file_(std::move(file)) {}

  ~WritableFileResource() override {
    if (file_ == nullptr) return;
    const Status status = file_->Close();
    if (!status.ok()) LOG(ERROR) << "Closing " << filename_ << " failed: " << status;
  }

  std::string DebugString() const override { return "WritableFile " + filename_; }

  Status Append(StringPiece content) {
    mutex_lock lock(mu_);
    TF_RETURN_IF_ERROR(CheckOpen());
    return file_->Append(content);
  }

  // Hands all records to the file system, or returns an error that names the one it refused.
  Status AppendRecords(const std::vector<std::string>& records) {
    mutex_lock lock(mu_);
    TF_RETURN_IF_ERROR(CheckOpen());
    io::RecordWriter writer(file_.get(), io::RecordWriterOptions());
    for (size_t i = 0; i < records.size(); ++i) {
      const Status status = writer.WriteRecord(records[i]);
      if (!status.ok()) {
        return errors::CreateWithUpdatedMessage(
            status, strings::StrCat("record ", i, " of ", records.size(), " to ", filename_, ": ",
                                    status.message()));
      }
    }
    return writer.Close();
  }

  // Counts the file as closed even if flushing fails: the error is reported once.
  Status Close() {
    mutex_lock lock(mu_);
    TF_RETURN_IF_ERROR(CheckOpen());
    const std::unique_ptr<WritableFile> file = std::move(file_);
    return file->Close();
  }

 private:
  Status CheckOpen() const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (file_ != nullptr) return OkStatus();
    return errors::FailedPrecondition("The file ", filename_, " is closed.");
  }

  const std::string filename_;
  mutex mu_;
  std::unique_ptr<WritableFile> file_ TF_GUARDED_BY(mu_);
};

class WritableFileOp : public ResourceOpKernel<WritableFileResource> {
 public:
  explicit WritableFileOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("filename", &filename_));
  }

 private:
  Status CreateResource(WritableFileResource** resource) override {
    *resource = nullptr;
    std::unique_ptr<WritableFile> file;
    TF_RETURN_IF_ERROR(OpenOutputFile(Env::Default(), filename_, &file));
    *resource = std::make_unique<WritableFileResource>(filename_, std::move(file)).release();
    return OkStatus();
  }

  std::string filename_;
};

class WritableFileAppendOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<WritableFileResource> file;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &file));
    OP_REQUIRES_OK(ctx, CheckScalar("content", ctx->input(1)));
    OP_REQUIRES_OK(ctx, file->Append(ctx->input(1).scalar<tstring>()()));
  }
};

class WritableFileCloseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<WritableFileResource> file;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &file));
    OP_REQUIRES_OK(ctx, file->Close());
  }
};

class EntryDumpFileAppendOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<WritableFileResource> file;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &file));
    const auto item_id = ctx->input(1).flat<int64_t>();
    const auto bias = ctx->input(2).flat<float>();
    const auto embedding = ctx->input(3).flat<float>();
    const int64_t num_items = item_id.size();
    OP_REQUIRES(ctx, num_items > 0,
                errors::InvalidArgument("item_id is empty, want at least one item"));
    OP_REQUIRES_OK(ctx, CheckEqual("size of bias", bias.size(), "size of item_id", num_items));
    OP_REQUIRES(ctx, embedding.size() % num_items == 0,
                errors::InvalidArgument("size of embedding is ", embedding.size(),
                                        ", want a multiple of the size of item_id = ", num_items));
    const int64_t dim = embedding.size() / num_items;

    std::vector<std::string> records(num_items);
    EntryDump entry;
    for (int64_t i = 0; i < num_items; ++i) {
      entry.Clear();
      entry.set_id(item_id(i));
      entry.add_num(bias(i));
      for (int64_t k = 0; k < dim; ++k) entry.add_num(embedding(i * dim + k));
      OP_REQUIRES(ctx, entry.SerializeToString(&records[i]),
                  errors::Internal("item_id[", i, "] = ", item_id(i), " cannot be serialized"));
    }
    OP_REQUIRES_OK(ctx, file->AppendRecords(records));
  }
};

REGISTER_OP("MonolithWritableFile")
    .Output("handle: resource")
    .Attr("filename: string")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Truncates and opens a file for writing when the op first runs; creates missing folders.

handle: The file. One per node, or per shared_name. Closed at the latest when it is destroyed.
filename: Any path TensorFlow's file systems know.
)doc");

REGISTER_OP("MonolithWritableFileAppend")
    .Input("handle: resource")
    .Input("content: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInput(c, 0));
      return ScalarInput(c, 1);
    })
    .Doc(R"doc(
Appends bytes to a file; FailedPrecondition once it is closed.

handle: From MonolithWritableFile.
content: A scalar.
)doc");

REGISTER_OP("MonolithWritableFileClose")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInput(c, 0); })
    .Doc(R"doc(
Flushes and closes a file; FailedPrecondition if it is closed already.

handle: From MonolithWritableFile.
)doc");

REGISTER_OP("MonolithEntryDumpFileAppend")
    .Input("handle: resource")
    .Input("item_id: int64")
    .Input("bias: float")
    .Input("embedding: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInput(c, 0); })
    .Doc(R"doc(
Appends one TFRecord of EntryDump{id, num: [bias, embedding...]} per item.

handle: From MonolithWritableFile.
item_id: n >= 1 ids.
bias: n floats.
embedding: n * dim floats.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithWritableFile").Device(DEVICE_CPU), WritableFileOp);
REGISTER_GUARDED_KERNEL(Name("MonolithWritableFileAppend").Device(DEVICE_CPU),
                        WritableFileAppendOp);
REGISTER_GUARDED_KERNEL(Name("MonolithWritableFileClose").Device(DEVICE_CPU), WritableFileCloseOp);
REGISTER_GUARDED_KERNEL(Name("MonolithEntryDumpFileAppend").Device(DEVICE_CPU),
                        EntryDumpFileAppendOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
