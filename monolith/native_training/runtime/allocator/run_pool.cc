#include "monolith/native_training/runtime/allocator/run_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/page_populator.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kGrain = 4096;
constexpr int64_t kMaxChunk = int64_t{32} << 20;
// Free memory that is kept, as a fraction of what is in use: a run or two of a table's 64.
constexpr int64_t kKeptFraction = 48;

int64_t RoundUp(int64_t bytes, int64_t grain) { return (bytes + grain - 1) / grain * grain; }

// Gives back the huge pages that lie inside the free run [begin, end).
void ReleaseHugePages(char* begin, char* end) {
  const uintptr_t page = kHugePageBytes;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_DONTNEED);
  }
}

}  // namespace

RunPool::~RunPool() {
  for (const Chunk& chunk : chunks_) {
    PagePopulator::Get()->Cancel(chunk.base, chunk.bytes);
    UnmapPages(chunk.base, chunk.bytes);
  }
}

char* RunPool::Allocate(int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  char* run = TakeFree(bytes);
  if (run == nullptr) {
    if (end_ - next_ < bytes && !AddChunk(bytes)) return nullptr;
    run = next_;
    next_ += bytes;
    PopulateAhead(bytes);
  }
  in_use_ += bytes;
  return run;
}

void RunPool::Free(char* run, int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  in_use_ -= bytes;
  AddFree(run, bytes);
  kept_ += bytes;
  if (kept_ > in_use_ / kKeptFraction) ReleaseFree();
}

int64_t RunPool::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

char* RunPool::TakeFree(int64_t bytes) {
  auto fit = free_.end();
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    if (run->second < bytes) continue;
    if (fit == free_.end() || run->second < fit->second) fit = run;
  }
  if (fit == free_.end()) return nullptr;
  char* run = fit->first;
  const int64_t rest = fit->second - bytes;
  free_.erase(fit);
  if (rest > 0) free_.emplace(run + bytes, rest);
  kept_ = std::max<int64_t>(0, kept_ - bytes);
  return run;
}

void RunPool::PopulateAhead(int64_t bytes) {
  char* base = chunks_.back().base;
  const int64_t used = next_ - base;
  const int64_t from = std::max(populated_, RoundUp(used, kHugePageBytes));
  const int64_t to = std::min<int64_t>(used + bytes, end_ - base) / kHugePageBytes * kHugePageBytes;
  if (to <= from) return;
  PagePopulator::Get()->Request(base + from, to - from);
  populated_ = to;
}

void RunPool::AddFree(char* run, int64_t bytes) {
  auto next = free_.lower_bound(run);
  if (next != free_.end() && run + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == run) {
      run = previous->first;
      bytes += previous->second;
      free_.erase(previous);
    }
  }
  free_.emplace(run, bytes);
}

void RunPool::ReleaseFree() {
  for (const auto& run : free_) ReleaseHugePages(run.first, run.first + run.second);
  kept_ = 0;
}

bool RunPool::AddChunk(int64_t min_bytes) {
  const int64_t bytes = std::max(next_chunk_bytes_, RoundUp(min_bytes, kHugePageBytes));
  char* base = MapPages(bytes, 0);
  if (base == nullptr) return false;
  if (next_ < end_) AddFree(next_, end_ - next_);
  next_chunk_bytes_ = std::min(2 * next_chunk_bytes_, kMaxChunk);
  chunks_.push_back({base, bytes});
  next_ = base;
  end_ = base + bytes;
  populated_ = 0;
  return true;
}

}  // namespace engine
}  // namespace monolith
