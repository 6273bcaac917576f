#include "monolith/native_training/runtime/ops/files/file_metric_writer.h"

#include <utility>

#include "monolith/native_training/runtime/ops/files/output_file.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
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
    Constructible(std::string filename, std::unique_ptr<WritableFile> file)
        : FileMetricWriter(std::move(filename), std::move(file)) {}
  };
  *writer = std::make_unique<Constructible>(filename, std::move(file));
  return OkStatus();
}

FileMetricWriter::FileMetricWriter(std::string filename, std::unique_ptr<WritableFile> file)
    : filename_(std::move(filename)), file_(std::move(file)) {}

FileMetricWriter::~FileMetricWriter() {
  std::thread thread;
  {
    mutex_lock lock(mu_);
    stopping_ = true;
    not_empty_.notify_all();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
  Status status = file_->Close();
  {
    mutex_lock lock(mu_);
    status_.Update(status);
    if (!status_.ok()) LOG(ERROR) << "Writing " << filename_ << " failed: " << status_;
  }
}

Status FileMetricWriter::Write(const std::vector<std::string>& messages) {
  mutex_lock lock(mu_);
  // std::thread, because TensorFlow's StartThread ends the process if no thread can be started.
  if (!messages.empty() && !thread_.joinable()) {
    TF_RETURN_IF_ERROR(CatchExceptions([this]() TF_NO_THREAD_SAFETY_ANALYSIS {
      thread_ = std::thread([this] { Run(); });
      return OkStatus();
    }));
  }
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
    // Flushes so that other programs can read the messages while training goes on.
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
