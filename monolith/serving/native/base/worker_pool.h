// A fixed number of threads that run closures from one bounded queue.
#ifndef MONOLITH_SERVING_NATIVE_BASE_WORKER_POOL_H_
#define MONOLITH_SERVING_NATIVE_BASE_WORKER_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace monolith {
namespace serving {

class WorkerPool {
 public:
  WorkerPool(int64_t num_threads, int64_t max_queued);
  // Runs what is queued and ends the threads.
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Returns false, and does not run `work`, if the queue is full. Thread-safe.
  bool Schedule(std::function<void()> work);

 private:
  void Work();

  const int64_t max_queued_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  int64_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_WORKER_POOL_H_
