// A compact approximate counter of ids: one array of 16-bit cells.
//
//   cell  | 12-bit signature | 4-bit count |    0 = empty; counts saturate at 15
//
//   +----+----+----+ ... +----+-----------------+
//   | c  | c  | c  |     | c  | 64 spill cells  |
//   +----+----+----+ ... +----+-----------------+
//   position = high hash bits * total_size; up to `max_probes` cells from there, wrapping
//
// Memory is mapped lazily: cells that were never touched cost nothing, and clearing gives the pages
// back. Thread-safe and lock-free: a cell changes by compare-exchange, the element counter is
// atomic.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_COUNTING_FILTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_COUNTING_FILTER_H_

#include <atomic>
#include <cstdint>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace engine {

class CountingFilter {
 public:
  static constexpr uint32_t kMaxCount = 15;
  static constexpr int64_t kSpillCells = 64;
  // Written into checkpoints: cells are only meaningful together with this mixer.
  static constexpr uint32_t kMixerVersion = 1;

  // The place of an id, the same in every filter apart from the multiplication by its size.
  struct Key {
    uint32_t position_hash;
    uint16_t signature;  // in the upper 12 bits
  };
  static Key KeyOf(int64_t id) {
    const uint64_t hash = MixId(id);
    // Bits 32 and up: the low ones choose table lines, the position must not follow them.
    return {static_cast<uint32_t>(hash >> 32), static_cast<uint16_t>((hash & 0xfff) << 4)};
  }

  // `capacity` elements, of which each takes `fill_rate` cells.
  CountingFilter(int64_t capacity, double fill_rate = 1.5, int max_probes = 64);
  ~CountingFilter();
  CountingFilter(const CountingFilter&) = delete;
  CountingFilter& operator=(const CountingFilter&) = delete;

  // False: memory for the cells could not be mapped; the filter must not be used.
  bool valid() const { return cells_ != nullptr; }

  // The cell of `key`: its own, or the first empty one in reach; null if there is neither.
  std::atomic<uint16_t>* Find(Key key) const;

  // Adds up to 15 to what `Find` returned (null: looks again) and returns the count before;
  // kMaxCount when there is no cell.
  uint32_t AddAt(std::atomic<uint16_t>* cell, Key key, uint32_t count);

  uint32_t Add(int64_t id, uint32_t count) {
    const Key key = KeyOf(id);
    return AddAt(Find(key), key, count);
  }
  // The count of `id`, 0 if absent, kMaxCount when there is no cell for it.
  uint32_t Get(int64_t id) const {
    const Key key = KeyOf(id);
    const std::atomic<uint16_t>* cell = Find(key);
    return cell == nullptr ? kMaxCount : CountOf(cell->load(std::memory_order_relaxed));
  }

  static uint32_t CountOf(uint16_t cell) { return cell & 0xfu; }

  void Prefetch(Key key) const { PrefetchForWrite(cells_ + Position(key)); }

  bool Full() const { return num_elements() >= capacity_ - 1; }
  int64_t capacity() const { return capacity_; }
  int64_t total_size() const { return total_size_; }
  int64_t num_cells() const { return total_size_ + kSpillCells; }
  int64_t num_elements() const { return num_elements_.load(std::memory_order_relaxed); }
  int64_t failures() const { return failures_.load(std::memory_order_relaxed); }
  double fill_rate() const { return fill_rate_; }

  // All cells empty. Other threads may be counting; what they add meanwhile may be lost.
  void Clear();

  // Plain copies of cells [begin, begin + n), for checkpoints.
  void CopyCells(int64_t begin, int64_t n, uint16_t* out) const;
  void LoadCells(int64_t begin, int64_t n, const uint16_t* cells);
  void LoadCounters(int64_t num_elements, int64_t failures);

 private:
  int64_t Position(Key key) const {
    return static_cast<int64_t>(
        (uint64_t{key.position_hash} * static_cast<uint64_t>(total_size_)) >> 32);
  }
  void CountElement();

  const int64_t capacity_;
  const double fill_rate_;
  const int max_probes_;
  const int64_t total_size_;
  std::atomic<uint16_t>* cells_;
  std::atomic<int64_t> num_elements_{0};
  std::atomic<int64_t> failures_{0};
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_COUNTING_FILTER_H_
