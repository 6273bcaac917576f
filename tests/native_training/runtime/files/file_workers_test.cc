#include "monolith/native_training/runtime/files/file_workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <set>
#include <thread>

namespace monolith {
namespace engine {
namespace {

TEST(FileWorkersTest, EveryFileIsDoneOnce) {
  for (const int64_t n : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<size_t>(n));
    EXPECT_TRUE(ForEachFile(n, [&](int64_t i) {
                  ++done[static_cast<size_t>(i)];
                  return Status::Ok();
                }).ok());
    for (const auto& count : done) EXPECT_EQ(count, 1);
  }
}

TEST(FileWorkersTest, TheFirstErrorStopsTheRest) {
  std::atomic<int64_t> begun{0};
  const Status status = ForEachFile(1000000, [&](int64_t i) {
    ++begun;
    // Or else others might be through while the thread that has file 3 waits for a core.
    if (i > 1000) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return i == 3 ? Status::Internal("file 3") : Status::Ok();
  });
  EXPECT_EQ(status.message, "file 3");
  EXPECT_LT(begun, 1000000);
}

TEST(FileWorkersTest, WorkInsideOfWorkGoesOnWhenAllThreadsAreTaken) {
  std::atomic<int> done{0};
  std::vector<std::future<void>> calls;
  for (int call = 0; call < 3 * kMaxFileThreads; ++call) {
    auto promise = std::make_shared<std::promise<void>>();
    calls.push_back(promise->get_future());
    RunOnFileThread(0, [&done, promise] {
      EXPECT_TRUE(ForEachFile(4, [&](int64_t) {
                    ++done;
                    return Status::Ok();
                  }).ok());
      promise->set_value();
    });
  }
  for (std::future<void>& call : calls) call.wait();
  EXPECT_EQ(done, 12 * kMaxFileThreads);
}

TEST(FileWorkersTest, ThreadsAreFewAndWaitingTakesNone) {
  constexpr int kTasks = 200;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> threads;
  int done = 0;
  const auto start = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration early{1};
  for (int i = 0; i < kTasks; ++i) {
    // Run one after another, the tasks would wait 10 seconds.
    RunOnFileThread(50, [&] {
      std::lock_guard<std::mutex> lock(mutex);
      early =
          std::min(early, std::chrono::steady_clock::now() - start -
                              std::chrono::steady_clock::duration(std::chrono::milliseconds(50)));
      threads.insert(std::this_thread::get_id());
      ++done;
      changed.notify_all();
    });
  }
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return done == kTasks; });
  EXPECT_LE(threads.size(), static_cast<size_t>(kMaxFileThreads));
  EXPECT_GE(early.count(), 0) << "a task ran before its time";
}

}  // namespace
}  // namespace engine
}  // namespace monolith
