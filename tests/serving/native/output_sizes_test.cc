// Tests what the server learns of outputs, and what a lease gives back.
#include "monolith/serving/native/model/output_sizes.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "monolith/serving/native/base/memory_budget.h"

namespace monolith {
namespace serving {
namespace {

TEST(OutputSizesTest, ExpectsWhatCameForInputsOfTheSize) {
  OutputSizes sizes;
  EXPECT_EQ(sizes.Expect("s", 1000), 2000);

  sizes.Learn("s", 1000, 7);

  EXPECT_EQ(sizes.Expect("s", 1000), 7);
  EXPECT_EQ(sizes.Expect("s", 520), 7);
  EXPECT_EQ(sizes.Expect("s", 500), 1000);
  EXPECT_EQ(sizes.Expect("s", 1 << 20), 2 << 20);
  EXPECT_EQ(sizes.Expect("t", 1000), 2000);
  EXPECT_EQ(sizes.Expect("s", 0), 0);
}

TEST(OutputSizesTest, KeepsTheLargestAndForgetsItSlowly) {
  OutputSizes sizes;
  sizes.Learn("s", 1000, 1 << 20);
  sizes.Learn("s", 1000, 100);
  EXPECT_GT(sizes.Expect("s", 1000), 900'000);

  for (int i = 0; i < 200; ++i) sizes.Learn("s", 1000, 100);

  EXPECT_EQ(sizes.Expect("s", 1000), 100);
}

TEST(MemoryLeaseTest, GivesBackWhatItHas) {
  const auto budget = std::make_shared<MemoryBudget>(1000, 10);
  MemoryLease one(budget), other(budget);
  EXPECT_EQ(one.limit_bytes(), 1000);
  EXPECT_TRUE(one.Resize(875));
  EXPECT_FALSE(other.Resize(11));
  EXPECT_TRUE(other.Resize(10));

  one = std::move(other);

  EXPECT_EQ(budget->used_bytes(), 10);
  EXPECT_EQ(one.bytes(), 10);
  one.Release();
  EXPECT_EQ(budget->used_bytes(), 0);
}

TEST(MemoryLeaseTest, OneThatIsRefusedKeepsNoOtherOut) {
  const auto budget = std::make_shared<MemoryBudget>(1000, 10);
  MemoryLease held(budget);
  EXPECT_TRUE(held.Resize(800));
  std::atomic<bool> done{false};
  std::thread refused([&] {
    MemoryLease large(budget);
    while (!done) EXPECT_FALSE(large.Resize(500));
  });
  MemoryLease small(budget);
  int taken = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    taken += small.Resize(10);
    small.Resize(0);
  }
  done = true;
  refused.join();
  EXPECT_EQ(taken, 1'000'000);
}

}  // namespace
}  // namespace serving
}  // namespace monolith
