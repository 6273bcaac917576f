#include "monolith/native_training/runtime/data/item_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace monolith {
namespace data {
namespace {

using Pool = ItemPool<std::string>;

TEST(ItemPoolTest, YieldsNothingUntilMoreThanStartNum) {
  Pool pool(2, 10);
  std::mt19937_64 random(1);
  Pool::Draw draw;
  pool.Add(3, 1, "a");
  pool.Add(3, 2, "b");
  pool.Add(3, 2, "b");  // known
  EXPECT_FALSE(pool.Sample(3, &random, &draw));
  EXPECT_FALSE(pool.SampleAnyChannel(&random, &draw));
  pool.Add(3, 5, "c");
  EXPECT_TRUE(pool.Sample(3, &random, &draw));
  EXPECT_TRUE(pool.SampleAnyChannel(&random, &draw));
  EXPECT_FALSE(pool.Sample(4, &random, &draw));
}

TEST(ItemPoolTest, KeepsTheNewestItems) {
  Pool pool(0, 3);
  for (uint64_t i = 1; i <= 5; ++i) pool.Add(7, i, std::to_string(i));
  const auto entries = pool.Snapshot()[7];
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].item_id, 3u);
  EXPECT_EQ(entries[2].item, "5");
}

TEST(ItemPoolTest, TellsTimeAndFrequency) {
  Pool pool(0, 3);
  std::mt19937_64 random(1);
  Pool::Draw draw;
  pool.Add(7, 1, "a");
  ASSERT_TRUE(pool.Sample(7, &random, &draw));
  EXPECT_EQ(draw.time, 1.0);
  EXPECT_EQ(draw.entry.sampled, 1);
  ASSERT_TRUE(pool.Sample(7, &random, &draw));
  EXPECT_EQ(draw.entry.sampled, 2);
}

TEST(ItemPoolTest, ChannelZeroIsNoChannel) {
  Pool pool(0, 3);
  std::mt19937_64 random(1);
  Pool::Draw draw;
  pool.Add(0, 1, "a");
  EXPECT_FALSE(pool.Sample(0, &random, &draw));
  EXPECT_EQ(pool.size(0), 0);
}

TEST(ItemPoolTest, ManyThreads) {
  Pool pool(10, 100);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937_64 random(t);
      Pool::Draw draw;
      for (uint64_t i = 0; i < 1000; ++i) {
        pool.Add(1 + i % 3, i * 4 + t, "x");
        pool.Sample(1, &random, &draw);
        pool.SampleAnyChannel(&random, &draw);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int64_t channel = 1; channel <= 3; ++channel) EXPECT_EQ(pool.size(channel), 100);
}

}  // namespace
}  // namespace data
}  // namespace monolith
