// Two kinds of work that exclude each other, each with any number of threads inside.
//
// Readers of the "read room" may look at everything without further locks; writers of the "write
// room" lock what they touch among themselves. A writer that arrives closes the read room at once
// and waits for the readers inside, which never wait for anything: so writers do not starve, and
// there is no deadlock.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace monolith {
namespace engine {

class RoomLock {
 public:
  // False while a writer is inside or waiting; the caller then goes another way.
  bool TryEnterRead() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (writers_ > 0) return false;
    ++readers_;
    return true;
  }
  void LeaveRead() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--readers_ == 0) no_readers_.notify_all();
  }

  void EnterWrite() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++writers_;
    no_readers_.wait(lock, [this] { return readers_ == 0; });
  }
  void LeaveWrite() {
    std::lock_guard<std::mutex> lock(mutex_);
    --writers_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable no_readers_;
  int64_t readers_ = 0;
  int64_t writers_ = 0;  // inside or waiting
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

// Holds the read room if it was open.
class TryReadRoom {
 public:
  explicit TryReadRoom(RoomLock* lock) : lock_(lock), entered_(lock->TryEnterRead()) {}
  ~TryReadRoom() {
    if (entered_) lock_->LeaveRead();
  }
  TryReadRoom(const TryReadRoom&) = delete;
  TryReadRoom& operator=(const TryReadRoom&) = delete;
  bool entered() const { return entered_; }

 private:
  RoomLock* const lock_;
  const bool entered_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_ROOM_LOCK_H_
