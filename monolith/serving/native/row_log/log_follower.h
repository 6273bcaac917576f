// Reads a partition from a position to the end that it had, then follows it for as long as it runs.
//
//   start -> behind -> caught up -> ... -> closed
//
// It runs in a thread of its own, which no fault of a broker or a message ends: it reports the
// reason and tries again.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_LOG_FOLLOWER_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_LOG_FOLLOWER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/row_log/partition_reader.h"
#include "monolith/serving/native/row_log/sync_state.h"

namespace monolith {
namespace serving {

// Every message begins with a checksum of what follows.
inline constexpr size_t kCrcBytes = 4;

// Takes the messages of a log, from the follower's thread.
class LogHandler {
 public:
  virtual ~LogHandler() = default;

  // Applies a message; `is_new` if it came after the follower had begun. ResourceExhausted: memory
  // is short, and the message is to come again. Any other error: the message is left out.
  virtual Status Handle(bool is_new, std::string_view value) = 0;

  // Whether to go on with the oldest message when the position is gone.
  virtual bool GoesOnAfterGap(bool is_caught_up) const = 0;
};

// Thread-safe.
class LogFollower {
 public:
  // `handler` outlives this. Once it has caught up, messages may wait for `interval`; 0 takes them
  // as they come.
  LogFollower(std::string servers, const SyncState& state, std::chrono::duration<double> interval,
              LogHandler* handler);
  ~LogFollower() { Close(); }

  LogFollower(const LogFollower&) = delete;
  LogFollower& operator=(const LogFollower&) = delete;

  // Begins to read. `on_change` is called from the thread when one of the two below has changed.
  void Start(std::function<void()> on_change);
  // Stops reading. Once this returns, no more messages are applied.
  void Close();

  // Whether everything that was in the log at the start is applied.
  bool is_caught_up() const;
  // The reason why it is stuck, or its progress; empty while it follows.
  std::string reason() const;

  // Messages between the position and the last known end of the partition.
  int64_t lag() const { return lag_; }
  // Messages that were skipped.
  int64_t skipped() const { return skipped_; }
  // How often messages were gone before they were read.
  int64_t lost() const { return lost_; }

 private:
  void Run();
  Status Follow(PartitionReader* reader);
  Status Handle(int64_t offset, std::string_view value);
  void NoteProgress(int64_t high);
  void SetCaughtUp();
  void Say(const std::string& reason, bool quietly = false);
  // Returns early when closed.
  void Sleep(std::chrono::duration<double> time);

  const std::string servers_;
  const SyncState state_;
  const std::string name_;
  const std::chrono::duration<double> interval_;
  LogHandler* const handler_;
  std::function<void()> on_change_;

  // The thread's own.
  int64_t next_offset_;
  // The end of the partition at the start: later messages are applied while the model serves. -1 if
  // not known yet.
  int64_t target_ = -1;

  std::atomic<int64_t> lag_{0};
  std::atomic<int64_t> skipped_{0};
  std::atomic<int64_t> lost_{0};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::condition_variable closed_;
  bool is_caught_up_ = false;
  std::string reason_ = "it has not begun to read the log";
  std::thread thread_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_LOG_FOLLOWER_H_
