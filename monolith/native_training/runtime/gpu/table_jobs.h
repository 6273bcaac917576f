// Several jobs in one launch: words of 32 ids, or blocks, are numbered through all of them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_JOBS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_JOBS_H_

#include <cstdint>
#include <map>

#include "monolith/native_training/runtime/gpu/table_memory.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {

// The last of `count` jobs that begins at `at` or before; begins[0] is 0.
template <typename Number>
MONO_DEVICE int JobAt(const Number* begins, int count, int64_t at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (static_cast<int64_t>(begins[middle]) <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Keeps the contents of a workspace on the device until this object goes.
class UploadedJobs {
 public:
  explicit UploadedJobs(Stream stream) : stream_(stream) {}
  ~UploadedJobs() { buffer_.Free(stream_); }
  UploadedJobs(const UploadedJobs&) = delete;
  UploadedJobs& operator=(const UploadedJobs&) = delete;

  int Upload(Workspace* workspace) {
    int64_t bytes = 0;
    workspace->Measure(nullptr, &bytes);
    MONO_GPU_TRY(buffer_.Allocate(stream_, bytes, "the jobs of a call"));
    workspace->Measure(buffer_.As<char>(), &bytes);
    return workspace->Upload(stream_);
  }

 private:
  Stream stream_;
  DeviceBuffer buffer_;
};

struct DeviceTask;

// Tasks of one kind on the device.
struct DeviceTasks {
  const DeviceTask* tasks;
  const int64_t* begins;  // words, or blocks, of the tasks before
  int count;
  const char* plans;
};

// Keeps what a write of several tables has uploaded: its two launches read the same, and an upload
// takes the host as long as some launches.
class WriteUploads {
 public:
  struct Kind {
    explicit Kind(Stream stream) : jobs(stream) {}
    UploadedJobs jobs;
    DeviceTasks by_word = {}, by_block = {};
    int64_t words = 0, blocks = 0;
  };

  explicit WriteUploads(Stream stream) : stream_(stream) {}

  // Null where tasks of this kind were not uploaded.
  const Kind* Find(int kind) const {
    const auto found = kinds_.find(kind);
    return found == kinds_.end() ? nullptr : &found->second;
  }
  Kind* Add(int kind) { return &kinds_.try_emplace(kind, stream_).first->second; }
  // For tasks that have changed.
  void Clear() { kinds_.clear(); }

 private:
  Stream stream_;
  std::map<int, Kind> kinds_;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_JOBS_H_
