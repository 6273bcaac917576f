#include "monolith/native_training/runtime/concurrency/shared_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace monolith {
namespace engine {
namespace {

TEST(SharedWorkTest, EveryUnitRunsOnceInRangesOfTheGrain) {
  for (const int64_t n : {1, 7, 64, 1000}) {
    for (const int64_t grain : {1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> runs(n);
      const SharedWork::Range fn = [&](int64_t begin, int64_t end) {
        EXPECT_LT(begin, end);
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; ++i) ++runs[i];
      };
      const auto work = std::make_shared<SharedWork>(n, grain, fn);
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
  const SharedWork::Range fn = [&sum](int64_t begin, int64_t end) { sum += end - begin; };
  SharedWork(10, 3, fn).Finish();
  EXPECT_EQ(sum, 10);
}

TEST(SharedWorkTest, NoUnitsAndNoGrain) {
  int64_t sum = 0;
  const SharedWork::Range fn = [&sum](int64_t begin, int64_t end) { sum += end - begin; };
  SharedWork(0, 3, fn).Finish();
  EXPECT_EQ(sum, 0);
  SharedWork(5, 0, fn).Finish();
  EXPECT_EQ(sum, 5);
}

TEST(SharedWorkTest, LateHelperDoesNotCallWhatIsGone) {
  std::shared_ptr<SharedWork> work;
  {
    auto calls = std::make_unique<int>(0);
    const SharedWork::Range fn = [&calls](int64_t, int64_t) { ++*calls; };
    work = std::make_shared<SharedWork>(4, 1, fn);
    work->Finish();
    EXPECT_EQ(*calls, 4);
  }
  work->Help();
}

TEST(SharedWorkTest, WaitsForAHelperThatTakesLong) {
  std::promise<void> first_taken, second_taken;
  std::atomic<bool> helper_done{false};
  const std::thread::id here = std::this_thread::get_id();
  const SharedWork::Range fn = [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == here) return second_taken.set_value();
    first_taken.set_value();
    second_taken.get_future().wait();
    // Longer than the caller spins, so that it has to be woken.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    helper_done = true;
  };
  const auto work = std::make_shared<SharedWork>(2, 1, fn);
  std::thread helper([&work] { work->Help(); });
  first_taken.get_future().wait();
  work->Finish();
  EXPECT_TRUE(helper_done);
  helper.join();
}

TEST(SharedWorkTest, WritesOfHelpersAreSeen) {
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> values(64, 0);  // not atomic: Finish orders the accesses
    const SharedWork::Range fn = [&values](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = i + 1;
    };
    const auto work = std::make_shared<SharedWork>(64, 4, fn);
    std::thread helper([work] { work->Help(); });
    work->Finish();
    for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(values[i], i + 1);
    helper.join();
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
