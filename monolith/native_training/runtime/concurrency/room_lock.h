// Two kinds of work that exclude each other, each with any number of threads inside.
//
// Readers of the "read room" may look at everything without further locks; writers of the "write
// room" lock what they touch among themselves. A writer that arrives closes the read room at once
// and waits for the readers inside, which never wait for anything: so writers do not starve, and
// there is no deadlock. A reader that finds the read room closed waits as long as there are readers
// inside, and so leaves the cores to them; then it goes another way.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace monolith {
namespace engine {

class RoomLock {
 public:
  // False while a writer is inside or waiting; the caller then goes another way.
  bool TryEnterRead() {
    uint64_t people = people_.load(std::memory_order_relaxed);
    while (people < kWriter) {
      if (people_.compare_exchange_weak(people, people + 1, std::memory_order_acquire,
                                        std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }
  void LeaveRead() {
    const uint64_t people = people_.fetch_sub(1, std::memory_order_release) - 1;
    if (people < kWriter || people % kWriter != 0) return;
    // A writer that has seen this reader holds the mutex until it listens.
    const std::lock_guard<std::mutex> lock(mutex_);
    no_readers_.notify_all();
  }
  // Returns when the read room is open, or a writer has got in. Not for those in a room.
  void AwaitDecision() {
    const auto is_decided = [this] {
      const uint64_t people = people_.load(std::memory_order_relaxed);
      return people < kWriter || people % kWriter == 0;
    };
    if (is_decided()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    no_readers_.wait(lock, is_decided);
  }

  void EnterWrite() {
    if (people_.fetch_add(kWriter, std::memory_order_acquire) % kWriter == 0) return;
    std::unique_lock<std::mutex> lock(mutex_);
    no_readers_.wait(lock,
                     [this] { return people_.load(std::memory_order_acquire) % kWriter == 0; });
  }
  void LeaveWrite() { people_.fetch_sub(kWriter, std::memory_order_release); }

  // For one in the write room: whether others are there or want to be. A hint.
  bool HasOtherWriters() const { return people_.load(std::memory_order_relaxed) >= 2 * kWriter; }

 private:
  static constexpr uint64_t kWriter = uint64_t{1} << 32;

  std::atomic<uint64_t> people_{0};  // readers + kWriter * writers, inside or waiting
  std::mutex mutex_;
  std::condition_variable no_readers_;
};

// Holds the write room.
class WriteRoom {
 public:
  explicit WriteRoom(RoomLock* lock) : lock_(lock) { lock_->EnterWrite(); }
  ~WriteRoom() { lock_->LeaveWrite(); }
  WriteRoom(const WriteRoom&) = delete;
  WriteRoom& operator=(const WriteRoom&) = delete;

 private:
  RoomLock* const lock_;
};

// Holds the read rooms that were open, of any number of locks.
class ReadRooms {
 public:
  explicit ReadRooms(int64_t expected) { entered_.reserve(expected); }
  ~ReadRooms() {
    for (RoomLock* lock : entered_) lock->LeaveRead();
  }
  ReadRooms(const ReadRooms&) = delete;
  ReadRooms& operator=(const ReadRooms&) = delete;

  // Like RoomLock::TryEnterRead.
  bool TryEnter(RoomLock* lock) {
    if (!lock->TryEnterRead()) return false;
    entered_.push_back(lock);
    return true;
  }

 private:
  std::vector<RoomLock*> entered_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_
