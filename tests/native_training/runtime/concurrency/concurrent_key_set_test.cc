#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace monolith {
namespace engine {
namespace {

using IdSet = ConcurrentKeySet<int64_t>;

template <typename Set>
auto Take(Set* set) {
  const auto stolen = set->Steal();
  std::vector<int64_t> keys(stolen.size());
  stolen.CopyTo(keys.data());
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> ids(end - begin);
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

std::vector<int64_t> RandomIds(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> ids(n);
  for (int64_t& id : ids) id = static_cast<int64_t>(random());
  return ids;
}

// The contract, written out literally.
class Model {
 public:
  explicit Model(int64_t capacity) : capacity_(capacity) {}

  int64_t Insert(const std::vector<int64_t>& ids) {
    int64_t dropped = 0;
    for (const int64_t id : ids) {
      if (static_cast<int64_t>(keys_.size()) > capacity_) {
        dropped += static_cast<int64_t>(keys_.size());
        keys_.clear();
      }
      keys_.insert(id);
    }
    return dropped;
  }

  std::vector<int64_t> Take() {
    const std::set<int64_t> keys = std::exchange(keys_, {});
    return {keys.begin(), keys.end()};
  }

  size_t size() const { return keys_.size(); }

 private:
  const int64_t capacity_;
  std::set<int64_t> keys_;
};

TEST(ConcurrentKeySetTest, HoldsWhatWasInserted) {
  IdSet set(1000, 1);
  const std::vector<int64_t> ids = Range(0, 1000);
  EXPECT_EQ(set.Insert(ids.data(), 1000), 0);
  EXPECT_EQ(set.size(), 1000);
  EXPECT_EQ(Take(&set), ids);
  EXPECT_EQ(set.size(), 0);
  EXPECT_TRUE(Take(&set).empty());
}

TEST(ConcurrentKeySetTest, OverflowDropsEverything) {
  IdSet set(1000, 1);
  const std::vector<int64_t> ids = Range(0, 1005);
  EXPECT_EQ(set.Insert(ids.data(), 1005), 1001);
  EXPECT_EQ(Take(&set), Range(1001, 1005));
}

TEST(ConcurrentKeySetTest, DuplicateTriggersTheClear) {
  IdSet set(2, 1);
  EXPECT_EQ(set.Insert(1), 0);
  EXPECT_EQ(set.Insert(2), 0);
  EXPECT_EQ(set.Insert(3), 0);
  EXPECT_EQ(set.Insert(3), 3);
  EXPECT_EQ(Take(&set), (std::vector<int64_t>{3}));
}

TEST(ConcurrentKeySetTest, EmptyBatchAndExtremeKeys) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const int64_t capacity : {int64_t{4}, int64_t{100000}, kMax}) {
    IdSet set(capacity, kMax);
    EXPECT_EQ(set.Insert(nullptr, 0), 0);
    const std::vector<int64_t> ids = {0, kMax, kMin, -1, 0, kMax};
    EXPECT_EQ(set.Insert(ids.data(), 4), 0);
    EXPECT_EQ(set.size(), 4);
    EXPECT_EQ(set.Insert(ids.data(), 1), 0) << "holds 4 of at most " << capacity;
    EXPECT_EQ(Take(&set), (std::vector<int64_t>{kMin, -1, 0, kMax}));
  }
}

TEST(ConcurrentKeySetTest, ZeroKeyCountsLikeAnyOther) {
  IdSet set(0, 1);
  EXPECT_EQ(set.Insert(0), 0);
  EXPECT_EQ(set.size(), 1);
  EXPECT_EQ(set.Insert(0), 1);
  EXPECT_EQ(set.size(), 1);
  EXPECT_EQ(Take(&set), (std::vector<int64_t>{0}));
  EXPECT_TRUE(Take(&set).empty());
}

TEST(ConcurrentKeySetTest, ShardsFollowConcurrencyAndCapacity) {
  EXPECT_EQ(IdSet(1 << 20, 1).num_shards(), 1);
  EXPECT_EQ(IdSet(1 << 20, 5).num_shards(), 8);
  EXPECT_EQ(IdSet(10, 1024).num_shards(), 1);
  EXPECT_GE(IdSet(1 << 20, 1024).num_shards(), 32);
  EXPECT_LE(IdSet(1 << 20, 1 << 30).num_shards(), 1024);
}

TEST(ConcurrentKeySetTest, AgreesWithTheModel) {
  std::mt19937_64 random(5);
  for (const int64_t capacity : {0, 1, 7, 63, 64, 500, 5000}) {
    for (const int64_t level : {1, 3, 1024}) {
      IdSet set(capacity, level);
      Model model(capacity);
      for (int step = 0; step < 200; ++step) {
        // Batches around the capacity, from a universe small enough for many duplicates.
        std::vector<int64_t> ids(random() % (capacity + 100));
        for (int64_t& id : ids) id = static_cast<int64_t>(random() % (3 * capacity + 5)) - capacity;
        ASSERT_EQ(set.Insert(ids.data(), static_cast<int64_t>(ids.size())), model.Insert(ids));
        ASSERT_EQ(set.size(), static_cast<int64_t>(model.size()));
        if (random() % 8 == 0) {
          ASSERT_EQ(Take(&set), model.Take());
        }
      }
    }
  }
}

TEST(ConcurrentKeySetTest, LosesNoneOfManyKeys) {
  std::vector<int64_t> ids = RandomIds(1'700'000, 1);
  IdSet set(1'700'000, 1024);
  EXPECT_EQ(set.Insert(ids.data(), static_cast<int64_t>(ids.size())), 0);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  EXPECT_EQ(Take(&set), ids);
}

TEST(ConcurrentKeySetTest, SequentialAndStridedIdsSpreadOverShards) {
  for (const uint64_t stride : {uint64_t{1}, uint64_t{64}, uint64_t{1} << 20, uint64_t{1} << 48}) {
    IdSet set(1 << 20, 1024);
    std::vector<int64_t> ids = Range(0, 50000);
    for (int64_t& id : ids) id = static_cast<int64_t>(static_cast<uint64_t>(id) * stride);
    EXPECT_EQ(set.Insert(ids.data(), 50000), 0);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    EXPECT_EQ(Take(&set), ids);
  }
}

TEST(ConcurrentKeySetTest, ConcurrentInsertsAndStealsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int64_t kIdsPerThread = 60000;
  IdSet set(10 * kThreads * kIdsPerThread, 1024);
  // Threads overlap: half of each thread's ids are also the next thread's.
  const std::vector<int64_t> ids = RandomIds((kThreads + 1) * kIdsPerThread / 2, 2);
  std::atomic<int> running{kThreads};
  std::atomic<int64_t> dropped{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const int64_t* first = ids.data() + t * kIdsPerThread / 2;
      std::mt19937_64 random(t);
      for (int64_t i = 0; i < kIdsPerThread;) {
        const int64_t n = std::min<int64_t>(random() % 3000, kIdsPerThread - i);
        dropped += set.Insert(first + i, n);
        i += n;
      }
      --running;
    });
  }
  std::vector<int64_t> seen;
  while (running > 0) {
    const std::vector<int64_t> stolen = Take(&set);
    seen.insert(seen.end(), stolen.begin(), stolen.end());
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<int64_t> rest = Take(&set);
  seen.insert(seen.end(), rest.begin(), rest.end());

  EXPECT_EQ(dropped, 0);
  EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()), std::set<int64_t>(ids.begin(), ids.end()));
}

TEST(ConcurrentKeySetTest, ConcurrentOverflowCountsEveryKeyOnce) {
  constexpr int kThreads = 4;
  constexpr int64_t kIdsPerThread = 50000;
  constexpr int64_t kCapacity = 3000;
  IdSet set(kCapacity, 16);
  std::atomic<int64_t> dropped{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<int64_t> ids = Range(t * kIdsPerThread, (t + 1) * kIdsPerThread);
      for (int64_t i = 0; i < kIdsPerThread; i += 500) dropped += set.Insert(ids.data() + i, 500);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(set.size(), kCapacity + 1);
  // All ids differ: each was dropped once or is still there.
  EXPECT_EQ(dropped + static_cast<int64_t>(Take(&set).size()), kThreads * kIdsPerThread);
}

TEST(ConcurrentKeySetTest, TableKeysOfOneIdDiffer) {
  const int tables[2] = {};
  ConcurrentKeySet<TableKey> set(1000, 8);
  std::vector<TableKey> keys;
  for (int64_t id = 0; id < 100; ++id) {
    keys.push_back({id, &tables[0]});
    keys.push_back({id, &tables[1]});
    keys.push_back({id, nullptr});
  }
  EXPECT_EQ(set.Insert(keys.data(), static_cast<int64_t>(keys.size())), 0);
  EXPECT_EQ(set.Insert(keys.data(), static_cast<int64_t>(keys.size())), 0);
  EXPECT_EQ(set.size(), 300);
  const auto stolen = set.Steal();
  std::vector<TableKey> got(stolen.size());
  stolen.CopyTo(got.data());
  for (const TableKey& key : keys) {
    EXPECT_EQ(std::count(got.begin(), got.end(), key), 1);
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
