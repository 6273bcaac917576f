// Real threads for tests: new ones for every call and none of them late, so that a data race has a
// chance to show.
#ifndef TESTS_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TEST_THREADS_H_
#define TESTS_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TEST_THREADS_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/concurrency/spin_wait.h"

namespace monolith {
namespace engine {

class TestThreads final : public ParallelRunner {
 public:
  explicit TestThreads(int num_threads) : num_threads_(num_threads) {}

  int NumThreads() const override { return num_threads_; }

  void RunSteps(int64_t max_threads, int64_t /*cost*/,
                const SharedWork::Step& step) const override {
    std::atomic<int64_t> missing{max_threads};
    const auto work = [&] {
      missing.fetch_sub(1);
      SpinUntil([&missing] { return missing.load() == 0; });
      while (step()) {
      }
    };
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < max_threads; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int num_threads_;
};

}  // namespace engine
}  // namespace monolith

#endif  // TESTS_NATIVE_TRAINING_RUNTIME_CONCURRENCY_TEST_THREADS_H_
