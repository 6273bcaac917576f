#include "monolith/native_training/runtime/concurrency/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace monolith {
namespace engine {
namespace {

TEST(ThreadPoolTest, EveryUnitRunsOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.NumThreads(), threads);
    for (const int64_t n : {1, 7, 1000}) {
      std::vector<std::atomic<int>> runs(n);
      RunParallel(&pool, n, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++runs[i];
      });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ThreadPoolTest, CallersFromSeveralThreads) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        RunParallel(&pool, 10, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 2000);
}

TEST(ThreadPoolTest, StepsRunUntilTheyReturnFalse) {
  ThreadPool pool(3);
  std::atomic<int> left{100}, done{0};
  RunSteps(&pool, 3, 1, [&] {
    if (left.fetch_sub(1) <= 0) return false;
    ++done;
    return true;
  });
  EXPECT_EQ(done, 100);
}

TEST(RunParallelTest, WithoutRunnerStepsRunHere) {
  int steps = 0;
  RunSteps(nullptr, 4, 1, [&steps] { return ++steps < 5; });
  EXPECT_EQ(steps, 5);
}

TEST(RunParallelTest, WithoutRunnerRunsHere) {
  int64_t covered = 0;
  RunParallel(nullptr, 5, 1, [&](int64_t begin, int64_t end) { covered += end - begin; });
  RunParallel(nullptr, 0, 1, [&](int64_t, int64_t) { covered += 100; });
  EXPECT_EQ(covered, 5);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
