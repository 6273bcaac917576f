#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"

#include <algorithm>
#include <string>
#include <utility>

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kMinCapacity = 300;
constexpr int64_t kMinSplits = 5;
constexpr int64_t kMaxCells = (int64_t{1} << 32) - 1;  // offsets in checkpoints are 32 bits
constexpr int kWindow = 32;

Status Mismatch(const char* field, uint64_t got, uint64_t want) {
  return Status::ResourceExhausted(std::string("the saved hash filter has ") + field + " " +
                                   std::to_string(got) + ", this one has " + std::to_string(want));
}

}  // namespace

Status SlidingHashFilter::Create(int64_t capacity, int64_t split_num,
                                 const OccurrenceThresholdConfig& config,
                                 std::unique_ptr<SlidingHashFilter>* filter) {
  OccurrenceThresholds thresholds;
  Status status = OccurrenceThresholds::Create(config, CountingFilter::kMaxCount, &thresholds);
  if (!status.ok()) return status;
  if (capacity < 0 || capacity > kMaxCells / 2) {
    return Status::InvalidArgument("capacity is " + std::to_string(capacity) + ", want 0 to " +
                                   std::to_string(kMaxCells / 2));
  }
  if (split_num < 0 || split_num > 100000) {
    return Status::InvalidArgument("split_num is " + std::to_string(split_num) +
                                   ", want 0 to 100000");
  }
  std::unique_ptr<SlidingHashFilter> result(
      new SlidingHashFilter(capacity, split_num, std::move(thresholds)));
  for (const auto& split : result->splits_) {
    if (!split->valid()) {
      return Status::ResourceExhausted("no memory for a hash filter of capacity " +
                                       std::to_string(capacity));
    }
  }
  *filter = std::move(result);
  return Status::Ok();
}

SlidingHashFilter::SlidingHashFilter(int64_t capacity, int64_t split_num,
                                     OccurrenceThresholds thresholds)
    : capacity_(std::max(capacity, kMinCapacity)),
      requested_splits_(std::max(split_num, kMinSplits)),
      thresholds_(std::move(thresholds)) {
  const int64_t split_capacity = capacity_ / (requested_splits_ - kForwardSteps + 1);
  for (int64_t i = 0; i < requested_splits_; ++i) {
    splits_.push_back(std::make_unique<CountingFilter>(split_capacity, kFillRate, kMaxProbes));
  }
}

Status SlidingHashFilter::NewEmptyTwin(std::unique_ptr<SlidingHashFilter>* twin) const {
  std::unique_ptr<SlidingHashFilter> result(
      new SlidingHashFilter(capacity_, requested_splits_, thresholds_));
  for (const auto& split : result->splits_) {
    if (!split->valid()) return Status::ResourceExhausted("no memory for a second hash filter");
  }
  *twin = std::move(result);
  return Status::Ok();
}

void SlidingHashFilter::Filter(const int64_t* ids, const uint32_t* counts, int64_t n,
                               bool /*for_table*/, uint8_t* filtered) {
  Count([this](int64_t id) { return thresholds_.Of(id); }, 0, ids, counts, n, filtered);
}

void SlidingHashFilter::FilterWith(uint32_t threshold, uint64_t salt, const int64_t* ids,
                                   const uint32_t* counts, int64_t n, bool /*for_table*/,
                                   uint8_t* filtered) {
  Count([threshold](int64_t) { return threshold; }, salt, ids, counts, n, filtered);
}

template <typename Threshold>
void SlidingHashFilter::Count(const Threshold& threshold_of, uint64_t salt, const int64_t* ids,
                              const uint32_t* counts, int64_t n, uint8_t* filtered) {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  CountingFilter::Key keys[kWindow];
  uint32_t thresholds[kWindow];
  for (int64_t begin = 0; begin < n; begin += kWindow) {
    const int count = static_cast<int>(std::min<int64_t>(kWindow, n - begin));
    const int64_t head = head_.load(std::memory_order_relaxed);
    for (int j = 0; j < count; ++j) {
      thresholds[j] = threshold_of(ids[begin + j]);
      if (thresholds[j] == 0) continue;
      const uint64_t salted = static_cast<uint64_t>(ids[begin + j]) ^ salt;
      keys[j] = CountingFilter::KeyOf(static_cast<int64_t>(salted));
      splits_[head]->Prefetch(keys[j]);
    }
    for (int j = 0; j < count; ++j) {
      const uint32_t seen_now = counts == nullptr ? 1 : counts[begin + j];
      filtered[begin + j] = thresholds[j] != 0 && AddKey(keys[j], seen_now) < thresholds[j] ? 1 : 0;
    }
  }
}

uint32_t SlidingHashFilter::Add(int64_t id, uint32_t count) {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return AddKey(CountingFilter::KeyOf(id), count);
}

uint32_t SlidingHashFilter::AddKey(CountingFilter::Key key, uint32_t count) {
  const int64_t head = head_.load(std::memory_order_acquire);
  const Found current = FindCurrent(key, head);
  if (current.cell == nullptr) {
    failures_.fetch_add(1, std::memory_order_relaxed);
    return CountingFilter::kMaxCount;
  }
  uint32_t before;
  if (current.cell->load(std::memory_order_relaxed) != 0) {
    before = current.split->AddAt(current.cell, key, count);
  } else {
    const uint32_t older = OlderCount(key, head);
    // Another thread may have filled the cell meanwhile: then its count is the newer one.
    before = std::max(older, current.split->AddAt(current.cell, key, older + count));
  }
  if (splits_[head]->Full()) MoveHead(head);
  return before;
}

SlidingHashFilter::Found SlidingHashFilter::FindCurrent(CountingFilter::Key key,
                                                        int64_t head) const {
  for (int64_t step = 0; step < kForwardSteps; ++step) {
    CountingFilter* split = splits_[Ring(head + step)].get();
    std::atomic<uint16_t>* cell = split->Find(key);
    if (cell != nullptr) return {split, cell};
  }
  return {};
}

uint32_t SlidingHashFilter::OlderCount(CountingFilter::Key key, int64_t head) const {
  const int64_t steps =
      std::min(head_increment_.load(std::memory_order_relaxed), split_num() - kForwardSteps);
  for (int64_t step = 1; step <= steps; ++step) {
    const std::atomic<uint16_t>* cell = splits_[Ring(head - step + split_num())]->Find(key);
    if (cell == nullptr) continue;
    const uint16_t value = cell->load(std::memory_order_relaxed);
    if (value != 0) return CountingFilter::CountOf(value);
  }
  return 0;
}

void SlidingHashFilter::MoveHead(int64_t full_head) {
  std::lock_guard<std::mutex> lock(head_mutex_);
  if (head_.load(std::memory_order_relaxed) != full_head) return;  // another thread was first
  const int64_t next = Ring(full_head + 1);
  // The next look-ahead split holds the oldest counts; they go before anybody looks there.
  splits_[Ring(next + kForwardSteps - 1)]->Clear();
  head_increment_.fetch_add(1, std::memory_order_relaxed);
  head_.store(next, std::memory_order_release);
}

uint32_t SlidingHashFilter::Get(int64_t id) const {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  const CountingFilter::Key key = CountingFilter::KeyOf(id);
  const int64_t head = head_.load(std::memory_order_acquire);
  const Found current = FindCurrent(key, head);
  if (current.cell == nullptr) return CountingFilter::kMaxCount;
  const uint16_t value = current.cell->load(std::memory_order_relaxed);
  return value != 0 ? CountingFilter::CountOf(value) : OlderCount(key, head);
}

int64_t SlidingHashFilter::Elements() const {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  int64_t elements = 0;
  for (const auto& split : splits_) elements += split->num_elements();
  return elements;
}

SlidingFilterMeta SlidingHashFilter::Meta() const {
  std::shared_lock<std::shared_mutex> content(content_mutex_);
  std::lock_guard<std::mutex> lock(head_mutex_);
  SlidingFilterMeta meta;
  meta.split_num = static_cast<uint32_t>(split_num());
  meta.max_forward_step = static_cast<uint32_t>(kForwardSteps);
  meta.max_backward_step = static_cast<uint32_t>(split_num() - kForwardSteps);
  meta.max_step = kMaxProbes;
  meta.head = static_cast<uint32_t>(head_.load());
  meta.head_increment = static_cast<uint32_t>(head_increment_.load());
  meta.failure_count = static_cast<uint64_t>(failures_.load());
  return meta;
}

FilterSplitMeta SlidingHashFilter::SplitMeta(int64_t split) const {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  const CountingFilter& filter = *splits_[split];
  return {static_cast<uint64_t>(filter.failures()), static_cast<uint64_t>(filter.total_size()),
          static_cast<uint64_t>(filter.num_elements()), filter.fill_rate()};
}

void SlidingHashFilter::CopyCells(int64_t split, int64_t begin, int64_t n, uint16_t* out) const {
  std::shared_lock<std::shared_mutex> lock(content_mutex_);
  splits_[split]->CopyCells(begin, n, out);
}

Status SlidingHashFilter::LoadMeta(const SlidingFilterMeta& meta) {
  const SlidingFilterMeta own = Meta();
  if (meta.split_num != own.split_num) return Mismatch("split_num", meta.split_num, own.split_num);
  if (meta.max_forward_step != own.max_forward_step) {
    return Mismatch("max_forward_step", meta.max_forward_step, own.max_forward_step);
  }
  if (meta.max_backward_step != own.max_backward_step) {
    return Mismatch("max_backward_step", meta.max_backward_step, own.max_backward_step);
  }
  if (meta.max_step != own.max_step) return Mismatch("max_step", meta.max_step, own.max_step);
  if (meta.head >= meta.split_num) return Mismatch("head", meta.head, own.split_num);
  head_.store(meta.head);
  head_increment_.store(meta.head_increment);
  failures_.store(static_cast<int64_t>(meta.failure_count));
  return Status::Ok();
}

Status SlidingHashFilter::LoadSplitMeta(int64_t split, const FilterSplitMeta& meta) {
  if (split < 0 || split >= split_num()) return Mismatch("split", split, split_num());
  CountingFilter* filter = splits_[split].get();
  const uint64_t total_size = static_cast<uint64_t>(filter->total_size());
  if (meta.total_size != total_size) return Mismatch("total_size", meta.total_size, total_size);
  filter->LoadCounters(
      static_cast<int64_t>(std::min<uint64_t>(meta.num_elements, filter->capacity())),
      static_cast<int64_t>(meta.failure_count));
  return Status::Ok();
}

Status SlidingHashFilter::LoadCells(int64_t split, int64_t begin, int64_t n,
                                    const uint16_t* cells) {
  if (split < 0 || split >= split_num()) return Mismatch("split", split, split_num());
  if (begin < 0 || n < 0 || begin > cells_per_split() || n > cells_per_split() - begin) {
    return Mismatch("last cell", static_cast<uint64_t>(begin) + n, cells_per_split());
  }
  splits_[split]->LoadCells(begin, n, cells);
  return Status::Ok();
}

void SlidingHashFilter::SwapContent(SlidingHashFilter* other) {
  std::unique_lock<std::shared_mutex> lock(content_mutex_);
  std::swap(splits_, other->splits_);
  const auto swap_value = [](std::atomic<int64_t>* a, std::atomic<int64_t>* b) {
    b->store(a->exchange(b->load()));
  };
  swap_value(&head_, &other->head_);
  swap_value(&head_increment_, &other->head_increment_);
  swap_value(&failures_, &other->failures_);
}

}  // namespace engine
}  // namespace monolith
