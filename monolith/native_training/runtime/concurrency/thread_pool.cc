#include "monolith/native_training/runtime/concurrency/thread_pool.h"

#include "monolith/native_training/runtime/concurrency/spin_wait.h"

namespace monolith {
namespace engine {
namespace {

// Batches come in quick succession: for some ten microseconds a look at the job counter is cheaper
// than going to sleep and being woken.
constexpr int kSpins = 2000;

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

void ThreadPool::RunSteps(int64_t /*max_threads*/, int64_t /*cost*/,
                          const SharedWork::Step& step) const {
  std::lock_guard<std::mutex> call(call_mutex_);
  const auto job = std::make_shared<SharedWork>(step, NumThreads() - 1);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    jobs_.fetch_add(1, std::memory_order_relaxed);
  }
  work_.notify_all();
  job->Finish();
}

void ThreadPool::WorkerLoop() {
  int64_t seen = 0;
  const auto news = [this, &seen] {
    return stop_ || jobs_.load(std::memory_order_relaxed) != seen;
  };
  while (true) {
    for (int i = 0; i < kSpins && jobs_.load(std::memory_order_relaxed) == seen; ++i) SpinPause();
    std::shared_ptr<SharedWork> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, news);
      if (stop_) return;
      seen = jobs_.load(std::memory_order_relaxed);
      job = job_;
    }
    job->Help();
  }
}

}  // namespace engine
}  // namespace monolith
