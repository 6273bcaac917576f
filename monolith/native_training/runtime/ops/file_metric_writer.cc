#include "monolith/native_training/runtime/ops/file_metric_writer.h"

#include <utility>

#include "monolith/native_training/runtime/ops/output_file.h"
#include "tensorflow/core/lib/io/record_writer.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {

Status FileMetricWriter::Open(Env* env, const std::string& filename,
                              std::unique_ptr<FileMetricWriter>* writer) {
  std::unique_ptr<WritableFile> file;
  TF_RETURN_IF_ERROR(OpenOutputFile(env, filename, &file));
  // The constructor is private, so that a writer always has an open file.
  struct Constructible : FileMetricWriter {
    Constructible(Env* env, std::string filename, std::unique_ptr<WritableFile> file)
        : FileMetricWriter(env, std::move(filename), std::move(file)) {}
  };
  *writer = std::make_unique<Constructible>(env, filename, std::move(file));
  return OkStatus();
}

FileMetricWriter::FileMetricWriter(Env* env, std::string filename,
                                   std::unique_ptr<WritableFile> file)
    : filename_(std::move(filename)), file_(std::move(file)) {
  thread_.reset(env->StartThread(ThreadOptions(), "file_metric_writer", [this] { Run(); }));
}

FileMetricWriter::~FileMetricWriter() {
  {
    mutex_lock lock(mu_);
    stopping_ = true;
    not_empty_.notify_all();
  }
  thread_.reset();  // joins
  Status status = file_->Close();
  {
    mutex_lock lock(mu_);
    status_.Update(status);
    if (!status_.ok()) LOG(ERROR) << "Writing " << filename_ << " failed: " << status_;
  }
}

Status FileMetricWriter::Write(const std::vector<std::string>& messages) {
  mutex_lock lock(mu_);
  for (const std::string& message : messages) {
    while (queue_.size() >= kQueueSize && status_.ok()) not_full_.wait(lock);
    TF_RETURN_IF_ERROR(status_);
    queue_.push_back(message);
    not_empty_.notify_one();
  }
  return status_;
}

void FileMetricWriter::Run() {
  io::RecordWriter writer(file_.get(), io::RecordWriterOptions());
  std::deque<std::string> batch;
  while (true) {
    {
      mutex_lock lock(mu_);
      while (queue_.empty() && !stopping_) not_empty_.wait(lock);
      if (queue_.empty()) return;
      batch.swap(queue_);
      not_full_.notify_all();
    }
    Status status;
    for (const std::string& message : batch) {
      status = writer.WriteRecord(message);
      if (!status.ok()) break;
    }
    // What was written should be readable by others while training goes on.
    if (status.ok()) status = file_->Flush();
    batch.clear();
    if (!status.ok()) {
      mutex_lock lock(mu_);
      status_.Update(status);
      queue_.clear();
      not_full_.notify_all();
      return;
    }
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow
