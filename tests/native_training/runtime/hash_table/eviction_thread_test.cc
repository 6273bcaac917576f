#include "monolith/native_training/runtime/hash_table/eviction_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/native_training/runtime/process_memory.h"

namespace monolith {
namespace engine {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

// Counts, and lets a test wait until a number is reached.
class Counter {
 public:
  void Add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  bool WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

TEST(EvictionThreadTest, RunsEveryPeriodAndStopsAtOnce) {
  Counter runs;
  {
    EvictionThread thread(milliseconds(1), [&] { runs.Add(); });
    EXPECT_TRUE(runs.WaitFor(3));
  }
  std::atomic<int> long_runs{0};
  {
    EvictionThread thread(hours(1), [&] { ++long_runs; });
  }
  EXPECT_EQ(long_runs, 0);
}

TEST(EvictionThreadTest, OneThreadServesAllPlacesWithTheirPeriods) {
  const int64_t before = StatusNumber("Threads");
  std::vector<std::unique_ptr<EvictionThread>> places;
  Counter often[3];
  std::atomic<int> rarely{0};
  for (int i = 0; i < 100; ++i) {
    places.push_back(std::make_unique<EvictionThread>(hours(10), [&] { ++rarely; }));
  }
  for (Counter& counter : often) {
    places.push_back(std::make_unique<EvictionThread>(milliseconds(1), [&] { counter.Add(); }));
  }
  EXPECT_LE(StatusNumber("Threads"), before + 1);
  for (Counter& counter : often) EXPECT_TRUE(counter.WaitFor(3));
  EXPECT_EQ(rarely, 0);
}

TEST(EvictionThreadTest, FailedEvictionIsTriedAgainAndDisturbsNobody) {
  Counter failed, good;
  EvictionThread throws(milliseconds(1), [&] {
    failed.Add();
    throw std::bad_alloc();
  });
  EvictionThread throws_anything(milliseconds(1), [&] {
    failed.Add();
    throw 5;
  });
  EvictionThread works(milliseconds(1), [&] { good.Add(); });
  EXPECT_TRUE(failed.WaitFor(10));
  EXPECT_TRUE(good.WaitFor(5));
}

TEST(EvictionThreadTest, DestructionWaitsForItsOwnEviction) {
  for (int round = 0; round < 50; ++round) {
    Counter started;
    auto content = std::make_unique<std::vector<int>>(1000, 7);
    std::atomic<int> sum{0};
    auto place = std::make_unique<EvictionThread>(std::chrono::nanoseconds(1), [&] {
      started.Add();
      for (const int value : *content) sum += value;
    });
    EXPECT_TRUE(started.WaitFor(1));
    place.reset();
    content.reset();  // freed memory is not looked at any more
    EXPECT_GE(sum.load(), 7000);
  }
}

TEST(EvictionThreadTest, PlacesComeAndGoFromManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) {
        std::atomic<int> runs{0};
        EvictionThread place(std::chrono::nanoseconds(100), [&] { ++runs; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(EvictionThreadTest, ForkedChildHasItsOwnThread) {
  if (kSanitized) GTEST_SKIP() << "threads after a fork are not for sanitizers";
  auto inherited = std::make_unique<EvictionThread>(hours(1), [] {});
  EXPECT_EQ(RunInChild([&] {
              inherited.reset();
              Counter runs;
              EvictionThread own(milliseconds(1), [&] { runs.Add(); });
              return runs.WaitFor(2) ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
