#include "monolith/native_training/runtime/concurrency/thread_pool.h"

#include <algorithm>

namespace monolith {
namespace engine {
namespace {

// Batches come in quick succession: for some ten microseconds a look at the job counter is cheaper
// than going to sleep and being woken.
constexpr int kSpins = 2000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { WorkerLoop(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::ParallelFor(int64_t n, int64_t /*cost_per_unit*/,
                             const std::function<void(int64_t, int64_t)>& fn) {
  std::lock_guard<std::mutex> call(call_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  fn_ = &fn;
  next_ = 0;
  end_ = n;
  grain_ = std::max<int64_t>(1, n / (int64_t{4} * NumThreads()));
  jobs_.fetch_add(1, std::memory_order_relaxed);
  work_.notify_all();
  Drain(&lock);
  done_.wait(lock, [this] { return running_ == 0; });
  fn_ = nullptr;
}

void ThreadPool::WorkerLoop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const int64_t seen = jobs_.load(std::memory_order_relaxed);
    if (next_ >= end_ && !stop_) {
      lock.unlock();
      for (int i = 0; i < kSpins && jobs_.load(std::memory_order_relaxed) == seen; ++i) Pause();
      lock.lock();
    }
    work_.wait(lock, [this] { return stop_ || next_ < end_; });
    if (stop_) return;
    Drain(&lock);
    if (running_ == 0) done_.notify_all();
  }
}

void ThreadPool::Drain(std::unique_lock<std::mutex>* lock) {
  while (next_ < end_) {
    const int64_t begin = next_;
    const int64_t end = std::min(end_, begin + grain_);
    const std::function<void(int64_t, int64_t)>* fn = fn_;
    next_ = end;
    ++running_;
    lock->unlock();
    (*fn)(begin, end);
    lock->lock();
    --running_;
  }
}

}  // namespace engine
}  // namespace monolith
