#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// How often each unit came; fails where a range is empty or out of bounds.
class Visits {
 public:
  explicit Visits(int64_t n) : counts_(n) {}

  void operator()(int64_t begin, int64_t end) {
    ASSERT_LT(begin, end);
    ASSERT_LE(end, static_cast<int64_t>(counts_.size()));
    for (int64_t i = begin; i < end; ++i) ++counts_[i];
    ++ranges_;
  }
  void ExpectEachOnce() const {
    for (const std::atomic<int>& count : counts_) EXPECT_EQ(count, 1);
  }
  int64_t ranges() const { return ranges_; }

 private:
  std::vector<std::atomic<int>> counts_;
  std::atomic<int64_t> ranges_{0};
};

TEST(ParallelRunnerTest, RangesCoverEveryUnitOnce) {
  const TestThreads threads(4);
  for (const int64_t n : {1, 2, 7, 64, 1000}) {
    for (const int64_t grain : {0, 1, 3, 1000}) {
      Visits visits(n);
      threads.RunRanges(n, grain, [&](int64_t begin, int64_t end) { visits(begin, end); });
      visits.ExpectEachOnce();
      const int64_t pieces = grain == 0 ? n : (n - 1) / grain + 1;
      EXPECT_EQ(visits.ranges(), pieces) << n << " units by " << grain;
    }
  }
}

TEST(ParallelRunnerTest, NoUnitsNoCall) {
  const TestThreads threads(4);
  const auto fail = [](int64_t, int64_t) { FAIL(); };
  threads.RunRanges(0, 1, fail);
  threads.RunTasks(0, [](int64_t) { FAIL(); });
  threads.For(0, kHuge, fail);
}

TEST(ParallelRunnerTest, LoopsAreCutWhereTheyAreWorthIt) {
  const TestThreads threads(4);
  Visits cheap(1000), costly(1000);
  threads.For(1000, 1, [&](int64_t begin, int64_t end) { cheap(begin, end); });
  threads.For(1000, kHuge, [&](int64_t begin, int64_t end) { costly(begin, end); });
  cheap.ExpectEachOnce();
  costly.ExpectEachOnce();
  EXPECT_EQ(cheap.ranges(), 1);
  EXPECT_EQ(costly.ranges(), 16);
  EXPECT_EQ(threads.TasksFor(kHuge), 4);
  EXPECT_EQ(threads.TasksFor(0), 1);
}

TEST(ParallelRunnerTest, InlineRunsInOrderInThisThread) {
  std::vector<int64_t> order;
  const InlineRunner runner;
  runner.RunTasks(3, [&order](int64_t t) { order.push_back(t); });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(runner.SmallTasksFor(kHuge), 1);
}

TEST(ParallelRunnerTest, PartsOfHugeSizesDoNotOverflow) {
  EXPECT_EQ(ParallelRunner::Work(kHuge, 2), kHuge);
  EXPECT_EQ(ParallelRunner::Work(5, 0), 5);
  EXPECT_EQ(ParallelRunner::Cut(kHuge, 3, 3), kHuge);
  EXPECT_EQ(ParallelRunner::Cut(10, 4, 0), 0);
  EXPECT_EQ(ParallelRunner::Cut(10, 4, 2), 5);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
