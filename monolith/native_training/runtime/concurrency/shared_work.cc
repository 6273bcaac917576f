#include "monolith/native_training/runtime/concurrency/shared_work.h"

#include <chrono>

#include "monolith/native_training/runtime/concurrency/cpu_placement.h"
#include "monolith/native_training/runtime/concurrency/spin_wait.h"

namespace monolith {
namespace engine {
namespace {

using Clock = std::chrono::steady_clock;

// Helpers are usually in their last step by then; to sleep and be woken takes about as long.
constexpr std::chrono::microseconds kSpinTime{50};
// A thread that is woken for a core of its own comes in half this time. Doubled with every call.
constexpr std::chrono::microseconds kPatience{100};

}  // namespace

SharedWork::SharedWork(const Step& step, int64_t max_helpers)
    : step_(&step), max_helpers_(max_helpers), cpu_(CurrentCpu()) {}

void SharedWork::Help() {
  if (came_.fetch_add(1, std::memory_order_relaxed) >= max_helpers_) return;
  if (helpers_.load(std::memory_order_relaxed) >= kClosed) return;
  if (const int cpu = cpu_.load(std::memory_order_relaxed); cpu == CurrentCpu()) LeaveCpu(cpu);
  if (helpers_.fetch_add(1, std::memory_order_acquire) < kClosed) {
    try {
      while ((*step_)()) {
      }
    } catch (...) {
      KeepError();
    }
  }
  if (helpers_.fetch_sub(1, std::memory_order_acq_rel) != kClosed + 1) return;
  // Under the lock, or the waiter could look before and sleep after the call.
  std::lock_guard<std::mutex> lock(mutex_);
  idle_.notify_all();
}

void SharedWork::RunSteps(const std::function<void()>& call_helper) {
  std::chrono::microseconds patience = kPatience;
  Clock::time_point call_at = Clock::now() + patience;
  while ((*step_)()) {
    cpu_.store(CurrentCpu(), std::memory_order_relaxed);
    if (call_helper == nullptr) continue;
    const int64_t missing = max_helpers_ - came_.load(std::memory_order_relaxed);
    if (missing <= 0 || Clock::now() < call_at) continue;
    for (int64_t i = 0; i < missing; ++i) call_helper();
    patience *= 2;
    call_at = Clock::now() + patience;
  }
}

void SharedWork::Finish(const std::function<void()>& call_helper) {
  try {
    RunSteps(call_helper);
  } catch (...) {
    KeepError();  // helpers use what belongs to the caller
  }
  Close();
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void SharedWork::KeepError() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == nullptr) error_ = std::current_exception();
}

void SharedWork::Close() {
  if (helpers_.fetch_or(kClosed, std::memory_order_acq_rel) == 0) return;
  const auto is_idle = [this] { return helpers_.load(std::memory_order_acquire) == kClosed; };
  const auto sleep_at = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_idle()) return;
      SpinPause();
    }
  } while (Clock::now() < sleep_at);
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, is_idle);
}

}  // namespace engine
}  // namespace monolith
