#include "monolith/serving/native/base/worker_pool.h"

#include <exception>
#include <string>
#include <utility>

#include "monolith/serving/native/base/log.h"

namespace monolith {
namespace serving {

WorkerPool::WorkerPool(int64_t num_threads, int64_t max_queued) : max_queued_(max_queued) {
  for (int64_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool WorkerPool::Schedule(std::function<void()> work) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || static_cast<int64_t>(queue_.size()) >= max_queued_) return false;
    queue_.push_back(std::move(work));
    wake = idle_ > 0;
  }
  if (wake) wake_.notify_one();
  return true;
}

void WorkerPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    try {
      work();
    } catch (const std::exception& error) {
      LogError(std::string("A request ended with an exception: ") + error.what());
    }
    work = nullptr;
    lock.lock();
  }
}

}  // namespace serving
}  // namespace monolith
