#include "monolith/native_training/runtime/concurrency/shared_work.h"

#include <algorithm>
#include <chrono>

namespace monolith {
namespace engine {
namespace {

// Helpers are usually in their last piece by then; to sleep and be woken takes about as long.
constexpr std::chrono::microseconds kSpinTime{50};

}  // namespace

SharedWork::SharedWork(int64_t n, int64_t grain, const Range& fn)
    : n_(n), grain_(std::max<int64_t>(1, grain)), fn_(&fn), unfinished_(n) {}

void SharedWork::Help() {
  int64_t done = 0;
  while (true) {
    const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) break;
    const int64_t end = std::min(n_, begin + grain_);
    (*fn_)(begin, end);
    done += end - begin;
  }
  if (done == 0 || unfinished_.fetch_sub(done, std::memory_order_acq_rel) != done) return;
  // Under the lock, or the waiter could look before and sleep after the call.
  std::lock_guard<std::mutex> lock(mutex_);
  done_.notify_all();
}

void SharedWork::Finish() {
  Help();
  const auto is_done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (is_done()) return;
  const auto sleep_at = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_done()) return;
      SpinPause();
    }
  } while (std::chrono::steady_clock::now() < sleep_at);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, is_done);
}

}  // namespace engine
}  // namespace monolith
