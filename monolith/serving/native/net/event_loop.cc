#include "monolith/serving/native/net/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace monolith {
namespace serving {
namespace {

constexpr uint64_t kWakeKey = 0;
constexpr int kMaxEvents = 256;
// Posted work may post more work, which runs at once for this many rounds before sockets have their
// turn.
constexpr int kMaxPostedRounds = 4;

}  // namespace

Status EventLoop::Open() {
  epoll_ = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = FileDescriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (!epoll_.valid() || !wake_.valid() ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return Status(Code::kInternal, std::string("cannot make an event loop: ") + strerror(errno));
  }
  return Status();
}

void EventLoop::Run() {
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  epoll_event events[kMaxEvents];
  bool more = false;
  while (true) {
    const int count = epoll_wait(epoll_.get(), events, kMaxEvents, more ? 0 : MillisToNextTimer());
    for (int i = 0; i < count; ++i) {
      const uint64_t key = events[i].data.u64;
      if (key == kWakeKey) {
        uint64_t ignored = 0;
        [[maybe_unused]] const ssize_t size = read(wake_.get(), &ignored, sizeof(ignored));
        continue;
      }
      // An earlier event of this round may have removed the handler.
      const auto found = handlers_.find(key);
      if (found != handlers_.end()) found->second->OnEvents(events[i].events);
    }
    RunTimers();
    more = RunPosted();
    for (int i = 1; more && i < kMaxPostedRounds; ++i) more = RunPosted();
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
  }
}

void EventLoop::Stop() {
  Post([this] {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  });
}

void EventLoop::Post(std::function<void()> work) {
  bool wake = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // The loop's own thread checks for work before it waits.
    wake = posted_.empty() && runner_.load(std::memory_order_relaxed) != std::this_thread::get_id();
    posted_.push_back(std::move(work));
  }
  if (!wake) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t size = write(wake_.get(), &one, sizeof(one));
}

uint64_t EventLoop::Add(int fd, uint32_t events, EventHandler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = next_key_;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return 0;
  handlers_[next_key_] = handler;
  return next_key_++;
}

void EventLoop::Modify(uint64_t key, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::Remove(uint64_t key, int fd) {
  if (handlers_.erase(key) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::Timer EventLoop::RunAt(Clock::time_point when, std::function<void()> work) {
  const Timer timer(when, next_timer_++);
  timers_.emplace(timer, std::move(work));
  return timer;
}

int EventLoop::MillisToNextTimer() const {
  if (timers_.empty()) return -1;
  const auto wait = timers_.begin()->first.first - Clock::now();
  // Rounded up: a timer that is due in a part of a millisecond must not spin.
  const int64_t millis =
      std::chrono::duration_cast<std::chrono::milliseconds>(wait + std::chrono::microseconds(999))
          .count();
  return static_cast<int>(std::clamp<int64_t>(millis, 0, 60'000));
}

void EventLoop::RunTimers() {
  if (timers_.empty()) return;
  const Clock::time_point now = Clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    std::function<void()> work = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    work();
  }
}

bool EventLoop::RunPosted() {
  std::vector<std::function<void()>> posted;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted.swap(posted_);
  }
  for (std::function<void()>& work : posted) work();
  std::lock_guard<std::mutex> lock(mutex_);
  return !posted_.empty();
}

}  // namespace serving
}  // namespace monolith
