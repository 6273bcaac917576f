#include "monolith/native_training/runtime/allocator/page_populator.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/run_pool.h"
#include "monolith/native_training/runtime/hash_table/rows/row_slab.h"

namespace monolith {
namespace engine {
namespace {

constexpr int kPopulateWrite = 23;

// Returns whether this kernel can commit pages ahead of their use.
bool KernelPopulates() {
  char* pages = MapPages(kHugePageBytes, PageSize::kHuge);
  const bool populates = madvise(pages, 4096, kPopulateWrite) == 0;
  UnmapPages(pages, kHugePageBytes);
  return populates;
}

int64_t ResidentBytes(char* begin, int64_t bytes) {
  std::vector<unsigned char> resident(bytes / 4096);
  if (mincore(begin, static_cast<size_t>(bytes), resident.data()) != 0) return -1;
  int64_t pages = 0;
  for (const unsigned char page : resident) pages += page & 1;
  return 4096 * pages;
}

TEST(PagePopulatorTest, CommitsPagesAndKeepsContent) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  const int64_t bytes = 4 * kHugePageBytes;
  char* pages = MapPages(bytes, PageSize::kSmall);
  ASSERT_NE(pages, nullptr);
  pages[5] = 7;
  PagePopulator* populator = PagePopulator::Get();
  populator->Request(pages, kHugePageBytes);
  populator->Drain();
  EXPECT_EQ(ResidentBytes(pages, bytes), kHugePageBytes);
  EXPECT_EQ(pages[5], 7);
  EXPECT_EQ(pages[6], 0);
  populator->Cancel(pages, bytes);
  UnmapPages(pages, bytes);
}

TEST(PagePopulatorTest, SurvivesPagesThatAreNotThere) {
  char* pages = MapPages(kHugePageBytes, PageSize::kHuge);
  ASSERT_NE(pages, nullptr);
  UnmapPages(pages, kHugePageBytes);
  PagePopulator::Get()->Request(pages, kHugePageBytes);
  PagePopulator::Get()->Request(pages, 0);
  PagePopulator::Get()->Drain();
}

TEST(PagePopulatorTest, CancelledPagesCanBeUnmappedWhileOthersAsk) {
  std::vector<std::thread> threads;
  std::atomic<int> bad{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&bad] {
      PagePopulator* populator = PagePopulator::Get();
      for (int i = 0; i < 50; ++i) {
        char* pages = MapPages(kHugePageBytes, PageSize::kSmall);
        for (int64_t at = 0; at < kHugePageBytes; at += 65536)
          populator->Request(pages + at, 65536);
        std::memset(pages, i + 1, kHugePageBytes);
        if (pages[0] != i + 1 || pages[kHugePageBytes - 1] != i + 1) ++bad;
        populator->Cancel(pages, kHugePageBytes);
        UnmapPages(pages, kHugePageBytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(bad, 0);
}

TEST(PagePopulatorTest, ForkedChildGoesOnWithoutIt) {
  PagePopulator::Get()->Drain();
  const pid_t child = fork();
  if (child == 0) {
    char* pages = MapPages(kHugePageBytes, PageSize::kHuge);
    PagePopulator::Get()->Request(pages, kHugePageBytes);
    PagePopulator::Get()->Drain();
    PagePopulator::Get()->Cancel(pages, kHugePageBytes);
    UnmapPages(pages, kHugePageBytes);
    _exit(0);
  }
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(PagePopulatorTest, GrowingArenaIsCommittedALittleAhead) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  constexpr int64_t kStride = 128;
  RowArena arena(kStride, 64);
  const int64_t blocks = (int64_t{96} << 20) / (kStride * arena.block_rows());
  uint32_t first = 0;
  for (int64_t i = 0; i < blocks; ++i) ASSERT_TRUE(arena.AllocateBlock(&first));
  PagePopulator::Get()->Drain();
  char* const end = arena.Address(first) + kStride * arena.block_rows();
  EXPECT_EQ(ResidentBytes(end, 2 * kHugePageBytes), 2 * kHugePageBytes);
  EXPECT_EQ(ResidentBytes(end + 3 * kHugePageBytes, 4 * kHugePageBytes), 0);
}

// Less than a page ahead of a table of some pages: the next one as a whole, in time.
TEST(PagePopulatorTest, SmallArenaHasItsNextPageBeforeItIsNeeded) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  constexpr int64_t kStride = 128;
  for (const int64_t pages : {6, 12}) {
    RowArena arena(kStride, 64);
    const int64_t block_bytes = kStride * arena.block_rows();
    const int64_t blocks = (pages * kHugePageBytes - kHugePageBytes / 4) / block_bytes;
    uint32_t first = 0;
    for (int64_t i = 0; i < blocks; ++i) ASSERT_TRUE(arena.AllocateBlock(&first));
    PagePopulator::Get()->Drain();
    char* const next = arena.Address(first) + block_bytes + kHugePageBytes / 4;
    EXPECT_EQ(ResidentBytes(next, kHugePageBytes), kHugePageBytes) << pages;
    EXPECT_EQ(ResidentBytes(next + kHugePageBytes, kHugePageBytes), 0) << pages;
  }
}

// A region is mapped, and has its first page, before the one before it is full.
TEST(PagePopulatorTest, NextRegionOfAnArenaHasItsFirstPageBeforeItIsNeeded) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  constexpr int64_t kStride = 128;
  constexpr uint32_t kRows =
      (int64_t{64} << 20) / kStride;  // a power of two: a region begins there
  RowArena arena(kStride, 64);
  uint32_t first = 0;
  while (first + arena.block_rows() < kRows) ASSERT_TRUE(arena.AllocateBlock(&first));
  PagePopulator::Get()->Drain();
  ASSERT_TRUE(arena.AllocateBlock(&first));
  ASSERT_EQ(first, kRows);
  EXPECT_EQ(ResidentBytes(arena.Address(first), kHugePageBytes), kHugePageBytes);
}

TEST(PagePopulatorTest, LargePoolOfRunsIsFurtherAhead) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  constexpr int64_t kRun = int64_t{1} << 20;
  RunPool pool;
  ASSERT_NE(pool.AllocateZeros(int64_t{2} << 30), nullptr);  // address space only
  // Chunks of 4, 8, 16 and 32 MiB.
  char* run = nullptr;
  for (int i = 0; i < 29; ++i) run = pool.Allocate(kRun);
  ASSERT_NE(run, nullptr);
  PagePopulator::Get()->Drain();
  EXPECT_EQ(ResidentBytes(run, 4 * kHugePageBytes), 4 * kHugePageBytes);
  EXPECT_EQ(ResidentBytes(run + 4 * kHugePageBytes, kHugePageBytes), 0);
}

TEST(PagePopulatorTest, PoolOfRunsIsOneRunAhead) {
  if (!KernelPopulates()) GTEST_SKIP() << "MADV_POPULATE_WRITE needs Linux 5.14";
  const int64_t bytes = 2 * kHugePageBytes;
  RunPool pool;
  // Chunks grow: the third one has room for two runs.
  pool.Allocate(bytes);
  pool.Allocate(bytes);
  char* run = pool.Allocate(bytes);
  ASSERT_NE(run, nullptr);
  PagePopulator::Get()->Drain();
  EXPECT_EQ(ResidentBytes(run, bytes), 0);
  EXPECT_EQ(ResidentBytes(run + bytes, bytes), bytes);
  EXPECT_EQ(pool.Allocate(bytes), run + bytes);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
