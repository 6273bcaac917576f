// The rows of one shard, in blocks that it takes from the table's arena (row_arena.h).
//
//   blocks of this shard that have free rows, a list
//   +-------------------+      +-------------------+
//   | . . r . . r r . . | <--> | . r . . . . . . . | <--> ...        newest block: | . . . .     |
//   +-------------------+      +-------------------+                                 used  never
//   used
//         r: free, holds the number of the next free row of its block
//
// Free rows are handed out again first. A block all of whose rows are free goes back to the arena,
// unless it lies in region 0, which has nothing to give back. Rows never move.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_SLAB_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_SLAB_H_

#include <cstdint>
#include <utility>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_table/rows/row_arena.h"

namespace monolith {
namespace engine {

// Not thread-safe: the shard's lock guards it. Row 0 is never handed out: it marks an empty index
// slot, and it stays all zeros, as what absent ids are read from.
class RowSlab {
 public:
  explicit RowSlab(RowArena* arena) : arena_(arena) {}

  char* Address(uint32_t row) const { return arena_->Address(row); }
  RowArena::View view() const { return arena_->view(); }

  // A row number, or 0 when memory is exhausted. The content is unspecified.
  uint32_t Allocate() {
    if (reusable_ != RowArena::kNoBlock) return Reuse();
    if (left_ == 0 && !TakeBlock()) return 0;
    --left_;
    return next_++;
  }
  // Allocates nothing. The row may not be used any more: it is linked with other free ones.
  void Free(uint32_t row);

  int64_t reused() const { return reused_; }
  // Rows that are free, or were never used, in blocks of this shard.
  int64_t FreeRows() const { return free_ + left_; }
  // Bytes of blocks that no memory lies under, because they were never written to.
  int64_t UntouchedBytes() const;

  void Swap(RowSlab* other) { std::swap(*this, *other); }

 private:
  uint32_t Reuse();
  bool TakeBlock();
  void Unlink(const RowArena::Block& block);

  RowArena* arena_;
  uint32_t next_ = 0;
  int64_t left_ = 0;  // rows of the newest block that were never used, from next_
  uint32_t reusable_ = RowArena::kNoBlock;
  int64_t free_ = 0;
  int64_t reused_ = 0;
};

// Why a table of `size` rows got no row from its slabs: it lacks memory, or numbers for rows.
Status NoRoomForRows(const RowArena& arena, int64_t size);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_SLAB_H_
