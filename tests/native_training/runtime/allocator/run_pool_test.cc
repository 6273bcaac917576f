#include "monolith/native_training/runtime/allocator/run_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/page_populator.h"

namespace monolith {
namespace engine {
namespace {

bool AllZero(const char* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (data[i] != 0) return false;
  }
  return true;
}

TEST(RunPoolTest, RunsAreAlignedAndReused) {
  RunPool pool;
  char* a = pool.Allocate(10000);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 4096, 0u);
  std::memset(a, 1, 10000);
  pool.Free(a, 10000);
  EXPECT_EQ(pool.bytes_in_use(), 0);
  char* b = pool.Allocate(8000);
  EXPECT_EQ(a, b);
}

TEST(RunPoolTest, NeighboursMerge) {
  RunPool pool;
  char* runs[4];
  for (char*& run : runs) run = pool.Allocate(4096);
  pool.Free(runs[0], 4096);
  pool.Free(runs[2], 4096);
  pool.Free(runs[1], 4096);
  EXPECT_EQ(pool.Allocate(3 * 4096), runs[0]);
}

TEST(RunPoolTest, SmallestHoleThatFitsIsTaken) {
  RunPool pool;
  char* runs[5];
  const int64_t sizes[] = {5 * 4096, 4096, 2 * 4096, 4096, 3 * 4096};
  for (int i = 0; i < 5; ++i) runs[i] = pool.Allocate(sizes[i]);
  for (const int i : {0, 2, 4}) pool.Free(runs[i], sizes[i]);
  EXPECT_EQ(pool.Allocate(2 * 4096), runs[2]);
  EXPECT_EQ(pool.Allocate(3 * 4096), runs[4]);
}

TEST(RunPoolTest, AHoleIsTakenAsAWholeByWhoCanUseIt) {
  RunPool pool;
  char* const runs[] = {pool.Allocate(9 * 4096), pool.Allocate(4096), pool.Allocate(20 * 4096),
                        pool.Allocate(4096)};
  pool.Free(runs[0], 9 * 4096);
  pool.Free(runs[2], 20 * 4096);
  int64_t bytes = 0;
  EXPECT_EQ(pool.AllocateWithin(8 * 4096 - 100, 10 * 4096, &bytes), runs[0]);
  EXPECT_EQ(bytes, 9 * 4096);
  // Only the needed part of a larger one.
  EXPECT_EQ(pool.AllocateWithin(8 * 4096 - 100, 10 * 4096, &bytes), runs[2]);
  EXPECT_EQ(bytes, 8 * 4096);
  EXPECT_EQ(pool.bytes_in_use(), (9 + 1 + 8 + 1) * 4096);
  // Fresh memory neither.
  EXPECT_NE(pool.AllocateWithin(30 * 4096, 60 * 4096, &bytes), nullptr);
  EXPECT_EQ(bytes, 30 * 4096);
}

// The pool keeps a fraction of free memory, whose bytes stay; the system clears what it returns.
TEST(RunPoolTest, LittleFreeMemoryIsKeptMuchIsGivenBack) {
  RunPool pool;
  const int64_t bytes = 2 * kHugePageBytes;
  std::vector<char*> runs;
  for (int i = 0; i < 100; ++i) {
    runs.push_back(pool.Allocate(bytes));
    ASSERT_NE(runs.back(), nullptr);
    std::memset(runs.back(), 1, bytes);
  }
  pool.Free(runs[10], bytes);
  EXPECT_EQ(runs[10][bytes / 2], 1);
  for (int i = 20; i < 30; ++i) pool.Free(runs[i], bytes);
  EXPECT_TRUE(AllZero(runs[10], bytes));
}

// Chunks of 2, 4, 8 and 16 MiB: the run that comes near the end of the last one asks for a page of
// the next, so that none of its users waits for it.
TEST(RunPoolTest, TheFirstPageOfTheNextChunkIsThereBeforeItIsNeeded) {
  char* const page = MapPages(kHugePageBytes, PageSize::kHuge);
  ASSERT_NE(page, nullptr);
  PagePopulator::Get()->Request(page, kHugePageBytes);
  PagePopulator::Get()->Drain();
  const bool supported = ResidentBytes(page, kHugePageBytes) > 0;
  UnmapPages(page, kHugePageBytes);
  if (!supported) GTEST_SKIP() << "this kernel does not commit pages ahead of their use";

  constexpr int64_t kRun = int64_t{1} << 20;
  RunPool pool;
  for (int i = 0; i < 29; ++i) {
    char* const run = pool.Allocate(kRun);
    ASSERT_NE(run, nullptr);
    std::memset(run, 1, kRun);
  }
  PagePopulator::Get()->Drain();
  EXPECT_EQ(pool.bytes_held(), 30 * kRun + kHugePageBytes);
  // The next one lies there: it takes no other memory.
  for (int i = 0; i < 2; ++i) {
    char* const run = pool.Allocate(kRun);
    ASSERT_NE(run, nullptr);
    std::memset(run, 1, kRun);
  }
  EXPECT_EQ(pool.bytes_held(), 30 * kRun + kHugePageBytes);
}

TEST(RunPoolTest, RandomRunsNeverOverlap) {
  RunPool pool;
  std::mt19937_64 random(1);
  std::map<char*, int64_t> live;
  for (int i = 0; i < 2000; ++i) {
    if (live.size() < 20 || random() % 2 == 0) {
      const int64_t bytes = 1 + static_cast<int64_t>(random() % (i % 50 == 0 ? 5000000 : 50000));
      char* run = pool.Allocate(bytes);
      ASSERT_NE(run, nullptr);
      std::memset(run, 0x5a, bytes);
      const auto next = live.lower_bound(run);
      ASSERT_TRUE(next == live.end() || run + bytes <= next->first);
      ASSERT_TRUE(next == live.begin() || std::prev(next)->first + std::prev(next)->second <= run);
      live[run] = bytes;
    } else {
      auto it = live.begin();
      std::advance(it, random() % live.size());
      pool.Free(it->first, it->second);
      live.erase(it);
    }
  }
}

TEST(HugePagesTest, MappingsAreAlignedAndZero) {
  for (const PageSize size : {PageSize::kSmall, PageSize::kHuge}) {
    char* pages = MapPages(5000000, size);
    ASSERT_NE(pages, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pages) % kHugePageBytes, 0u);
    EXPECT_TRUE(AllZero(pages, 5000000));
    pages[4999999] = 1;
    UnmapPages(pages, 5000000);
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
