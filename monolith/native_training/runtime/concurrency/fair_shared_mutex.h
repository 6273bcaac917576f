// A lock for one writer or many readers that starves neither.
//
// Phases of readers and single writers take turns while both want in: a reader that comes while a
// writer waits gets in after that writer, together with all other readers that wait by then; a
// writer gets in after the readers that were in before it, and after the writers before it. So a
// reader waits for one writer at most, and a writer for one phase of readers for each writer before
// it. A thread that waits sleeps, and leaves its core to those that hold the lock.
//
// A SharedMutex, for std::unique_lock and std::shared_lock. A thread may not take it twice, not
// even as a reader.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_FAIR_SHARED_MUTEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_FAIR_SHARED_MUTEX_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace monolith {
namespace engine {

class FairSharedMutex {
 public:
  FairSharedMutex() = default;
  FairSharedMutex(const FairSharedMutex&) = delete;
  FairSharedMutex& operator=(const FairSharedMutex&) = delete;

  void lock() {
    if (!try_lock()) LockSlowly();
  }
  bool try_lock() {
    uint32_t state = 0;
    return state_.compare_exchange_strong(state, kWriter, std::memory_order_acquire,
                                          std::memory_order_relaxed);
  }
  void unlock() {
    uint32_t state = kWriter;
    if (!state_.compare_exchange_strong(state, 0, std::memory_order_release,
                                        std::memory_order_relaxed)) {
      UnlockSlowly();
    }
  }

  void lock_shared() {
    if (!try_lock_shared()) LockSharedSlowly();
  }
  // False also while a writer waits.
  bool try_lock_shared() {
    uint32_t state = state_.load(std::memory_order_relaxed);
    while (state % kReader == 0) {
      if (state_.compare_exchange_weak(state, state + kReader, std::memory_order_acquire,
                                       std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }
  void unlock_shared() {
    const uint32_t before = state_.fetch_sub(kReader, std::memory_order_release);
    if (before == kReader + kWaiting) HandOver();
  }

 private:
  // A writer that waits, in the order of arrival.
  struct Writer {
    std::condition_variable turn;
    bool has_lock = false;
    Writer* next = nullptr;
  };

  void LockSlowly();
  void UnlockSlowly();
  void LockSharedSlowly();
  // The last reader of a phase is gone.
  void HandOver();
  // All with mutex_ held.
  void AdmitWriter();
  void AdmitReaders();
  bool AnyoneWaits() const { return first_writer_ != nullptr || waiting_readers_ > 0; }

  // The state is one of: a writer inside, or any number of readers; and whether anyone waits. With
  // kWaiting set it changes only under mutex_, but for readers that leave.
  static constexpr uint32_t kWriter = 1;
  static constexpr uint32_t kWaiting = 2;
  static constexpr uint32_t kReader = 4;

  std::atomic<uint32_t> state_{0};
  uint32_t waiting_readers_ = 0;
  uint64_t phase_ = 0;  // of readers that had to wait
  Writer* first_writer_ = nullptr;
  Writer* last_writer_ = nullptr;
  std::mutex mutex_;
  std::condition_variable next_phase_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_FAIR_SHARED_MUTEX_H_
