#include "monolith/native_training/runtime/kafka/recent_ids.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>

namespace monolith {
namespace kafka {
namespace {

TEST(RecentIds, FindsWhatIsAmongTheLast) {
  RecentIds recent(3);
  EXPECT_TRUE(recent.Add(0));
  EXPECT_FALSE(recent.Add(0));
  EXPECT_TRUE(recent.Add(1));
  EXPECT_TRUE(recent.Add(2));
  EXPECT_FALSE(recent.Add(0));  // the third before this one
  EXPECT_TRUE(recent.Add(3));
  EXPECT_TRUE(recent.Add(4));
  EXPECT_TRUE(recent.Add(1));  // five before this one
}

TEST(RecentIds, FindsNothingAmongTheLastNone) {
  RecentIds recent(0);
  EXPECT_TRUE(recent.Add(7));
  EXPECT_TRUE(recent.Add(7));
}

// Against the last ids one by one, over many times that the table is made anew. Ids with equal low
// bits share the place where the search begins.
TEST(RecentIds, EqualsASearchOfAll) {
  for (const int64_t limit : {1, 10, 700, 1500}) {
    RecentIds recent(limit);
    std::deque<uint64_t> last;
    std::mt19937_64 random(11);
    int64_t num_repeated = 0;
    for (int i = 0; i < 10'000; ++i) {
      const uint64_t id = (random() % (3 * limit)) << (random() % 2 == 0 ? 0 : 40);
      const bool is_new = std::find(last.begin(), last.end(), id) == last.end();
      num_repeated += !is_new;
      ASSERT_EQ(recent.Add(id), is_new) << "id " << i << ", limit " << limit;
      last.push_back(id);
      if (static_cast<int64_t>(last.size()) > limit) last.pop_front();
    }
    EXPECT_GT(num_repeated, 500);
    EXPECT_LT(num_repeated, 9'500);
  }
}

TEST(RecentIds, GrowsWithTheLastIdsOnly) {
  RecentIds recent(1000);
  std::mt19937_64 random(3);
  for (int i = 0; i < 100'000; ++i) recent.Add(random());
  EXPECT_LE(recent.capacity(), 8192u);
}

}  // namespace
}  // namespace kafka
}  // namespace monolith
