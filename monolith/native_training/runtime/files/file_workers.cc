#include "monolith/native_training/runtime/files/file_workers.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "monolith/native_training/runtime/concurrency/task_pool.h"

namespace monolith {
namespace engine {
namespace {

struct ProcessPool {
  TaskPool pool{kMaxFileThreads};
  pid_t process = getpid();
};

// Never destroyed: a save may still run when the process ends. A forked child gets its own.
TaskPool* FilePool() {
  static std::atomic<ProcessPool*> current{nullptr};
  ProcessPool* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->process != getpid()) {
    auto made = std::make_unique<ProcessPool>();
    if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
      found = made.release();
    }
  }
  return &found->pool;
}

}  // namespace

void RunOnFileThread(int64_t delay_ms, std::function<void()> work) {
  FilePool()->Schedule(std::move(work), std::chrono::milliseconds(delay_ms));
}

Status ForEachFile(int64_t n, const std::function<Status(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  Status first_error;
  FilePool()->RunSteps(n, [&] {
    const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
    if (i >= n) return false;
    Status status = work(i);
    if (status.ok()) return true;
    const std::lock_guard<std::mutex> lock(mutex);
    if (first_error.ok()) first_error = std::move(status);
    next.store(n, std::memory_order_relaxed);
    return false;
  });
  return first_error;
}

}  // namespace engine
}  // namespace monolith
