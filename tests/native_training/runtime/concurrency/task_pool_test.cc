#include "monolith/native_training/runtime/concurrency/task_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace monolith {
namespace engine {
namespace {

// Counts down in threads of a pool. Shared, because those threads may outlive the test.
class Latch {
 public:
  static std::shared_ptr<Latch> Make(int count) {
    auto latch = std::make_shared<Latch>();
    latch->count_ = count;
    return latch;
  }
  void Down() {
    std::lock_guard<std::mutex> lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// Keeps pools forever: a pool must not be destroyed.
TaskPool* NewPool(int threads) {
  static auto* pools = new std::vector<std::unique_ptr<TaskPool>>;
  pools->push_back(std::make_unique<TaskPool>(threads));
  return pools->back().get();
}

TEST(TaskPoolTest, TasksShareAFewThreads) {
  TaskPool* pool = NewPool(3);
  struct Seen {
    std::mutex mutex;
    std::set<std::thread::id> threads;
  };
  const auto seen = std::make_shared<Seen>();
  const auto latch = Latch::Make(500);
  for (int i = 0; i < 500; ++i) {
    pool->Schedule([seen, latch] {
      {
        std::lock_guard<std::mutex> lock(seen->mutex);
        seen->threads.insert(std::this_thread::get_id());
      }
      latch->Down();
    });
  }
  latch->Wait();
  std::lock_guard<std::mutex> lock(seen->mutex);
  EXPECT_LE(seen->threads.size(), 3u);
  EXPECT_EQ(seen->threads.count(std::this_thread::get_id()), 0u);
}

TEST(TaskPoolTest, TaskThatWaitsForItsTimeTakesNoThread) {
  TaskPool* pool = NewPool(1);
  const auto late = std::make_shared<std::atomic<bool>>(false);
  pool->Schedule([late] { late->store(true); }, std::chrono::hours(10));
  const auto latch = Latch::Make(1);
  pool->Schedule([latch] { latch->Down(); });
  latch->Wait();
  EXPECT_FALSE(late->load());
}

// Delays count from the calls. Where these are further apart than the delays, as on a busy machine,
// the tasks are due in another order: then again, with longer delays.
TEST(TaskPoolTest, DueTasksRunInTheirOrder) {
  TaskPool* pool = NewPool(1);
  bool in_time = false;
  for (std::chrono::milliseconds delay(30); !in_time; delay *= 2) {
    const auto order = std::make_shared<std::vector<int>>();
    const auto latch = Latch::Make(3);
    const auto add = [&](int number, std::chrono::milliseconds after) {
      pool->Schedule(
          [order, latch, number] {
            order->push_back(number);
            latch->Down();
          },
          after);
    };
    const auto start = std::chrono::steady_clock::now();
    add(3, 2 * delay);
    add(2, delay);
    add(1, std::chrono::milliseconds(0));
    in_time = std::chrono::steady_clock::now() - start < delay;
    latch->Wait();
    if (in_time) {
      EXPECT_EQ(*order, (std::vector<int>{1, 2, 3}));
    }
  }
}

// Every thread runs a task that itself wants threads of the pool.
TEST(TaskPoolTest, TasksThatShareWorkDoNotWaitForEachOther) {
  TaskPool* pool = NewPool(2);
  const auto latch = Latch::Make(20);
  const auto steps = std::make_shared<std::atomic<int>>(0);
  for (int i = 0; i < 20; ++i) {
    pool->Schedule([pool, latch, steps] {
      std::atomic<int> left{50};
      pool->RunSteps(10, [&] {
        if (left.fetch_sub(1) <= 0) return false;
        steps->fetch_add(1);
        return true;
      });
      latch->Down();
    });
  }
  latch->Wait();
  EXPECT_EQ(steps->load(), 20 * 50);
}

TEST(TaskPoolTest, WhatAStepThrowsComesToTheCallerWhenAllHaveEnded) {
  TaskPool* pool = NewPool(4);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> left{40};
    std::atomic<int> inside{0};
    EXPECT_THROW(pool->RunSteps(4,
                                [&] {
                                  inside.fetch_add(1);
                                  const int number = left.fetch_sub(1);
                                  inside.fetch_sub(1);
                                  if (number == 20) throw std::runtime_error("20");
                                  return number > 0;
                                }),
                 std::runtime_error);
    EXPECT_EQ(inside.load(), 0);
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
