// A fixed set of threads behind ParallelRunner, for programs without TensorFlow: the C interface,
// tests and benchmarks.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/concurrency/shared_work.h"

namespace monolith {
namespace engine {

// The calling thread works too, so ThreadPool(n) starts n - 1 threads. RunSteps may be called from
// several threads (calls run one after another), not from inside a step. All threads take part.
class ThreadPool : public ParallelRunner {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;

  int NumThreads() const override { return static_cast<int>(threads_.size()) + 1; }
  void RunSteps(int64_t max_threads, int64_t cost, const SharedWork::Step& step) const override;

 private:
  void WorkerLoop();

  mutable std::mutex call_mutex_;  // one RunSteps at a time
  mutable std::mutex mutex_;
  mutable std::condition_variable work_;
  mutable std::shared_ptr<SharedWork> job_;  // the last one started
  mutable std::atomic<int64_t> jobs_{0};     // started so far
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_THREAD_POOL_H_
