#include "monolith/native_training/runtime/concurrency/fair_shared_mutex.h"

namespace monolith {
namespace engine {

void FairSharedMutex::LockSlowly() {
  std::unique_lock<std::mutex> lock(mutex_);
  // From here on there is no way in but through mutex_.
  const uint32_t state = state_.fetch_or(kWaiting, std::memory_order_acquire);
  if (state < kReader && (state & kWriter) == 0 && !AnyoneWaits()) {
    state_.store(kWriter, std::memory_order_relaxed);
    return;
  }
  Writer self;
  (last_writer_ == nullptr ? first_writer_ : last_writer_->next) = &self;
  last_writer_ = &self;
  self.turn.wait(lock, [&self] { return self.has_lock; });
}

void FairSharedMutex::LockSharedSlowly() {
  std::unique_lock<std::mutex> lock(mutex_);
  // kWaiting is set only if this reader does wait: others would queue behind it for nothing.
  uint32_t state = state_.load(std::memory_order_relaxed);
  bool waits = false;
  while (!waits) {
    if (state % kReader == 0) {
      if (state_.compare_exchange_weak(state, state + kReader, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return;
      }
    } else {
      waits = state_.compare_exchange_weak(state, state | kWaiting, std::memory_order_acquire,
                                           std::memory_order_relaxed);
    }
  }
  ++waiting_readers_;
  const uint64_t phase = phase_;
  next_phase_.wait(lock, [this, phase] { return phase_ != phase; });
}

void FairSharedMutex::UnlockSlowly() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_readers_ > 0) {
    AdmitReaders();
  } else if (first_writer_ != nullptr) {
    AdmitWriter();
  } else {
    state_.store(0, std::memory_order_release);
  }
}

void FairSharedMutex::HandOver() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A thread that took mutex_ first may have got in.
  if (state_.load(std::memory_order_acquire) != kWaiting) return;
  if (first_writer_ != nullptr) {
    AdmitWriter();
  } else if (waiting_readers_ > 0) {
    AdmitReaders();
  } else {
    state_.store(0, std::memory_order_release);
  }
}

void FairSharedMutex::AdmitWriter() {
  Writer* const writer = first_writer_;
  first_writer_ = writer->next;
  if (first_writer_ == nullptr) last_writer_ = nullptr;
  state_.store(kWriter + (AnyoneWaits() ? kWaiting : 0), std::memory_order_release);
  writer->has_lock = true;
  writer->turn.notify_one();  // under mutex_: the writer's condition variable lives until then
}

void FairSharedMutex::AdmitReaders() {
  const uint32_t readers = waiting_readers_;
  waiting_readers_ = 0;
  ++phase_;
  state_.store(readers * kReader + (AnyoneWaits() ? kWaiting : 0), std::memory_order_release);
  next_phase_.notify_all();
}

}  // namespace engine
}  // namespace monolith
