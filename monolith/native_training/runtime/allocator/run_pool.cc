#include "monolith/native_training/runtime/allocator/run_pool.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "monolith/native_training/runtime/allocator/huge_pages.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kGrain = 4096;
constexpr int64_t kMaxChunk = int64_t{32} << 20;

int64_t RoundUp(int64_t bytes, int64_t grain) { return (bytes + grain - 1) / grain * grain; }

}  // namespace

RunPool::~RunPool() {
  for (const Chunk& chunk : chunks_) UnmapPages(chunk.base, chunk.bytes);
}

char* RunPool::Allocate(int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  char* run;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    run = TakeFree(bytes);
    if (run == nullptr) {
      if (end_ - next_ < bytes && !AddChunk(bytes)) return nullptr;
      run = next_;
      next_ += bytes;
      in_use_ += bytes;
      return run;  // fresh pages are zero
    }
    in_use_ += bytes;
  }
  std::memset(run, 0, bytes);
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
  const auto next = free_.lower_bound(run);
  if (next != free_.end() && run + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(run);
  if (after != free_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first + previous->second == run) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(run, bytes);
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
