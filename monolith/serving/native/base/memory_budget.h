// Bounds the memory that all requests take together.
#ifndef MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_
#define MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace monolith {
namespace serving {

// Counts bytes that are promised to requests. The last eighth is kept for small ones, so that a few
// clients with large requests do not lock the others out. Thread-safe.
class MemoryBudget {
 public:
  // A request of up to `small_bytes` is a small one.
  MemoryBudget(int64_t limit_bytes, int64_t small_bytes)
      : limit_bytes_(limit_bytes), small_bytes_(small_bytes) {}

  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // A request that had `old_bytes` wants `new_bytes`. Giving back always succeeds.
  bool Change(int64_t old_bytes, int64_t new_bytes) {
    const int64_t more = new_bytes - old_bytes;
    const int64_t used = used_bytes_.fetch_add(more, std::memory_order_relaxed) + more;
    const int64_t limit = new_bytes > small_bytes_ ? limit_bytes_ - limit_bytes_ / 8 : limit_bytes_;
    if (more <= 0 || used <= limit) return true;
    used_bytes_.fetch_sub(more, std::memory_order_relaxed);
    return false;
  }

  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  const int64_t limit_bytes_;
  const int64_t small_bytes_;
  std::atomic<int64_t> used_bytes_{0};
};

// What one request has of a budget; it is given back with this object.
class MemoryLease {
 public:
  MemoryLease() = default;
  explicit MemoryLease(std::shared_ptr<MemoryBudget> budget) : budget_(std::move(budget)) {}
  MemoryLease(MemoryLease&& other) noexcept
      : budget_(std::move(other.budget_)), bytes_(std::exchange(other.bytes_, 0)) {}
  MemoryLease& operator=(MemoryLease&& other) noexcept {
    if (this != &other) {
      Release();
      budget_ = std::move(other.budget_);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  ~MemoryLease() { Release(); }

  // Returns false, and keeps what it has, if the budget has not enough.
  bool Resize(int64_t bytes) {
    if (budget_ != nullptr && !budget_->Change(bytes_, bytes)) return false;
    bytes_ = bytes;
    return true;
  }
  void Release() { Resize(0); }

  int64_t bytes() const { return bytes_; }

 private:
  // Null bounds nothing.
  std::shared_ptr<MemoryBudget> budget_;
  int64_t bytes_ = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_MEMORY_BUDGET_H_
