// A fixed set of threads behind ParallelRunner, for programs without TensorFlow (tests,
// benchmarks).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

namespace monolith {
namespace engine {

// The calling thread works too, so ThreadPool(n) starts n - 1 threads. ParallelFor may be called
// from several threads (calls run one after another), not from inside fn.
class ThreadPool : public ParallelRunner {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;

  int NumThreads() const override { return static_cast<int>(threads_.size()) + 1; }
  void ParallelFor(int64_t n, int64_t cost_per_unit,
                   const std::function<void(int64_t, int64_t)>& fn) override;

 private:
  void WorkerLoop();
  // Takes units of the current job until none is left.
  void Drain(std::unique_lock<std::mutex>* lock);

  std::mutex call_mutex_;  // one ParallelFor at a time
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  const std::function<void(int64_t, int64_t)>* fn_ = nullptr;
  int64_t next_ = 0;
  int64_t end_ = 0;
  int64_t grain_ = 1;
  int64_t running_ = 0;
  bool stop_ = false;
  std::atomic<int64_t> jobs_{0};  // started so far
  std::vector<std::thread> threads_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_
