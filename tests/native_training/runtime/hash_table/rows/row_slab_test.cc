#include "monolith/native_training/runtime/hash_table/rows/row_slab.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "tests/native_training/runtime/process_memory.h"

namespace monolith {
namespace engine {
namespace {

uint32_t Stored(const RowArena& arena, uint32_t row) {
  uint32_t stored;
  std::memcpy(&stored, arena.Address(row), 4);
  return stored;
}

TEST(RowArenaTest, RowsAreDistinctAndStable) {
  for (const int64_t stride : {4, 48, 144, 8192, 1 << 20}) {
    RowArena arena(stride, 64);
    RowSlab a(&arena), b(&arena);
    const int64_t rows = stride > 100000 ? 40 : 3000;
    std::map<char*, uint32_t> seen;
    for (int64_t i = 0; i < rows; ++i) {
      for (RowSlab* slab : {&a, &b}) {
        const uint32_t row = slab->Allocate();
        ASSERT_NE(row, 0u);
        char* address = slab->Address(row);
        std::memcpy(address, &row, 4);
        ASSERT_TRUE(seen.emplace(address, row).second);
      }
    }
    char* last = nullptr;
    for (const auto& [address, row] : seen) {
      ASSERT_TRUE(last == nullptr || address - last >= stride);
      last = address;
      ASSERT_EQ(Stored(arena, row), row);
      ASSERT_EQ(arena.Address(row), address);
    }
  }
}

TEST(RowArenaTest, RegionsDoubleAndRowZeroStaysZero) {
  constexpr int64_t kStride = 1 << 14;
  RowArena arena(kStride, 64);
  RowSlab slab(&arena);
  std::vector<uint32_t> rows;
  // Over nine regions.
  while (rows.size() < 20000) {
    rows.push_back(slab.Allocate());
    ASSERT_NE(rows.back(), 0u);
    std::memcpy(slab.Address(rows.back()), &rows.back(), 4);
  }
  for (const uint32_t row : rows) ASSERT_EQ(Stored(arena, row), row);
  EXPECT_EQ(std::set<uint32_t>(rows.begin(), rows.end()).size(), rows.size());
  EXPECT_EQ(arena.view().base, arena.Address(0));
  for (int64_t i = 0; i < kStride; ++i) ASSERT_EQ(arena.Address(0)[i], 0);
}

TEST(RowSlabTest, FreeRowsAreHandedOutAgainFirst) {
  RowArena arena(64, 64);
  RowSlab slab(&arena);
  std::vector<uint32_t> rows;
  for (int i = 0; i < 3000; ++i) rows.push_back(slab.Allocate());
  std::vector<uint32_t> freed;
  for (size_t i = 0; i < rows.size(); i += 3) {
    slab.Free(rows[i]);
    freed.push_back(rows[i]);
  }
  std::vector<uint32_t> again;
  for (size_t i = 0; i < freed.size(); ++i) again.push_back(slab.Allocate());
  EXPECT_EQ(std::set<uint32_t>(again.begin(), again.end()),
            std::set<uint32_t>(freed.begin(), freed.end()));
  EXPECT_EQ(slab.reused(), static_cast<int64_t>(freed.size()));
}

TEST(RowSlabTest, BlockOfOneShardIsReusedByAnother) {
  RowArena arena(1024, 64);
  RowSlab a(&arena), b(&arena);
  std::vector<uint32_t> rows;
  for (int64_t i = 0; i < 100 * arena.block_rows(); ++i) rows.push_back(a.Allocate());
  const int64_t held = arena.HeldBytes();
  for (const uint32_t row : rows) a.Free(row);
  EXPECT_GT(arena.FreeRows(), 0);
  const int64_t free_rows = arena.FreeRows();
  const uint32_t last_block = arena.BlockOf(*std::max_element(rows.begin(), rows.end()));
  for (int64_t i = 0; i < free_rows; ++i) ASSERT_LE(arena.BlockOf(b.Allocate()), last_block);
  EXPECT_EQ(arena.FreeRows(), 0);
  EXPECT_LE(arena.HeldBytes(), held);
}

// Rows of one stride that divides pages, and of one that does not.
TEST(RowSlabTest, MemoryOfFreeRowsGoesBackToTheSystem) {
  for (const int64_t stride : {128, 1040}) {
    RowArena arena(stride, 64);
    RowSlab slabs[2] = {RowSlab(&arena), RowSlab(&arena)};
    const int64_t before = ResidentMemory();
    std::vector<uint32_t> rows[2];
    const int64_t count = (int64_t{64} << 20) / stride / 2;
    for (int64_t i = 0; i < count; ++i) {
      for (int s = 0; s < 2; ++s) {
        rows[s].push_back(slabs[s].Allocate());
        std::memset(slabs[s].Address(rows[s].back()), 7, stride);
      }
    }
    EXPECT_GT(ResidentMemory() - before, int64_t{60} << 20);
    EXPECT_NEAR(static_cast<double>(arena.HeldBytes()), double{64 << 20}, double{8 << 20});
    for (const uint32_t row : rows[0]) slabs[0].Free(row);
    // Blocks of both take turns, so hardly a page is free.
    EXPECT_GT(arena.HeldBytes(), int64_t{56} << 20);
    for (const uint32_t row : rows[1]) slabs[1].Free(row);
    EXPECT_LT(arena.HeldBytes(), int64_t{10} << 20);
    // Sanitizers keep what they know of memory that was used.
    if (!kSanitized) {
      EXPECT_LT(ResidentMemory() - before, int64_t{24} << 20);
    }
    // All of it can be had again.
    std::set<uint32_t> again;
    for (int64_t i = 0; i < 2 * count; ++i) {
      const uint32_t row = slabs[0].Allocate();
      ASSERT_NE(row, 0u);
      std::memset(slabs[0].Address(row), 9, stride);
      ASSERT_TRUE(again.insert(row).second);
    }
    EXPECT_LT(arena.HeldBytes(), int64_t{72} << 20);
  }
}

TEST(RowSlabTest, RandomUseNeverHandsARowOutTwice) {
  for (const int64_t stride : {4, 48, 1040, 40000}) {
    RowArena arena(stride, 4);
    std::vector<std::unique_ptr<RowSlab>> slabs;
    for (int s = 0; s < 4; ++s) slabs.push_back(std::make_unique<RowSlab>(&arena));
    std::mt19937_64 random(stride);
    std::map<uint32_t, int> live;
    std::vector<uint32_t> order;
    const size_t most = stride > 10000 ? 300 : 30000;
    for (int phase = 0; phase < 8; ++phase) {
      const bool grow = phase % 2 == 0;
      for (size_t i = 0; i < most; ++i) {
        if (order.empty() || random() % 8 < (grow ? 7 : 1)) {
          const int s = static_cast<int>(random() % 4);
          const uint32_t row = slabs[s]->Allocate();
          ASSERT_NE(row, 0u);
          ASSERT_TRUE(live.emplace(row, s).second) << "row " << row << " was in use";
          std::memcpy(arena.Address(row), &row, 4);
          order.push_back(row);
        } else {
          std::swap(order[random() % order.size()], order.back());
          const uint32_t row = order.back();
          ASSERT_EQ(Stored(arena, row), row);
          slabs[live[row]]->Free(row);
          live.erase(row);
          order.pop_back();
        }
      }
    }
    for (const auto& entry : live) ASSERT_EQ(Stored(arena, entry.first), entry.first);
    for (int64_t i = 0; i < stride; ++i) ASSERT_EQ(arena.Address(0)[i], 0);
  }
}

TEST(RowSlabTest, ShardsTakeAndGiveBackBlocksAtTheSameTime) {
  RowArena arena(512, 4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      RowSlab slab(&arena);
      for (int round = 0; round < 5; ++round) {
        std::vector<uint32_t> rows;
        for (int i = 0; i < 8000; ++i) {
          rows.push_back(slab.Allocate());
          std::memset(slab.Address(rows.back()), t + 1, 512);
        }
        for (const uint32_t row : rows) {
          EXPECT_EQ(slab.Address(row)[511], t + 1);
          slab.Free(row);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A limit on address space, and one on writable memory, which is what strict overcommit counts.
TEST(RowSlabTest, LimitedMemoryIsUsedUpAndAnArenaGoesOnWhenThereIsMore) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space themselves";
  for (const auto limit : {RLIMIT_AS, RLIMIT_DATA}) {
    const int64_t stride = 4096;
    const int64_t room = int64_t{200} << 20;
    const int result = RunInChild([=] {
      RowArena arena(stride, 64);
      RowSlab slab(&arena);
      std::vector<uint32_t> rows;
      rows.reserve(1000000);
      const rlimit old = LimitMemory(limit, room);
      while (const uint32_t row = slab.Allocate()) {
        rows.push_back(row);
        std::memcpy(arena.Address(row), &row, 4);
      }
      // Half of what there is goes into regions that double.
      if (static_cast<int64_t>(rows.size()) * stride < room / 2) return 1;
      if (static_cast<int64_t>(rows.size()) * stride > room + kHugePageBytes) return 2;  // region 0
      if (slab.Allocate() != 0) return 3;
      if (setrlimit(limit, &old) != 0) return 4;
      for (int64_t i = 0; i < 2 * room / stride; ++i) {
        const uint32_t row = slab.Allocate();
        if (row == 0) return 5;
        rows.push_back(row);
        std::memcpy(arena.Address(row), &row, 4);
      }
      for (const uint32_t row : rows) {
        if (Stored(arena, row) != row) return 6;
      }
      return 0;
    });
    EXPECT_EQ(result, 0) << (limit == RLIMIT_AS ? "address space" : "data");
  }
}

TEST(RowArenaTest, AtTheLastRowNumberTheErrorSaysWhatToDo) {
  constexpr int kLastRegion = 13;  // 2^19 rows in all, 2^15 of them in the first region
  RowArena arena(64, 64, kLastRegion);
  RowSlab slab(&arena);
  EXPECT_TRUE(arena.HasRowNumbers());
  EXPECT_EQ(NoRoomForRows(arena, 7).message, "no memory for new rows, the table has 7");
  int64_t rows = 0;
  uint32_t last = 0;
  while (const uint32_t row = slab.Allocate()) {
    last = row;
    ++rows;
  }
  EXPECT_EQ(rows, (int64_t{1} << (32 - kLastRegion)) - 1);
  EXPECT_EQ(last, rows);
  EXPECT_FALSE(arena.HasRowNumbers());
  const Status status = NoRoomForRows(arena, rows);
  EXPECT_EQ(status.code, StatusCode::kResourceExhausted);
  EXPECT_NE(status.message.find("has 524287 rows and can number no more"), std::string::npos)
      << status.message;
  for (uint32_t row = last; row > last - arena.block_rows(); --row) slab.Free(row);
  EXPECT_TRUE(arena.HasRowNumbers()) << "a block came back";
  EXPECT_NE(slab.Allocate(), 0u);
}

TEST(RowArenaTest, NoAddressSpaceForTheFirstRegionIsBadAlloc) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space themselves";
  EXPECT_EQ(RunInChild([] {
              LimitMemory(RLIMIT_AS, 0);
              try {
                RowArena arena(int64_t{8} << 20, 64);
                return 1;
              } catch (const std::bad_alloc&) {
                return 0;
              }
            }),
            0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
