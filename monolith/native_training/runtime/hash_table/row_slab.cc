#include "monolith/native_training/runtime/hash_table/row_slab.h"

#include <algorithm>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/page_populator.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kBlockBytes = int64_t{32} << 10;
constexpr int64_t kMaxRows = int64_t{1} << 32;
constexpr int64_t kMinRegion = int64_t{32} << 20;
// How far pages are committed ahead: little against the table, and enough for a thread to keep up.
constexpr int64_t kMaxAhead = 2 * kHugePageBytes;
constexpr int64_t kAheadFraction = 16;
// Address space only. Sanitizers keep shadow memory of what is mapped, so they get less.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kReservation = int64_t{256} << 20;
#else
constexpr int64_t kReservation = int64_t{64} << 30;
#endif

int64_t RowsPerBlock(int64_t stride) {
  int64_t rows = 1;
  while (rows < 32768 && 2 * rows * stride <= kBlockBytes) rows *= 2;
  return rows;
}

}  // namespace

RowArena::RowArena(int64_t stride, int num_shards)
    : stride_(stride),
      block_rows_(RowsPerBlock(stride)),
      small_page_bytes_(block_rows_ * stride * num_shards),
      next_region_bytes_(kReservation),
      regions_(std::make_unique<Region[]>(kMaxRegions)) {
  // Now, because base_ and first_rows_ are read without a lock. Should it fail, AllocateBlock will
  // say so.
  AddRegion();
}

RowArena::~RowArena() {
  for (int i = 0; i < num_regions_; ++i) {
    PagePopulator::Get()->Cancel(regions_[i].base, regions_[i].rows * stride_);
    UnmapPages(regions_[i].base, regions_[i].rows * stride_);
  }
}

bool RowArena::AllocateBlock(uint32_t* first) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_regions_ == 0 || (next_row_ == end_row_ && !AddRegion())) return false;
  // Some shard has filled its first block, so all have nearly: small pages have done their duty.
  if (next_row_ * stride_ == small_page_bytes_) {
    PromotePages(base_, std::min(small_page_bytes_, regions_[0].rows * stride_));
  }
  *first = static_cast<uint32_t>(next_row_);
  next_row_ += block_rows_;
  PopulateAhead();
  return true;
}

void RowArena::PopulateAhead() {
  const Region& region = regions_[num_regions_ - 1];
  const int64_t used = (next_row_ - region.first_row) * stride_;
  if (num_regions_ == 1 && used <= small_page_bytes_) return;
  const int64_t ahead = std::min(kMaxAhead, used / kAheadFraction);
  const int64_t wanted = (used + ahead) / kHugePageBytes * kHugePageBytes;
  // The page that is being filled is not worth a request: its block is written to at once.
  const int64_t from = std::max(populated_, (used / kHugePageBytes + 1) * kHugePageBytes);
  const int64_t to = std::min(wanted, region.rows * stride_ / kHugePageBytes * kHugePageBytes);
  if (to <= from) return;
  PagePopulator::Get()->Request(region.base + from, to - from);
  populated_ = to;
}

bool RowArena::AddRegion() {
  if (num_regions_ == kMaxRegions || end_row_ >= kMaxRows) return false;
  const int64_t block_bytes = block_rows_ * stride_;
  char* base = nullptr;
  int64_t rows = 0;
  // Where address space is limited (ulimit -v, strict overcommit) a smaller region will do.
  for (; base == nullptr; next_region_bytes_ /= 2) {
    const int64_t blocks = std::max<int64_t>(1, next_region_bytes_ / block_bytes);
    rows = std::min(blocks * block_rows_, kMaxRows - end_row_);
    base = MapPages(rows * stride_, num_regions_ == 0 ? small_page_bytes_ : 0);
    if (base != nullptr) break;
    if (next_region_bytes_ <= kMinRegion) return false;
  }
  regions_[num_regions_] = {base, end_row_, rows};
  if (num_regions_ == 0) {
    base_ = base;
    first_rows_ = static_cast<uint64_t>(rows);
  }
  ++num_regions_;
  populated_ = 0;
  end_row_ += rows;
  return true;
}

char* RowArena::FarAddress(uint32_t row) const {
  if (row == 0) return base_;  // an arena without memory has no other row
  int i = 1;
  while (row >= regions_[i].first_row + regions_[i].rows) ++i;
  return regions_[i].base + (row - regions_[i].first_row) * stride_;
}

}  // namespace engine
}  // namespace monolith
