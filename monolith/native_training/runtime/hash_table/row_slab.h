// The rows of a table.
//
//   region 0: address space reserved at once, committed when touched, 2 MiB aligned, huge pages
//   +----------------+----------------+----------------+----------------+- - - - - - - - - - - - -
//   | block, shard 5 | block, shard 0 | block, shard 9 | block, shard 5 |   not touched yet
//   +----------------+----------------+----------------+----------------+- - - - - - - - - - - - -
//   block: rows of one shard, about 32 KiB
//   row: values, then state of every segment (row_layout.h)
//
// Row numbers are unique in the table and address = base + row * stride: no table lookup stands
// between an index slot and the prefetch of its row (a chunk table cost 13 ns per id, more than the
// cache miss itself). Only a table larger than the reservation has further regions, reached through
// a list. Shards take blocks in the order in which they grow: huge pages fill up front to back, so
// a table of any size wastes a partly used huge page and the few that are committed ahead of their
// use (page_populator.h), and page faults spread evenly over batches.
// The first block of every shard lies on small pages, so that a table with a handful of rows costs
// kilobytes, until the first of them is full. Rows never move. Freed rows are handed out again
// first, by their shard.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROW_SLAB_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROW_SLAB_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace monolith {
namespace engine {

// Blocks of rows for all shards. AllocateBlock is thread-safe. Address needs no lock: the caller
// holds the lock of the shard that owns the row, and the region was entered before the row was
// handed out.
class RowArena {
 public:
  RowArena(int64_t stride, int num_shards);
  ~RowArena();
  RowArena(const RowArena&) = delete;
  RowArena& operator=(const RowArena&) = delete;

  // What Address reads. Loops copy it into registers: their stores might change the arena, for all
  // the compiler knows.
  struct View {
    const RowArena* arena;
    char* base;
    uint64_t first_rows;
    uint64_t stride;
    char* Address(uint32_t row) const {
      if (__builtin_expect(row < first_rows, 1)) return base + row * stride;
      return arena->FarAddress(row);
    }
  };
  View view() const { return {this, base_, first_rows_, static_cast<uint64_t>(stride_)}; }

  char* Address(uint32_t row) const { return view().Address(row); }

  int64_t block_rows() const { return block_rows_; }

  // Sets *first to the first of block_rows() new rows. False: no memory or no row numbers left.
  bool AllocateBlock(uint32_t* first);

 private:
  struct Region {
    char* base;
    int64_t first_row;
    int64_t rows;
  };
  static constexpr int kMaxRegions = 1024;

  char* FarAddress(uint32_t row) const;
  bool AddRegion();      // mutex held, or from the constructor
  void PopulateAhead();  // mutex held

  const int64_t stride_;
  const int64_t block_rows_;
  const int64_t small_page_bytes_;
  char* base_ = nullptr;  // of region 0; constant after construction, like first_rows_
  uint64_t first_rows_ = 0;
  std::mutex mutex_;
  int num_regions_ = 0;
  int64_t next_row_ = 0;
  int64_t end_row_ = 0;
  int64_t populated_ = 0;  // bytes of the newest region that were asked for ahead of their use
  int64_t next_region_bytes_;
  std::unique_ptr<Region[]> regions_;  // kMaxRegions; never moves, because readers do not lock it
};

// The rows of one shard. Not thread-safe: the shard's lock guards it. Row 0 is never handed out: it
// marks an empty index slot, and it stays all zeros, as what absent ids are read from.
class RowSlab {
 public:
  explicit RowSlab(RowArena* arena) : arena_(arena) {}

  char* Address(uint32_t row) const { return arena_->Address(row); }
  RowArena::View view() const { return arena_->view(); }

  // A row number, or 0 when memory is exhausted. The content is unspecified.
  uint32_t Allocate() {
    if (!free_.empty()) {
      const uint32_t row = free_.back();
      free_.pop_back();
      ++reused_;
      return row;
    }
    while (left_ == 0) {
      if (!arena_->AllocateBlock(&next_)) return 0;
      left_ = arena_->block_rows();
      // The first row number means "empty" and the last one "erased" in the index.
      if (next_ == 0) {
        ++next_;
        --left_;
      }
      if (uint64_t{next_} + left_ > 0xffffffffull) --left_;
    }
    --left_;
    return next_++;
  }
  void Free(uint32_t row) { free_.push_back(row); }

  int64_t reused() const { return reused_; }

  void Swap(RowSlab* other) {
    std::swap(arena_, other->arena_);
    std::swap(free_, other->free_);
    std::swap(next_, other->next_);
    std::swap(left_, other->left_);
    std::swap(reused_, other->reused_);
  }

 private:
  RowArena* arena_;
  uint32_t next_ = 0;
  int64_t left_ = 0;  // rows of the current block that were never used
  int64_t reused_ = 0;
  std::vector<uint32_t> free_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROW_SLAB_H_
