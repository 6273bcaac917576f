// Real threads for the tests: every task on a thread of its own, so that a data race has a chance
// to show.
#ifndef TESTS_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_TEST_PARALLEL_H_
#define TESTS_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_TEST_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/distribution/parallel.h"

namespace monolith {
namespace distribution {

class Threads final : public Parallel {
 public:
  explicit Threads(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

  void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const override {
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < num_tasks; ++t) threads.emplace_back(task, t);
    if (num_tasks > 0) task(0);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int num_threads_;
};

}  // namespace distribution
}  // namespace monolith

#endif  // TESTS_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_TEST_PARALLEL_H_
