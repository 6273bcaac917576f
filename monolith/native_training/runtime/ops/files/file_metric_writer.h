// Writes messages as TFRecords from its own thread.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_FILE_METRIC_WRITER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_FILE_METRIC_WRITER_H_

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Thread-safe. The first message starts its thread. Messages of one call stay in order. The
// destructor writes what is queued and closes the file, and only logs an error.
class FileMetricWriter {
 public:
  static constexpr size_t kQueueSize = 8192;

  // Creates missing folders and truncates the file.
  static Status Open(Env* env, const std::string& filename,
                     std::unique_ptr<FileMetricWriter>* writer);

  ~FileMetricWriter();

  // Queues the messages, waiting while the queue is full. Returns the error of an earlier write, if
  // there was one: the file is incomplete then. ResourceExhausted: no thread can be started.
  Status Write(const std::vector<std::string>& messages);

 private:
  FileMetricWriter(std::string filename, std::unique_ptr<WritableFile> file);

  void Run();

  const std::string filename_;
  const std::unique_ptr<WritableFile> file_;
  mutex mu_;
  condition_variable not_empty_;
  condition_variable not_full_;
  std::deque<std::string> queue_ TF_GUARDED_BY(mu_);
  bool stopping_ TF_GUARDED_BY(mu_) = false;
  Status status_ TF_GUARDED_BY(mu_);
  std::thread thread_ TF_GUARDED_BY(mu_);
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_FILE_METRIC_WRITER_H_
