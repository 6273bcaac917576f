#include "monolith/native_training/runtime/hash_table/eviction_thread.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace monolith {
namespace engine {
namespace {

using Clock = std::chrono::steady_clock;

// Periods of centuries would overflow a point in time.
constexpr std::chrono::hours kLongestPeriod{24 * 365 * 100};

}  // namespace

struct EvictionThread::Place {
  std::chrono::nanoseconds period;
  std::function<void()> evict;
  Clock::time_point due;
  bool running = false;
  bool reported = false;
};

// The thread, and the places it serves. It starts with the first of them and stays.
class EvictionThread::Loop {
 public:
  // That of this process: a fork leaves the thread behind, and maybe a locked mutex, so a child
  // gets another one. Never destroyed: tables may outlive all static objects.
  static Loop* Get() {
    static std::atomic<Loop*> current{nullptr};
    Loop* loop = current.load(std::memory_order_acquire);
    while (loop == nullptr || loop->InChild()) {
      auto made = std::unique_ptr<Loop>(new Loop);
      if (current.compare_exchange_strong(loop, made.get(), std::memory_order_acq_rel)) {
        return made.release();
      }
    }
    return loop;
  }

  bool InChild() const { return getpid() != process_; }

  void Add(Place* place) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!started_) {
        std::thread([this] { Run(); }).detach();
        started_ = true;
      }
      places_.push_back(place);
    }
    changed_.notify_all();
  }

  void Remove(Place* place) {
    std::unique_lock<std::mutex> lock(mutex_);
    places_.erase(std::find(places_.begin(), places_.end(), place));
    changed_.wait(lock, [place] { return !place->running; });
  }

 private:
  Loop() : process_(getpid()) {}

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const auto next =
          std::min_element(places_.begin(), places_.end(),
                           [](const Place* a, const Place* b) { return a->due < b->due; });
      if (next == places_.end()) {
        changed_.wait(lock);
        continue;
      }
      Place* const place = *next;
      if (Clock::now() < place->due) {
        const Clock::time_point due = place->due;  // the place may be gone when this thread wakes
        changed_.wait_until(lock, due);
        continue;
      }
      place->running = true;
      lock.unlock();
      Evict(place);
      lock.lock();
      place->running = false;
      place->due = Clock::now() + place->period;
      changed_.notify_all();
    }
  }

  static void Evict(Place* place) {
    const char* what = nullptr;
    std::exception_ptr held;  // keeps the text of what was thrown
    try {
      place->evict();
    } catch (const std::exception& error) {
      held = std::current_exception();
      what = error.what();
    } catch (...) {
      what = "something that is no exception";
    }
    if (what == nullptr || std::exchange(place->reported, true)) return;
    std::fprintf(stderr, "An eviction failed, and is tried again every period: %s\n", what);
  }

  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Place*> places_;
  bool started_ = false;
};

EvictionThread::EvictionThread(std::chrono::nanoseconds period, std::function<void()> evict)
    : loop_(Loop::Get()), place_(std::make_unique<Place>()) {
  place_->period = std::min<std::chrono::nanoseconds>(period, kLongestPeriod);
  place_->evict = std::move(evict);
  place_->due = Clock::now() + place_->period;
  loop_->Add(place_.get());
}

EvictionThread::~EvictionThread() {
  if (!loop_->InChild()) loop_->Remove(place_.get());
}

}  // namespace engine
}  // namespace monolith
