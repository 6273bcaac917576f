#include "monolith/native_training/runtime/distribution/partition_plan.h"

#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace distribution {
namespace {

TEST(PartitionPlanTest, NamesTheFirstShardOutOfRange) {
  const std::vector<int64_t> shards = {0, 1, 4, -1};
  PartitionPlan<int64_t> plan;
  plan.Build(engine::InlineRunner(), shards.data(), 4, 4);
  EXPECT_EQ(plan.bad(), 2);
  plan.Build(engine::InlineRunner(), shards.data(), 2, 4);
  EXPECT_EQ(plan.bad(), -1);
  EXPECT_EQ(plan.counts(), (std::vector<int64_t>{1, 1, 0, 0}));
}

TEST(PartitionPlanTest, NothingIsSplitIntoNothing) {
  PartitionPlan<int64_t> plan;
  plan.Build(engine::TestThreads(4), nullptr, 0, 3);
  EXPECT_EQ(plan.bad(), -1);
  EXPECT_EQ(plan.counts(), (std::vector<int64_t>{0, 0, 0}));
  plan.ForEach(engine::TestThreads(4), [](int64_t, int64_t, int64_t) { FAIL(); });
}

TEST(PartitionPlanTest, SplitKeepsOrderAndMergeIsItsInverse) {
  std::mt19937_64 random(1);
  for (const int64_t n : {1, 100, 400000}) {
    for (const int64_t width : {1, 3, 4, 8, 16, 17}) {
      for (const int64_t num_shards : {1, 7}) {
        std::vector<int32_t> shards(n);
        std::vector<float> input(n * width);
        for (int32_t& shard : shards) shard = static_cast<int32_t>(random() % num_shards);
        for (int64_t i = 0; i < n * width; ++i) input[i] = static_cast<float>(i);
        if (n == 400000 && width > 4) continue;  // enough seen

        const engine::TestThreads parallel(4);
        PartitionPlan<int32_t> plan;
        plan.Build(parallel, shards.data(), n, num_shards);
        std::vector<std::vector<float>> parts(num_shards);
        std::vector<float*> to;
        std::vector<const float*> from;
        for (int64_t s = 0; s < num_shards; ++s) {
          parts[s].resize(plan.counts()[s] * width);
          to.push_back(parts[s].data());
          from.push_back(parts[s].data());
        }
        plan.Split(parallel, input.data(), width, to);
        std::vector<int64_t> next(num_shards, 0);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t position = next[shards[i]]++;
          ASSERT_EQ(parts[shards[i]][position * width], input[i * width]);
        }
        std::vector<float> merged(n * width);
        plan.Merge(parallel, from, width, merged.data());
        ASSERT_EQ(merged, input);
      }
    }
  }
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
