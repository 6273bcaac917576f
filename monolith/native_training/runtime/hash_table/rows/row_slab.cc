#include "monolith/native_training/runtime/hash_table/rows/row_slab.h"

#include <cstring>
#include <string>

#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kSmallPageBytes = 4096;

}  // namespace

__attribute__((noinline)) bool RowSlab::TakeBlock() {
  do {
    if (!arena_->AllocateBlock(&next_)) return false;
    left_ = arena_->block_rows();
    // The first row number means "empty" and the last one "erased" in the index.
    if (next_ == 0) {
      ++next_;
      --left_;
    }
    if (uint64_t{next_} + left_ > 0xffffffffull) --left_;
  } while (left_ == 0);  // a block of no other row
  return true;
}

__attribute__((noinline)) uint32_t RowSlab::Reuse() {
  RowArena::Block* const block = arena_->BlockAt(reusable_);
  const uint32_t row = block->free_row;
  std::memcpy(&block->free_row, Address(row), sizeof(block->free_row));
  if (--block->free_rows == 0) {
    Unlink(*block);
  } else {
    PrefetchForWrite(Address(block->free_row));
  }
  --free_;
  ++reused_;
  return row;
}

void RowSlab::Free(uint32_t row) {
  const uint32_t number = arena_->BlockOf(row);
  RowArena::Block* const block = arena_->BlockAt(number);
  std::memcpy(Address(row), &block->free_row, sizeof(block->free_row));
  block->free_row = row;
  ++free_;
  if (++block->free_rows == 1) {
    block->previous = RowArena::kNoBlock;
    block->next = reusable_;
    if (reusable_ != RowArena::kNoBlock) arena_->BlockAt(reusable_)->previous = number;
    reusable_ = number;
  }
  if (arena_->InFirstRegion(row)) return;
  const bool newest = left_ > 0 && number == arena_->BlockOf(next_);
  if (block->free_rows + (newest ? left_ : 0) < arena_->block_rows()) return;
  Unlink(*block);
  free_ -= block->free_rows;
  if (newest) left_ = 0;
  arena_->FreeBlock(number);
}

void RowSlab::Unlink(const RowArena::Block& block) {
  if (block.previous == RowArena::kNoBlock) {
    reusable_ = block.next;
  } else {
    arena_->BlockAt(block.previous)->next = block.next;
  }
  if (block.next != RowArena::kNoBlock) arena_->BlockAt(block.next)->previous = block.previous;
}

int64_t RowSlab::UntouchedBytes() const {
  if (left_ == 0 || !arena_->OnSmallPages(next_)) return 0;
  return left_ * arena_->stride() / kSmallPageBytes * kSmallPageBytes;
}

Status NoRoomForRows(const RowArena& arena, int64_t size) {
  if (arena.HasRowNumbers()) {
    return Status::ResourceExhausted("no memory for new rows, the table has " +
                                     std::to_string(size));
  }
  return Status::ResourceExhausted(
      "the table has " + std::to_string(size) +
      " rows and can number no more, as one table has at most 2^32: spread its ids over several "
      "tables or parameter servers");
}

}  // namespace engine
}  // namespace monolith
