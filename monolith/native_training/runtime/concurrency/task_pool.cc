#include "monolith/native_training/runtime/concurrency/task_pool.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace monolith {
namespace engine {

void TaskPool::Schedule(Task task, std::chrono::nanoseconds delay) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Beforehand: a task that is in the queue will run.
    if (static_cast<int>(waiting_.size()) >= idle_ && threads_ < max_threads_) StartThread();
    waiting_.push_back({Clock::now() + delay, scheduled_, std::move(task)});
    ++scheduled_;
    std::push_heap(waiting_.begin(), waiting_.end());
  }
  changed_.notify_one();
}

void TaskPool::StartThread() {
  try {
    std::thread([this] { Work(); }).detach();
    ++threads_;
    ++idle_;
  } catch (const std::system_error&) {
    if (threads_ == 0) throw;
  }
}

void TaskPool::RunSteps(int64_t max_threads, const SharedWork::Step& step) {
  const int64_t helpers = std::min<int64_t>(max_threads, max_threads_) - 1;
  const auto work = std::make_shared<SharedWork>(step, std::max<int64_t>(0, helpers));
  try {
    for (int64_t i = 0; i < helpers; ++i) Schedule([work] { work->Help(); });
  } catch (const std::exception&) {
    // Those that are on their way use `step`, so this thread goes on with them.
  }
  work->Finish();
}

void TaskPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (waiting_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const Clock::time_point due = waiting_.front().due;
    if (Clock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    std::pop_heap(waiting_.begin(), waiting_.end());
    Task task = std::move(waiting_.back().task);
    waiting_.pop_back();
    --idle_;
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes without the lock
    lock.lock();
    ++idle_;
  }
}

}  // namespace engine
}  // namespace monolith
