// Occurrence filters: worked examples, rates, checkpoints, threads.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/counting_filter.h"
#include "monolith/native_training/runtime/hash_filter/probabilistic_filter.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"

namespace monolith {
namespace engine {
namespace {

using Ids = std::vector<int64_t>;

std::unique_ptr<SlidingHashFilter> Sliding(int64_t capacity, int64_t splits, uint32_t threshold,
                                           std::vector<SlotOccurrenceThreshold> slots = {}) {
  std::unique_ptr<SlidingHashFilter> filter;
  const Status status =
      SlidingHashFilter::Create(capacity, splits, {threshold, std::move(slots)}, &filter);
  EXPECT_TRUE(status.ok()) << status.message;
  return filter;
}

// Returns 1 where an id is kept, 0 where it is filtered.
std::vector<int> Kept(OccurrenceFilter* filter, const Ids& ids, bool for_table = false) {
  std::vector<uint8_t> filtered(ids.size());
  filter->Filter(ids.data(), nullptr, static_cast<int64_t>(ids.size()), for_table, filtered.data());
  std::vector<int> kept;
  for (const uint8_t f : filtered) kept.push_back(1 - f);
  return kept;
}

// Copies a filter through the checkpoint interface into a fresh one.
std::unique_ptr<SlidingHashFilter> SaveAndRestore(const SlidingHashFilter& filter,
                                                  std::unique_ptr<SlidingHashFilter> target) {
  std::unique_ptr<SlidingHashFilter> twin;
  EXPECT_TRUE(target->NewEmptyTwin(&twin).ok());
  EXPECT_TRUE(twin->LoadMeta(filter.Meta()).ok());
  for (int64_t split = 0; split < filter.split_num(); ++split) {
    EXPECT_TRUE(twin->LoadSplitMeta(split, filter.SplitMeta(split)).ok());
    std::vector<uint16_t> cells(filter.cells_per_split());
    filter.CopyCells(split, 0, filter.cells_per_split(), cells.data());
    EXPECT_TRUE(twin->LoadCells(split, 0, filter.cells_per_split(), cells.data()).ok());
  }
  target->SwapContent(twin.get());
  return target;
}

const int64_t kThree = int64_t{3} << 17;

std::unique_ptr<TableFilter> ForTable(OccurrenceFilter* shared, uint32_t threshold, uint64_t salt) {
  std::unique_ptr<TableFilter> filter;
  const Status status = TableFilter::Create(shared, threshold, salt, &filter);
  EXPECT_TRUE(status.ok()) << status.message;
  return filter;
}

TEST(TableFilterTest, HasItsOwnThresholdAndCounts) {
  // Slot 1 has a threshold of its own, which a table that has one does not ask for.
  const auto shared = Sliding(100, 7, 0, {{1, 15}});
  const auto users = ForTable(shared.get(), 1, 11);
  const auto items = ForTable(shared.get(), 2, 22);
  const auto free = ForTable(shared.get(), 0, 33);
  const Ids ids = {5, int64_t{1} << 48};
  EXPECT_EQ(Kept(users.get(), ids, true), (std::vector<int>{0, 0}));
  EXPECT_EQ(Kept(users.get(), ids, true), (std::vector<int>{1, 1}));
  EXPECT_EQ(Kept(items.get(), ids, true), (std::vector<int>{0, 0}));
  EXPECT_EQ(Kept(items.get(), ids, true), (std::vector<int>{0, 0}));
  EXPECT_EQ(Kept(items.get(), ids, true), (std::vector<int>{1, 1}));
  EXPECT_TRUE(free->NeverFilters());
  EXPECT_FALSE(items->NeverFilters());

  std::unique_ptr<TableFilter> none;
  const Status status = TableFilter::Create(shared.get(), 16, 0, &none);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.message, "occurrence_threshold is 16, but this filter counts to 15");

  DummyFilter dummy;
  EXPECT_TRUE(ForTable(&dummy, 3, 0)->NeverFilters());
  EXPECT_EQ(Kept(ForTable(&dummy, 3, 0).get(), ids, true), (std::vector<int>{1, 1}));
}

TEST(SlidingHashFilterTest, DropsTheFirstOccurrences) {
  const auto filter = Sliding(100, 7, 3);
  const Ids ids = {1, kThree, 1};
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{1, 0, 1}));
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{1, 1, 1}));
}

TEST(SlidingHashFilterTest, CountsSurviveSaveAndRestore) {
  const auto first = Sliding(100, 7, 3);
  const Ids ids = {1, kThree, 1};
  Kept(first.get(), ids);
  Kept(first.get(), ids);
  EXPECT_EQ(first->split_num(), 7);

  const auto second = SaveAndRestore(*first, Sliding(100, 7, 3));

  EXPECT_EQ(Kept(second.get(), ids), (std::vector<int>{1, 0, 1}));
  EXPECT_EQ(Kept(second.get(), ids), (std::vector<int>{1, 1, 1}));
}

TEST(SlidingHashFilterTest, TheHeadMovesOnWhenASplitIsFull) {
  const auto filter = Sliding(300, 100, 2);
  const Ids ids = {1, int64_t{1} << 17, int64_t{2} << 17, 1};
  EXPECT_EQ(filter->split_num(), 100);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(filter->SplitMeta(i).total_size, 3u);
    EXPECT_EQ(filter->SplitMeta(i).num_elements, 0u);
  }
  EXPECT_EQ(filter->Meta().split_num, 100u);
  EXPECT_EQ(filter->Meta().head, 0u);
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(Kept(filter.get(), ids), (std::vector<int>{1, 0, 0, 1}));
  EXPECT_EQ(filter->Meta().head, 4u);
  EXPECT_EQ(filter->Meta().head_increment, 4u);
  EXPECT_EQ(filter->Meta().max_step, 16u);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(filter->SplitMeta(i).num_elements, i < 4 ? 2u : 0u) << "split " << i;
  }
  const auto restored = SaveAndRestore(*filter, Sliding(300, 100, 2));
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(Kept(restored.get(), ids), (std::vector<int>{1, 1, 1, 1}));
  }
}

TEST(SlidingHashFilterTest, CountsEndAtFifteen) {
  const auto filter = Sliding(1000, 7, 1);
  for (uint32_t i = 0; i < 17; ++i) EXPECT_EQ(filter->Add(1, 1), std::min(i, 15u));
  EXPECT_EQ(filter->Get(1), 15u);
  EXPECT_EQ(filter->Get(2), 0u);
}

TEST(SlidingHashFilterTest, OneIdIsOneElement) {
  const auto filter = Sliding(1000, 7, 1);
  filter->Add(9, 1);
  filter->Add(9, 20);
  filter->Add(9, 1);
  EXPECT_EQ(filter->Elements(), 1);
}

TEST(SlidingHashFilterTest, ThresholdZeroIsNotCounted) {
  const auto filter = Sliding(1000, 7, 0, {{1, 1}});
  Ids free_ids, counted;
  for (int64_t i = 0; i < 5; ++i) {
    free_ids.push_back(i);
    counted.push_back((int64_t{1} << 48) + i);
  }
  EXPECT_EQ(Kept(filter.get(), free_ids), (std::vector<int>(5, 1)));
  EXPECT_EQ(Kept(filter.get(), counted), (std::vector<int>(5, 0)));
  EXPECT_EQ(filter->Elements(), 5);
}

TEST(SlidingHashFilterTest, FewSplitsBecomeFive) { EXPECT_EQ(Sliding(1000, 1, 1)->split_num(), 5); }

TEST(SlidingHashFilterTest, BadConfigurationsAreErrors) {
  std::unique_ptr<SlidingHashFilter> filter;
  EXPECT_EQ(SlidingHashFilter::Create(100, 7, {16, {}}, &filter).code,
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SlidingHashFilter::Create(100, 7, {0, {{3, 16}}}, &filter).code,
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SlidingHashFilter::Create(100, 7, {0, {{32768, 1}}}, &filter).code,
            StatusCode::kInvalidArgument);
  EXPECT_EQ(SlidingHashFilter::Create(-1, 7, {}, &filter).code, StatusCode::kInvalidArgument);
  EXPECT_TRUE(SlidingHashFilter::Create(100, 7, {15, {{32767, 15}}}, &filter).ok());
}

TEST(SlidingHashFilterTest, MismatchingCheckpointNamesTheField) {
  const auto seven = Sliding(1000, 7, 1), eight = Sliding(1000, 8, 1);
  const Status status = seven->LoadMeta(eight->Meta());
  EXPECT_EQ(status.code, StatusCode::kResourceExhausted);
  EXPECT_NE(status.message.find("split_num 8"), std::string::npos) << status.message;
  EXPECT_NE(status.message.find("7"), std::string::npos);
  EXPECT_EQ(seven->LoadSplitMeta(0, eight->SplitMeta(0)).code, StatusCode::kResourceExhausted);
  const uint16_t cell = 0;
  EXPECT_FALSE(seven->LoadCells(0, seven->cells_per_split(), 1, &cell).ok());
  EXPECT_FALSE(seven->LoadCells(7, 0, 1, &cell).ok());
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kManyIds = 100000;
#else
constexpr int64_t kManyIds = 1000000;
#endif

// Returns the share of ids whose second occurrence does not see a count of 1.
template <typename Filter>
double WrongRate(Filter* filter, int64_t n) {
  std::mt19937_64 random(5);
  Ids ids(n);
  for (int64_t& id : ids) id = static_cast<int64_t>(random());
  for (const int64_t id : ids) filter->Add(id, 1);
  int64_t wrong = 0;
  for (const int64_t id : ids) wrong += filter->Get(id) != 1;
  return static_cast<double>(wrong) / static_cast<double>(n);
}

TEST(CountingFilterTest, FewWrongCounts) {
  CountingFilter filter(kManyIds, 2.0, 64);
  const double rate = WrongRate(&filter, kManyIds);
  EXPECT_GT(rate, 0.000242 * 0.5);
  EXPECT_LT(rate, 0.000242 * 2.0);
  EXPECT_EQ(filter.failures(), 0);
}

TEST(SlidingHashFilterTest, WrongCountsWithinCapacity) {
  const auto filter = Sliding(kManyIds, 10, 1);
  EXPECT_NEAR(WrongRate(filter.get(), kManyIds), 0.00908, 0.00908 * 0.5);
}

TEST(SlidingHashFilterTest, OldCountsFallOutBeyondCapacity) {
  const auto filter = Sliding(kManyIds / 2, 10, 1);
  EXPECT_NEAR(WrongRate(filter.get(), kManyIds), 0.50, 0.1);
}

TEST(SlidingHashFilterTest, ConcurrentOccurrencesAreAllCounted) {
  const auto filter = Sliding(100000, 7, 15);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 3; ++round) {
        for (int64_t id = 0; id < 500; ++id) filter->Add(id * 77, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t exact = 0;
  for (int64_t id = 0; id < 500; ++id) exact += filter->Get(id * 77) == 12;
  EXPECT_GE(exact, 490);
}

TEST(SlidingHashFilterTest, ConcurrentHeadMovesStayConsistent) {
  const auto filter = Sliding(300, 7, 1);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const SlidingFilterMeta meta = filter->Meta();
      ASSERT_EQ(meta.head, meta.head_increment % meta.split_num);
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 3000; ++i) filter->Add(t * 1000000 + i, 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  reader.join();
  EXPECT_GT(filter->Meta().head_increment, 50u);
}

TEST(ProbabilisticFilterTest, ShareOfInsertedIds) {
  constexpr int64_t kIds = 10000;
  Ids ids(kIds);
  for (int64_t i = 0; i < kIds; ++i) ids[i] = i;
  for (const bool equal : {false, true}) {
    std::unique_ptr<ProbabilisticFilter> filter;
    ASSERT_TRUE(ProbabilisticFilter::Create(equal, {7, {}}, &filter).ok());
    for (const uint32_t count : {1u, 2u}) {
      const std::vector<uint32_t> counts(kIds, count);
      std::vector<uint8_t> filtered(kIds);
      filter->Filter(ids.data(), counts.data(), kIds, true, filtered.data());
      int64_t inserted = 0;
      for (const uint8_t f : filtered) inserted += 1 - f;
      const double want = equal ? (count == 1 ? 3481 : 5750) : (count == 1 ? 1428 : 2857);
      // Six standard deviations, of which one is 50 at most.
      EXPECT_NEAR(static_cast<double>(inserted), want, 300.0) << "equal " << equal;
    }
  }
}

TEST(ProbabilisticFilterTest, ThresholdZeroAndInterceptorsPass) {
  for (const bool equal : {false, true}) {
    std::unique_ptr<ProbabilisticFilter> filter;
    ASSERT_TRUE(ProbabilisticFilter::Create(equal, {0, {{1, 1000000}}}, &filter).ok());
    EXPECT_EQ(Kept(filter.get(), Ids(100, 5), true), std::vector<int>(100, 1));
    EXPECT_EQ(Kept(filter.get(), Ids(100, int64_t{1} << 48), false), std::vector<int>(100, 1));
  }
}

TEST(DummyFilterTest, NeverFilters) {
  DummyFilter filter;
  EXPECT_TRUE(filter.NeverFilters());
  EXPECT_EQ(Kept(&filter, {1, 2, 3}, true), (std::vector<int>{1, 1, 1}));
}

}  // namespace
}  // namespace engine
}  // namespace monolith
