#include "monolith/native_training/runtime/allocator/run_pool.h"

#include <algorithm>
#include <new>
#include <utility>

#include "monolith/native_training/runtime/allocator/huge_pages.h"
#include "monolith/native_training/runtime/allocator/page_populator.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kGrain = 4096;
constexpr int64_t kMaxChunk = int64_t{32} << 20;
// Free memory that is kept, as a fraction of what is in use: a run or two of a table's 64.
constexpr int64_t kKeptFraction = 48;

// How far pages are committed ahead of short runs: little against what is in use, and enough for a
// thread to keep up. Where that is next to nothing, so far that it may wait for a core meanwhile.
constexpr int64_t kUsualAhead = 2 * kHugePageBytes;
constexpr int64_t kMaxAhead = 2 * kUsualAhead;
constexpr int64_t kAheadFraction = 16;
constexpr int64_t kMaxAheadFraction = 128;
// Bytes in use from which on the next chunk is mapped, and its first page committed, before it is
// needed: that page was the longest pause of a growing table.
constexpr int64_t kMinForNextChunk = int64_t{16} << 20;

// Gives back the huge pages that lie inside the free run [begin, end).
void ReleaseHugePages(char* begin, char* end) {
  const uintptr_t page = kHugePageBytes;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page;
  if (first < last) {
    ReleasePages(reinterpret_cast<char*>(first * page),
                 static_cast<int64_t>((last - first) * page));
  }
}

}  // namespace

RunPool::~RunPool() {
  const auto unmap = [](const Run& chunk) {
    PagePopulator::Get()->Cancel(chunk.begin, chunk.bytes);
    UnmapPages(chunk.begin, chunk.bytes);
  };
  for (const Run& chunk : chunks_) unmap(chunk);
  if (next_chunk_.begin != nullptr) unmap(next_chunk_);
}

char* RunPool::AllocateWithin(int64_t min_bytes, int64_t max_bytes, int64_t* bytes) {
  min_bytes = RoundUp(min_bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!MakeRoom()) return nullptr;
  if (char* const run = TakeFree(min_bytes, max_bytes, bytes); run != nullptr) return run;
  *bytes = min_bytes;
  char* const run = TakeNew(min_bytes);
  if (run != nullptr) PopulateAhead(min_bytes);
  return run;
}

char* RunPool::AllocateZeros(int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  return MakeRoom() ? TakeNew(bytes) : nullptr;
}

void RunPool::Free(char* run, int64_t bytes) {
  bytes = RoundUp(bytes, kGrain);
  std::lock_guard<std::mutex> lock(mutex_);
  in_use_ -= bytes;
  --runs_in_use_;
  AddFree(run, bytes);
  kept_ += bytes;
  if (kept_ > in_use_ / kKeptFraction) ReleaseFree();
}

int64_t RunPool::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

int64_t RunPool::bytes_held() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t held = 0;
  for (const Run& chunk : chunks_) held += ResidentBytes(chunk.begin, chunk.bytes);
  if (next_chunk_.begin != nullptr) held += ResidentBytes(next_chunk_.begin, next_chunk_.bytes);
  return held;
}

// Room in both lists for one more run and one more chunk.
bool RunPool::MakeRoom() {
  try {
    if (chunks_.size() == chunks_.capacity()) chunks_.reserve(2 * chunks_.size() + 4);
    const size_t most_free = chunks_.size() + static_cast<size_t>(runs_in_use_) + 3;
    if (free_.capacity() < most_free) free_.reserve(2 * most_free);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

char* RunPool::TakeFree(int64_t min_bytes, int64_t max_bytes, int64_t* bytes) {
  auto fit = free_.end();
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    if (run->bytes < min_bytes) continue;
    if (fit == free_.end() || run->bytes < fit->bytes) fit = run;
  }
  if (fit == free_.end()) return nullptr;
  char* run = fit->begin;
  *bytes = fit->bytes <= max_bytes ? fit->bytes : min_bytes;
  if (fit->bytes == *bytes) {
    free_.erase(fit);
  } else {
    *fit = {run + *bytes, fit->bytes - *bytes};
  }
  kept_ = std::max<int64_t>(0, kept_ - *bytes);
  in_use_ += *bytes;
  ++runs_in_use_;
  return run;
}

char* RunPool::TakeNew(int64_t bytes) {
  if (end_ - next_ < bytes && !AddChunk(bytes)) return nullptr;
  char* const run = next_;
  next_ += bytes;
  in_use_ += bytes;
  ++runs_in_use_;
  return run;
}

void RunPool::PopulateAhead(int64_t bytes) {
  char* base = chunks_.back().begin;
  const int64_t used = next_ - base;
  const int64_t from = std::max(populated_, RoundUp(used, kHugePageBytes));
  const int64_t usual = std::clamp(in_use_ / kMaxAheadFraction, kUsualAhead, kMaxAhead);
  const int64_t ahead = std::max(bytes, std::min(usual, in_use_ / kAheadFraction));
  const int64_t to = std::min<int64_t>(used + ahead, end_ - base) / kHugePageBytes * kHugePageBytes;
  if (to > from) {
    PagePopulator::Get()->Request(base + from, to - from);
    populated_ = to;
  }
  if (used + ahead < end_ - base || in_use_ < kMinForNextChunk || next_chunk_.begin != nullptr) {
    return;
  }
  char* const next = MapPages(next_chunk_bytes_, PageSize::kHuge);
  if (next == nullptr) return;
  next_chunk_ = {next, next_chunk_bytes_};
  PagePopulator::Get()->Request(next, kHugePageBytes);
}

void RunPool::AddFree(char* run, int64_t bytes) {
  auto next = std::lower_bound(free_.begin(), free_.end(), run,
                               [](const Run& free, const char* at) { return free.begin < at; });
  const bool before = next != free_.end() && run + bytes == next->begin;
  const bool behind = next != free_.begin() && (next - 1)->end() == run;
  if (before && behind) {
    (next - 1)->bytes += bytes + next->bytes;
    free_.erase(next);
  } else if (before) {
    *next = {run, bytes + next->bytes};
  } else if (behind) {
    (next - 1)->bytes += bytes;
  } else {
    free_.insert(next, {run, bytes});
  }
}

void RunPool::ReleaseFree() {
  for (const Run& run : free_) ReleaseHugePages(run.begin, run.end());
  kept_ = 0;
}

bool RunPool::AddChunk(int64_t min_bytes) {
  Run chunk = {nullptr, std::max(next_chunk_bytes_, RoundUp(min_bytes, kHugePageBytes))};
  const bool prepared = next_chunk_.bytes >= chunk.bytes;
  if (prepared) {
    chunk = std::exchange(next_chunk_, {nullptr, 0});
  } else {
    chunk.begin = MapPages(chunk.bytes, PageSize::kHuge);
    if (chunk.begin == nullptr) return false;
  }
  if (next_ < end_) AddFree(next_, end_ - next_);
  next_chunk_bytes_ = std::min(2 * next_chunk_bytes_, kMaxChunk);
  chunks_.push_back(chunk);
  next_ = chunk.begin;
  end_ = chunk.end();
  populated_ = prepared ? kHugePageBytes : 0;
  return true;
}

}  // namespace engine
}  // namespace monolith
