#include "monolith/native_training/runtime/concurrency/fair_shared_mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

namespace monolith {
namespace engine {
namespace {

// Returns when a writer waits for the readers inside.
void AwaitWaitingWriter(FairSharedMutex* mutex) {
  while (mutex->try_lock_shared()) {
    mutex->unlock_shared();
    std::this_thread::yield();
  }
}

TEST(FairSharedMutexTest, ReadersShareAndWritersDoNot) {
  FairSharedMutex mutex;
  mutex.lock_shared();
  EXPECT_TRUE(mutex.try_lock_shared());
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock_shared();
  mutex.unlock_shared();
  ASSERT_TRUE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock_shared());
  mutex.unlock();
  EXPECT_TRUE(mutex.try_lock_shared());
  mutex.unlock_shared();
}

TEST(FairSharedMutexTest, AReaderThatComesWhileAWriterWaitsComesAfterIt) {
  FairSharedMutex mutex;
  std::string order;
  mutex.lock_shared();
  std::thread writer([&] {
    const std::unique_lock<FairSharedMutex> lock(mutex);
    order += "writer ";
  });
  AwaitWaitingWriter(&mutex);
  std::thread reader([&] {
    const std::shared_lock<FairSharedMutex> lock(mutex);
    order += "reader ";
  });
  mutex.unlock_shared();
  writer.join();
  reader.join();
  EXPECT_EQ(order, "writer reader ");
}

// Waiting readers enter between two waiting writers: all threads get in without the lock ever being
// free.
TEST(FairSharedMutexTest, NobodyStarves) {
  constexpr int kThreads = 6;
  constexpr int kTimes = 300;
  FairSharedMutex mutex;
  std::atomic<int> done{0}, readers{0}, meetings{0};
  int writers = 0;
  const auto run = [&](bool reads) {
    // Runs until all threads have been inside often enough: if one starved, none would finish.
    for (int i = 0; done < kThreads; ++i) {
      if (reads) {
        const std::shared_lock<FairSharedMutex> lock(mutex);
        ++readers;
        meetings += writers != 0;
        --readers;
      } else {
        const std::unique_lock<FairSharedMutex> lock(mutex);
        ++writers;
        meetings += writers != 1 || readers != 0;
        --writers;
      }
      if (i == kTimes) ++done;
    }
  };
  for (const int num_writers : {1, 2, 5}) {
    done = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(run, t >= num_writers);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(meetings, 0);
    EXPECT_TRUE(mutex.try_lock());
    mutex.unlock();
  }
}

// A writer waits for the readers that were inside before it, and for none that come back.
TEST(FairSharedMutexTest, AWriterWaitsForOnePhaseOfReaders) {
  constexpr int kReaders = 4;
  FairSharedMutex mutex;
  std::atomic<bool> stop{false};
  std::atomic<int64_t> entries{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < kReaders; ++t) {
    readers.emplace_back([&] {
      while (!stop) {
        const std::shared_lock<FairSharedMutex> lock(mutex);
        ++entries;
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    // Holds the lock until the writer waits.
    mutex.lock_shared();
    int64_t entries_inside = 0;
    std::thread writer([&] {
      const std::unique_lock<FairSharedMutex> lock(mutex);
      entries_inside = entries;
    });
    AwaitWaitingWriter(&mutex);
    // Readers that are inside now have counted, or are about to.
    const int64_t entries_before = entries;
    mutex.unlock_shared();
    writer.join();
    EXPECT_LE(entries_inside - entries_before, kReaders);
  }
  stop = true;
  for (std::thread& thread : readers) thread.join();
}

}  // namespace
}  // namespace engine
}  // namespace monolith
