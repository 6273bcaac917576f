#include "monolith/native_training/runtime/allocator/run_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "monolith/native_training/runtime/allocator/huge_pages.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kGrain = 4096;
constexpr int64_t kMaxChunk = int64_t{32} << 20;

int64_t RoundUp(int64_t bytes, int64_t grain) { return (bytes + grain - 1) / grain * grain; }

// Gives back the huge pages that lie inside the free run [begin, end) and touch its newest part.
void ReleaseHugePages(char* begin, char* end, const char* new_begin, const char* new_end) {
  const uintptr_t page = kHugePageBytes;
  const uintptr_t first = std::max((reinterpret_cast<uintptr_t>(begin) + page - 1) / page,
                                   reinterpret_cast<uintptr_t>(new_begin) / page);
  const uintptr_t last = std::min(reinterpret_cast<uintptr_t>(end) / page,
                                  (reinterpret_cast<uintptr_t>(new_end) + page - 1) / page);
  if (first < last) {
    madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_DONTNEED);
  }
}

}  // namespace

RunPool::~RunPool() {
  for (const Chunk& chunk : chunks_) UnmapPages(chunk.base, chunk.bytes);
}

char* RunPool::Allocate(int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  char* run = TakeFree(bytes);
  if (run == nullptr) {
    if (end_ - next_ < bytes && !AddChunk(bytes)) return nullptr;
    run = next_;
    next_ += bytes;
  }
  in_use_ += bytes;
  return run;
}

void RunPool::Free(char* run, int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  in_use_ -= bytes;
  AddFree(run, bytes);
}

int64_t RunPool::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

char* RunPool::TakeFree(int64_t bytes) {
  const auto fit = std::find_if(free_.begin(), free_.end(),
                                [bytes](const auto& run) { return run.second >= bytes; });
  if (fit == free_.end()) return nullptr;
  char* run = fit->first;
  const int64_t rest = fit->second - bytes;
  free_.erase(fit);
  if (rest > 0) free_.emplace(run + bytes, rest);
  return run;
}

void RunPool::AddFree(char* run, int64_t bytes) {
  const char* const freed_begin = run;
  const char* const freed_end = run + bytes;
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
  ReleaseHugePages(run, run + bytes, freed_begin, freed_end);
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
  return true;
}

}  // namespace engine
}  // namespace monolith
