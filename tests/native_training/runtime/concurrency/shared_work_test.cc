#include "monolith/native_training/runtime/concurrency/shared_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace monolith {
namespace engine {
namespace {

// Turns a loop into the steps that SharedWork takes.
class Loop {
 public:
  Loop(int64_t n, int64_t grain, RangeSteps::Range fn)
      : fn_(std::move(fn)), ranges_(n, grain, fn_), step_([this] { return ranges_.Next(); }) {}
  const SharedWork::Step& step() const { return step_; }

 private:
  const RangeSteps::Range fn_;
  RangeSteps ranges_;
  const SharedWork::Step step_;
};

TEST(SharedWorkTest, EveryUnitRunsOnceInRangesOfTheGrain) {
  for (const int64_t n : {1, 7, 64, 1000}) {
    for (const int64_t grain : {1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> runs(n);
      const Loop loop(n, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LT(begin, end);
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; ++i) ++runs[i];
      });
      const auto work = std::make_shared<SharedWork>(loop.step(), 3);
      std::vector<std::thread> helpers;
      for (int t = 0; t < 3; ++t) helpers.emplace_back([work] { work->Help(); });
      work->Finish();
      for (const auto& count : runs) EXPECT_EQ(count, 1);
      for (std::thread& helper : helpers) helper.join();
    }
  }
}

TEST(SharedWorkTest, NeedsNoHelper) {
  int64_t sum = 0;
  const Loop loop(10, 3, [&sum](int64_t begin, int64_t end) { sum += end - begin; });
  SharedWork(loop.step(), 2).Finish();
  EXPECT_EQ(sum, 10);
}

TEST(SharedWorkTest, NoUnitsAndNoGrain) {
  int64_t sum = 0;
  const auto add = [&sum](int64_t begin, int64_t end) { sum += end - begin; };
  SharedWork(Loop(0, 3, add).step(), 0).Finish();
  EXPECT_EQ(sum, 0);
  SharedWork(Loop(5, 0, add).step(), 0).Finish();
  EXPECT_EQ(sum, 5);
}

TEST(SharedWorkTest, LateHelperDoesNotCallWhatIsGone) {
  std::shared_ptr<SharedWork> work;
  {
    auto calls = std::make_unique<int>(0);
    const Loop loop(4, 1, [&calls](int64_t, int64_t) { ++*calls; });
    work = std::make_shared<SharedWork>(loop.step(), 1);
    work->Finish();
    EXPECT_EQ(*calls, 4);
  }
  work->Help();
}

TEST(SharedWorkTest, WaitsForAHelperThatTakesLong) {
  std::promise<void> first_taken, second_taken;
  std::atomic<bool> helper_done{false};
  const std::thread::id here = std::this_thread::get_id();
  const Loop loop(2, 1, [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == here) return second_taken.set_value();
    first_taken.set_value();
    second_taken.get_future().wait();
    // Longer than the caller spins, so that it has to be woken.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    helper_done = true;
  });
  const auto work = std::make_shared<SharedWork>(loop.step(), 1);
  std::thread helper([&work] { work->Help(); });
  first_taken.get_future().wait();
  work->Finish();
  EXPECT_TRUE(helper_done);
  helper.join();
}

TEST(SharedWorkTest, WritesOfHelpersAreSeen) {
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> values(64, 0);  // not atomic: Finish orders the accesses
    const Loop loop(64, 4, [&values](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = i + 1;
    });
    const auto work = std::make_shared<SharedWork>(loop.step(), 1);
    std::thread helper([work] { work->Help(); });
    work->Finish();
    for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(values[i], i + 1);
    helper.join();
  }
}

TEST(SharedWorkTest, HelpersThatAreTooManyLeaveAtOnce) {
  std::promise<void> started, may_end;
  std::atomic<int> steps{0};
  const SharedWork::Step step = [&] {
    if (++steps == 1) {
      started.set_value();
      may_end.get_future().wait();
    }
    return false;
  };
  SharedWork work(step, 1);
  std::thread helper([&work] { work.Help(); });
  started.get_future().wait();
  work.Help();
  EXPECT_EQ(steps, 1);
  may_end.set_value();
  work.Finish();
  EXPECT_EQ(steps, 2);
  helper.join();
}

TEST(SharedWorkTest, CallsAgainForAHelperThatDoesNotCome) {
  int steps = 0, calls = 0;
  const SharedWork::Step step = [&steps] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ++steps < 20;
  };
  const auto start = std::chrono::steady_clock::now();
  SharedWork(step, 1).Finish([&calls] { ++calls; });
  const auto elapsed = std::chrono::steady_clock::now() - start;
  EXPECT_GE(calls, 2);
  // Less and less often: after 0.1 ms, then 0.2, 0.4 and so on.
  EXPECT_LE(((int64_t{1} << calls) - 1) * std::chrono::microseconds(100), elapsed);
}

TEST(SharedWorkTest, DoesNotCallAgainForAHelperThatCame) {
  int calls = 0;
  std::atomic<int> steps{0};
  const SharedWork::Step step = [&steps] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return ++steps < 10;
  };
  SharedWork work(step, 1);
  work.Help();
  work.Finish([&calls] { ++calls; });
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
