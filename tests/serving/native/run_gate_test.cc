// Who waits for whom where a model is changed between runs.
#include "monolith/serving/native/model/run_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <thread>

namespace monolith {
namespace serving {
namespace {

TEST(RunGateTest, LetsRunsInTogether) {
  RunGate gate;
  std::shared_lock<RunGate> one(gate);
  std::shared_lock<RunGate> other(gate);
  EXPECT_FALSE(gate.is_closed());
}

TEST(RunGateTest, IsClosedWhileAChangeWaitsForARun) {
  RunGate gate;
  std::shared_lock<RunGate> run(gate);
  std::atomic<bool> changed{false};
  std::thread changes([&] {
    std::unique_lock<RunGate> lock(gate);
    changed = true;
  });
  while (!gate.is_closed()) std::this_thread::yield();
  EXPECT_FALSE(changed);

  run.unlock();

  changes.join();
  EXPECT_TRUE(changed);
  EXPECT_FALSE(gate.is_closed());
}

}  // namespace
}  // namespace serving
}  // namespace monolith
