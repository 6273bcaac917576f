#include "monolith/native_training/runtime/files/file_workers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "monolith/native_training/runtime/base/log.h"

namespace monolith {
namespace engine {
namespace {

using Clock = std::chrono::steady_clock;

class FileWorkers {
 public:
  // Never destroyed: its threads wait for work until the process ends.
  static FileWorkers& Get() {
    static FileWorkers* workers = std::make_unique<FileWorkers>().release();
    return *workers;
  }

  // False: there is no thread, nor can one be started.
  bool Add(Clock::time_point due, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Those that wait for a task's time may take another one meanwhile.
    if (idle_ == 0 && threads_ < kMaxFileThreads && !StartThread() && threads_ == 0) return false;
    tasks_.push({due, next_number_++, std::move(work)});
    changed_.notify_one();
    return true;
  }

 private:
  struct Task {
    Clock::time_point due;
    int64_t number;  // equal times: first come, first served
    std::function<void()> work;

    bool operator<(const Task& other) const {  // the top of the queue is the largest
      return std::tie(other.due, other.number) < std::tie(due, number);
    }
  };

  bool StartThread() {
    try {
      std::thread([this] { Loop(); }).detach();
    } catch (const std::system_error& error) {
      Log(LogLevel::kWarning, std::string("unable to start a thread for files: ") + error.what());
      return false;
    }
    ++threads_;
    return true;
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      while (tasks_.empty() || tasks_.top().due > Clock::now()) {
        if (tasks_.empty()) {
          changed_.wait(lock);
        } else {
          changed_.wait_until(lock, Clock::time_point(tasks_.top().due));
        }
      }
      --idle_;
      const std::function<void()> work = tasks_.top().work;
      tasks_.pop();
      if (!tasks_.empty()) {
        // Nobody may be waiting for the time of the next one.
        if (idle_ > 0) {
          changed_.notify_one();
        } else if (threads_ < kMaxFileThreads) {
          StartThread();
        }
      }
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::priority_queue<Task> tasks_;
  int64_t next_number_ = 0;
  int threads_ = 0;
  int idle_ = 0;
};

// Work on n files. The thread that has to wait for it takes part, so it is done even if no other
// thread is free.
class Job {
 public:
  Job(int64_t n, const std::function<Status(int64_t)>* work) : n_(n), work_(work) {}

  void Help() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (next_ < n_) {
      const int64_t i = next_++;
      ++running_;
      lock.unlock();
      Status status = (*work_)(i);
      lock.lock();
      --running_;
      if (!status.ok()) {
        next_ = n_;
        if (first_error_.ok()) first_error_ = std::move(status);
      }
    }
    if (running_ == 0) done_.notify_all();
  }

  Status Finish() {
    Help();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return first_error_;
  }

 private:
  const int64_t n_;
  const std::function<Status(int64_t)>* const work_;  // gone when Finish has returned
  std::mutex mutex_;
  std::condition_variable done_;
  int64_t next_ = 0;
  int64_t running_ = 0;
  Status first_error_;
};

}  // namespace

void RunOnFileThread(int64_t delay_ms, std::function<void()> work) {
  constexpr int64_t kMaxDelayMs = int64_t{1} << 40;  // the clock counts nanoseconds in 64 bits
  const auto delay = std::chrono::milliseconds(std::clamp<int64_t>(delay_ms, 0, kMaxDelayMs));
  const auto shared = std::make_shared<std::function<void()>>(std::move(work));
  if (FileWorkers::Get().Add(Clock::now() + delay, [shared] { (*shared)(); })) return;
  std::this_thread::sleep_for(delay);
  (*shared)();
}

Status ForEachFile(int64_t n, const std::function<Status(int64_t)>& work) {
  // Shared, for a helper may come when all is done and the caller gone.
  const auto job = std::make_shared<Job>(n, &work);
  for (int64_t i = 1; i < std::min<int64_t>(n, kMaxFileThreads); ++i) {
    FileWorkers::Get().Add(Clock::now(), [job] { job->Help(); });
  }
  return job->Finish();
}

}  // namespace engine
}  // namespace monolith
