// One thread that waits for sockets, timers and closures of other threads (epoll).
//
// Call all methods except Post and Stop in the loop's thread, or while the loop does not run.
#ifndef MONOLITH_SERVING_NATIVE_NET_EVENT_LOOP_H_
#define MONOLITH_SERVING_NATIVE_NET_EVENT_LOOP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/net/file_descriptor.h"

namespace monolith {
namespace serving {

using Clock = std::chrono::steady_clock;

class EventHandler {
 public:
  virtual ~EventHandler() = default;
  // `events` as epoll reports them.
  virtual void OnEvents(uint32_t events) = 0;
};

class EventLoop {
 public:
  EventLoop() = default;
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Must succeed before anything else.
  Status Open();

  // Returns when Stop was called.
  void Run();
  // Thread-safe.
  void Stop();

  // Runs `work` in the loop's thread, in order. Thread-safe.
  void Post(std::function<void()> work);

  // Calls `handler` for `events` of `fd` until Remove. Returns a key, 0 if the kernel refuses.
  uint64_t Add(int fd, uint32_t events, EventHandler* handler);
  void Modify(uint64_t key, int fd, uint32_t events);
  // The handler is not called after this, not even for events that are waiting already.
  void Remove(uint64_t key, int fd);

  using Timer = std::pair<Clock::time_point, uint64_t>;
  // Runs `work` once, not before `when`.
  Timer RunAt(Clock::time_point when, std::function<void()> work);
  // Has no effect if it ran already.
  void Cancel(const Timer& timer) { timers_.erase(timer); }

 private:
  int MillisToNextTimer() const;
  void RunTimers();
  // Returns whether more was posted in the meantime.
  bool RunPosted();

  FileDescriptor epoll_;
  FileDescriptor wake_;
  uint64_t next_key_ = 1;
  uint64_t next_timer_ = 1;
  std::unordered_map<uint64_t, EventHandler*> handlers_;
  std::map<Timer, std::function<void()>> timers_;

  // Set when Run begins.
  std::atomic<std::thread::id> runner_{};
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  bool stopping_ = false;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_EVENT_LOOP_H_
