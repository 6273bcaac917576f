// Counts occurrences in a ring of counting filters, so that old counts fall out.
//
//        head - 3   head - 2   head - 1     head     head + 1
//   ... +--------+ +--------+ +--------+ +--------+ +--------+ ...     S splits in a ring
//       | older counts, read only      | | current | look-ahead|
//       +--------+ +--------+ +--------+ +--------+ +--------+
//
// An id is counted in the head (or, if its neighbourhood there is full, in the look-ahead split).
// If it is new there, its count is carried over from the newest older split that knows it. When the
// head is full it moves on by one, and the split that becomes the next look-ahead is cleared.
//
// Thread-safe. Cells are atomic; moving the head is the only step under a mutex. SwapContent
// excludes all. Cost per id: the head and look-ahead cells (prefetched in windows), older splits
// only for ids new to the head.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_SLIDING_HASH_FILTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_SLIDING_HASH_FILTER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_filter/counting_filter.h"
#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"

namespace monolith {
namespace engine {

// The state that all saved splits carry (SlidingHashFilterMetaDump).
struct SlidingFilterMeta {
  uint32_t split_num = 0;
  uint32_t max_forward_step = 0;
  uint32_t max_backward_step = 0;
  uint32_t max_step = 0;
  uint32_t head = 0;
  uint32_t head_increment = 0;
  uint64_t failure_count = 0;
};

// One saved split (HashFilterSplitMetaDump without the above).
struct FilterSplitMeta {
  uint64_t failure_count = 0;
  uint64_t total_size = 0;
  uint64_t num_elements = 0;
  double fill_rate = 0.0;
};

class SlidingHashFilter : public OccurrenceFilter {
 public:
  // capacity: raised to 300 at least. split_num: raised to 5 at least; splits of capacity /
  // (split_num - 1) elements. Thresholds above 15 are an error: counts end there.
  static Status Create(int64_t capacity, int64_t split_num,
                       const OccurrenceThresholdConfig& thresholds,
                       std::unique_ptr<SlidingHashFilter>* filter);

  // An empty filter of the same shape, to load a checkpoint into before SwapContent.
  Status NewEmptyTwin(std::unique_ptr<SlidingHashFilter>* twin) const;

  // An id passes when it was seen `threshold` times before. Threshold 0: passes, and is not
  // counted.
  void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool for_table,
              uint8_t* filtered) override;

  void FilterWith(uint32_t threshold, uint64_t salt, const int64_t* ids, const uint32_t* counts,
                  int64_t n, bool for_table, uint8_t* filtered) override;
  uint32_t MaxThreshold() const override { return CountingFilter::kMaxCount; }

  // Adds occurrences and returns the count before; 15 when the neighbourhood of the id is full.
  uint32_t Add(int64_t id, uint32_t count);
  uint32_t Get(int64_t id) const;

  // -- Checkpoints: a snapshot of the meta data first, then the cells of each split.

  int64_t split_num() const { return static_cast<int64_t>(splits_.size()); }
  int64_t cells_per_split() const { return splits_[0]->num_cells(); }
  int64_t Elements() const;  // over all splits
  SlidingFilterMeta Meta() const;
  FilterSplitMeta SplitMeta(int64_t split) const;
  void CopyCells(int64_t split, int64_t begin, int64_t n, uint16_t* out) const;

  // Errors (ResourceExhausted) name the field and both values; nothing changes then.
  Status LoadMeta(const SlidingFilterMeta& meta);
  Status LoadSplitMeta(int64_t split, const FilterSplitMeta& meta);
  Status LoadCells(int64_t split, int64_t begin, int64_t n, const uint16_t* cells);

  // Exchanges the counts with a twin that is in no other use.
  void SwapContent(SlidingHashFilter* other);

 private:
  static constexpr int64_t kForwardSteps = 2;
  static constexpr int kMaxProbes = 16;
  static constexpr double kFillRate = 1.2;

  SlidingHashFilter(int64_t capacity, int64_t split_num, OccurrenceThresholds thresholds);

  struct Found {
    CountingFilter* split = nullptr;
    std::atomic<uint16_t>* cell = nullptr;
  };
  template <typename Threshold>
  void Count(const Threshold& threshold_of, uint64_t salt, const int64_t* ids,
             const uint32_t* counts, int64_t n, uint8_t* filtered);
  Found FindCurrent(CountingFilter::Key key, int64_t head) const;
  uint32_t OlderCount(CountingFilter::Key key, int64_t head) const;
  uint32_t AddKey(CountingFilter::Key key, uint32_t count);  // shared lock held
  void MoveHead(int64_t full_head);
  int64_t Ring(int64_t split) const { return split % split_num(); }

  const int64_t capacity_;
  const int64_t requested_splits_;
  const OccurrenceThresholds thresholds_;
  mutable std::shared_mutex content_mutex_;  // shared: count; exclusive: swap
  mutable std::mutex head_mutex_;
  std::vector<std::unique_ptr<CountingFilter>> splits_;
  std::atomic<int64_t> head_{0};
  std::atomic<int64_t> head_increment_{0};
  std::atomic<int64_t> failures_{0};
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_SLIDING_HASH_FILTER_H_
