#include "monolith/native_training/runtime/hash_table/rows/row_arena.h"

#include <algorithm>
#include <new>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/page_populator.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kBlockBytes = int64_t{32} << 10;
// More address space than processors have.
constexpr int64_t kMaxRegionBytes = int64_t{1} << 56;
// Memory that is made usable at once. A smaller region is so from the beginning: a mapping of two
// kinds counts twice against the number of mappings that a process may have.
constexpr int64_t kCommitBytes = int64_t{32} << 20;
// How far pages are committed ahead: little against the table, and enough for a thread to keep up.
// Where that is next to nothing, so far that it may be at work for the index meanwhile.
constexpr int64_t kUsualAhead = 2 * kHugePageBytes;
constexpr int64_t kMaxAhead = 2 * kUsualAhead;
constexpr int64_t kAheadFraction = 16;
constexpr int64_t kMaxAheadFraction = 256;
// Rows of which a page more than that is little.
constexpr int64_t kMinForWholePage = 4 * kHugePageBytes;

int BlockShift(int64_t stride) {
  int shift = 0;
  while (shift < 15 && (stride << (shift + 1)) <= kBlockBytes) ++shift;
  return shift;
}

// A power of two: a block for each shard, but no more than fit into a huge page. At least two rows,
// because row 0 is none.
int64_t FirstRows(int64_t stride, int64_t block_rows, int num_shards) {
  int64_t rows = std::max<int64_t>(2, block_rows);
  while (rows < block_rows * num_shards && 2 * rows * stride <= kHugePageBytes) rows *= 2;
  return rows;
}

template <typename T>
T* AllocateZeroed(int64_t n) {
  return static_cast<T*>(std::calloc(static_cast<size_t>(n), sizeof(T)));
}

}  // namespace

RowArena::RowArena(int64_t stride, int num_shards, int last_region)
    : stride_(stride),
      block_shift_(BlockShift(stride)),
      first_rows_mask_(static_cast<uint32_t>(FirstRows(stride, block_rows(), num_shards) - 1)),
      last_region_(last_region),
      newest_(__builtin_clz(first_rows_mask_)) {
  if (!MapRegion(newest_, 0, int64_t{first_rows_mask_} + 1)) throw std::bad_alloc();
  base_ = regions_[newest_].base;
  end_row_ = regions_[newest_].rows;
}

RowArena::~RowArena() {
  for (const Region& region : regions_) {
    if (region.base == nullptr) continue;
    PagePopulator::Get()->Cancel(region.base, region.rows * stride_);
    UnmapPages(region.base, region.rows * stride_);
  }
}

RowArena::Block* RowArena::BlockAt(uint32_t block) const {
  const uint32_t row = FirstRow(block);
  const Region& region = regions_[RegionOf(row)];
  return &region.blocks[(row - region.first_row) >> block_shift_];
}

bool RowArena::AllocateBlock(uint32_t* first) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t block = free_ != kNoBlock ? free_ : released_;
  if (block != kNoBlock) {
    Remove(block);
  } else if (!TakeNew(&block)) {
    return false;
  }
  Hold(block);
  *BlockAt(block) = {kNoBlock, kNoBlock, 0, 0};
  *first = FirstRow(block);
  return true;
}

void RowArena::FreeBlock(uint32_t block) {
  std::lock_guard<std::mutex> lock(mutex_);
  Push(BlockState::kFree, block);
  const uint32_t row = FirstRow(block);
  Region* const region = &regions_[RegionOf(row)];
  const int64_t begin = (row - region->first_row) * stride_;
  const int64_t last = begin + BlockBytes() - 1;
  for (int64_t page = begin / kHugePageBytes; page <= last / kHugePageBytes; ++page) {
    ReleasePageIfFree(region, page);
  }
}

bool RowArena::OnSmallPages(uint32_t row) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !promoted_ && InFirstRegion(row);
}

int64_t RowArena::HeldBytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t first_region =
      promoted_ ? RoundUp((int64_t{first_rows_mask_} + 1) * stride_, kHugePageBytes)
                : next_row_ * stride_;
  return first_region + held_bytes_;
}

int64_t RowArena::MetadataBytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return metadata_bytes_;
}

int64_t RowArena::FreeRows() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return free_blocks_ * block_rows();
}

bool RowArena::HasRowNumbers() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_ > last_region_ || next_row_ < end_row_ || free_blocks_ > 0;
}

bool RowArena::TakeNew(uint32_t* block) {
  if (next_row_ == end_row_ && !AddRegion()) return false;
  Region* const region = &regions_[newest_];
  const int64_t used = (next_row_ - region->first_row) * stride_ + BlockBytes();
  if (!Commit(region, used)) return false;
  *block = BlockOf(static_cast<uint32_t>(next_row_));
  next_row_ += block_rows();
  metadata_bytes_ += static_cast<int64_t>(sizeof(Block) + sizeof(BlockState));
  PopulateAhead();
  return true;
}

bool RowArena::AddRegion() {
  // Some shard has filled its first block, so all have nearly: small pages have done their duty.
  if (!promoted_) {
    PromotePages(base_, (int64_t{first_rows_mask_} + 1) * stride_);
    promoted_ = true;
  }
  if (newest_ == last_region_) return false;
  const int64_t rows = int64_t{1} << (32 - newest_);
  // Where address space is limited, as much of it as there is.
  int64_t bytes = std::min(rows, kMaxRegionBytes / stride_) * stride_;
  for (; regions_[newest_ - 1].base == nullptr; bytes /= 2) {
    const int64_t mapped = std::min(rows, bytes / BlockBytes() * block_rows());
    if (mapped > 0 && MapRegion(newest_ - 1, rows, mapped)) break;
    if (bytes <= std::max(kHugePageBytes, BlockBytes())) return false;
  }
  --newest_;
  next_row_ = regions_[newest_].first_row;
  end_row_ = next_row_ + regions_[newest_].rows;
  return true;
}

bool RowArena::MapRegion(int number, int64_t first_row, int64_t rows) {
  const int64_t bytes = RoundUp(rows * stride_, kHugePageBytes);
  const int64_t num_blocks = rows >> block_shift_;
  Region made;
  made.first_row = first_row;
  made.rows = rows;
  made.blocks.reset(AllocateZeroed<Block>(num_blocks));
  made.state.reset(AllocateZeroed<BlockState>(num_blocks));
  made.held.reset(AllocateZeroed<uint8_t>(bytes / kHugePageBytes));
  if (made.blocks == nullptr || made.state == nullptr || made.held == nullptr) return false;
  const PageSize size = first_row == 0 ? PageSize::kSmall : PageSize::kHuge;
  if (bytes <= kCommitBytes) {
    made.base = MapPages(bytes, size);
    made.committed = bytes;
  } else {
    made.base = ReservePages(bytes, size);
  }
  if (made.base == nullptr) return false;
  if (rows * stride_ < bytes) UseSmallPages(made.base + bytes - kHugePageBytes, kHugePageBytes);
  bases_[number] = reinterpret_cast<uintptr_t>(made.base) -
                   static_cast<uintptr_t>(first_row) * static_cast<uintptr_t>(stride_);
  regions_[number] = std::move(made);
  return true;
}

bool RowArena::Commit(Region* region, int64_t bytes) {
  if (bytes <= region->committed) return true;
  const int64_t all = RoundUp(region->rows * stride_, kHugePageBytes);
  for (const int64_t wanted : {bytes + kCommitBytes, bytes}) {
    const int64_t end = std::min(all, RoundUp(wanted, kHugePageBytes));
    if (!CommitPages(region->base + region->committed, end - region->committed)) continue;
    region->committed = end;
    return true;
  }
  return false;
}

void RowArena::PopulateAhead() {
  Region* const region = &regions_[newest_];
  if (region->first_row == 0) return;
  const int64_t used = (next_row_ - region->first_row) * stride_;
  const int64_t all = next_row_ * stride_;
  const int64_t ahead =
      std::min(all / kAheadFraction, std::clamp(all / kMaxAheadFraction, kUsualAhead, kMaxAhead));
  // The page that is being filled is not worth a request: its block is written to at once.
  const int64_t from = std::max(region->populated, (used / kHugePageBytes + 1) * kHugePageBytes);
  // Where it is less than a page, the next one is asked for as soon as it comes that near.
  const bool whole_page = all >= kMinForWholePage && ahead < kUsualAhead;
  const int64_t wanted = whole_page ? RoundUp(used + ahead, kHugePageBytes) : used + ahead;
  const int64_t end = region->rows * stride_;
  Populate(region, from, std::min(wanted, end) / kHugePageBytes * kHugePageBytes);
  if (wanted >= end && all >= kMinForWholePage) PrepareNextRegion();
}

void RowArena::Populate(Region* region, int64_t from, int64_t to) {
  if (to <= from || !Commit(region, to)) return;
  PagePopulator::Get()->Request(region->base + from, to - from);
  region->populated = to;
}

void RowArena::PrepareNextRegion() {
  if (newest_ == last_region_ || regions_[newest_ - 1].base != nullptr) return;
  const int64_t rows = int64_t{1} << (32 - newest_);
  if (rows > kMaxRegionBytes / stride_ || !MapRegion(newest_ - 1, rows, rows)) return;
  Populate(&regions_[newest_ - 1], 0, kHugePageBytes);
}

void RowArena::Hold(uint32_t block) {
  const uint32_t row = FirstRow(block);
  Region* const region = &regions_[RegionOf(row)];
  if (InFirstRegion(row)) return;
  const int64_t begin = (row - region->first_row) * stride_;
  const int64_t last = begin + BlockBytes() - 1;
  for (int64_t page = begin / kHugePageBytes; page <= last / kHugePageBytes; ++page) {
    if (region->held[page] == 0) held_bytes_ += PageBytes(*region, page);
    region->held[page] = 1;
  }
}

int64_t RowArena::PageBytes(const Region& region, int64_t page) const {
  return std::min(kHugePageBytes, region.rows * stride_ - page * kHugePageBytes);
}

void RowArena::ReleasePageIfFree(Region* region, int64_t page) {
  const int64_t begin = page * kHugePageBytes;
  const int64_t end = begin + PageBytes(*region, page);
  const int64_t first = begin / BlockBytes();
  const int64_t last = (end - 1) / BlockBytes();
  for (int64_t i = first; i <= last; ++i) {
    if (region->state[i] == BlockState::kTaken) return;
  }
  ReleasePages(region->base + begin, kHugePageBytes);
  if (region->held[page] == 1) held_bytes_ -= PageBytes(*region, page);
  region->held[page] = 0;
  // Backwards, so that they are handed out again front to back.
  const uint32_t first_block = BlockOf(static_cast<uint32_t>(region->first_row));
  for (int64_t i = last; i >= first; --i) {
    const uint32_t block = first_block + static_cast<uint32_t>(i);
    Remove(block);
    Push(BlockState::kReleased, block);
  }
}

void RowArena::Push(BlockState state, uint32_t block) {
  const uint32_t row = FirstRow(block);
  Region* const region = &regions_[RegionOf(row)];
  region->state[(row - region->first_row) >> block_shift_] = state;
  uint32_t* const list = ListOf(state);
  *BlockAt(block) = {kNoBlock, *list, 0, 0};
  if (*list != kNoBlock) BlockAt(*list)->previous = block;
  *list = block;
  ++free_blocks_;
}

void RowArena::Remove(uint32_t block) {
  const uint32_t row = FirstRow(block);
  Region* const region = &regions_[RegionOf(row)];
  BlockState* const state = &region->state[(row - region->first_row) >> block_shift_];
  const Block links = *BlockAt(block);
  if (links.previous == kNoBlock) {
    *ListOf(*state) = links.next;
  } else {
    BlockAt(links.previous)->next = links.next;
  }
  if (links.next != kNoBlock) BlockAt(links.next)->previous = links.previous;
  *state = BlockState::kTaken;
  --free_blocks_;
}

}  // namespace engine
}  // namespace monolith
