// Bounds the memory that all requests take together.
#ifndef MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_
#define MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace monolith {
namespace serving {

// Frees the memory of a string, which assigning an empty one would keep.
inline void FreeText(std::string* text) { std::string().swap(*text); }

// Counts the bytes granted to requests. The last eighth is reserved for small requests, so that a
// few clients with large ones do not lock out the others. Thread-safe.
class MemoryBudget {
 public:
  // Requests of up to `small_bytes` are small.
  MemoryBudget(int64_t limit_bytes, int64_t small_bytes)
      : limit_bytes_(limit_bytes), small_bytes_(small_bytes) {}

  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Changes what a request holds from `old_bytes` to `new_bytes`. Shrinking always succeeds.
  bool Change(int64_t old_bytes, int64_t new_bytes) {
    const int64_t more = new_bytes - old_bytes;
    const int64_t limit = new_bytes > small_bytes_ ? limit_bytes_ - limit_bytes_ / 8 : limit_bytes_;
    int64_t used = used_bytes_.load(std::memory_order_relaxed);
    // A refused request takes nothing, not even for a moment: others would be refused, too.
    do {
      if (more > 0 && more > limit - used) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + more, std::memory_order_relaxed));
    return true;
  }

  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  int64_t limit_bytes() const { return limit_bytes_; }

 private:
  const int64_t limit_bytes_;
  const int64_t small_bytes_;
  std::atomic<int64_t> used_bytes_{0};
};

// One request's share of a budget; it is given back with this object.
class MemoryLease {
 public:
  MemoryLease() = default;
  explicit MemoryLease(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  MemoryLease(MemoryLease&& other) noexcept
      : budget_(std::move(other.budget_)),
        bytes_(std::exchange(other.bytes_, 0)),
        most_bytes_(std::exchange(other.most_bytes_, 0)) {}
  MemoryLease& operator=(MemoryLease&& other) noexcept {
    if (this != &other) {
      Release();
      budget_ = std::move(other.budget_);
      bytes_ = std::exchange(other.bytes_, 0);
      most_bytes_ = std::exchange(other.most_bytes_, 0);
    }
    return *this;
  }
  ~MemoryLease() { Release(); }

  // Returns false, and changes nothing, if the budget is exhausted.
  bool Resize(int64_t bytes) {
    if (budget_ != nullptr && !budget_->Change(bytes_, bytes)) return false;
    bytes_ = bytes;
    most_bytes_ = std::max(most_bytes_, bytes);
    return true;
  }
  void Release() {
    Resize(0);
    if (std::exchange(most_bytes_, 0) >= kReturnedBytes) malloc_trim(0);
  }

  int64_t bytes() const { return bytes_; }
  // Returns the limit of all requests together.
  int64_t limit_bytes() const {
    return budget_ == nullptr ? std::numeric_limits<int64_t>::max() : budget_->limit_bytes();
  }

 private:
  // After a request of this many bytes, freed memory is returned to the system. Each thread frees
  // into an arena of its own, and the largest sizes of all arenas would add up.
  static constexpr int64_t kReturnedBytes = 32 << 20;

  // Null means no bound.
  std::shared_ptr<MemoryBudget> budget_;
  int64_t bytes_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_
