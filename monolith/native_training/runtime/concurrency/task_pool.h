// Tasks that wait for files and clocks rather than for a processor, on a bounded number of threads.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TASK_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TASK_POOL_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "monolith/native_training/runtime/concurrency/shared_work.h"

namespace monolith {
namespace engine {

// Thread-safe. Threads start as tasks come, `max_threads` at most, and stay. A pool lives as long
// as its process: there is no way to stop it.
class TaskPool {
 public:
  using Task = std::function<void()>;

  explicit TaskPool(int max_threads) : max_threads_(max_threads) {}
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  // Runs `task`, which throws nothing, after those that are due before it. A task that has to wait
  // for its time takes no thread meanwhile. Throws std::bad_alloc, and std::system_error where not
  // even one thread can be started; the task then never runs.
  void Schedule(Task task, std::chrono::nanoseconds delay = std::chrono::nanoseconds(0));

  // Calls step() again and again in this thread, and in threads of the pool that are free, in each
  // until it has returned false; returns when all have. So that it comes to an end in a task, too,
  // when all threads are in tasks that do the same. Throws what a step has thrown.
  void RunSteps(int64_t max_threads, const SharedWork::Step& step);

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiting {
    Clock::time_point due;
    int64_t number;  // in the order of Schedule
    Task task;
    bool operator<(const Waiting& other) const {  // a heap has its largest in front
      return due != other.due ? due > other.due : number > other.number;
    }
  };

  void StartThread();  // mutex held
  void Work();

  const int max_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Waiting> waiting_;  // a heap
  int64_t scheduled_ = 0;
  int threads_ = 0;
  int idle_ = 0;  // threads that wait for a task, or for its time
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TASK_POOL_H_
