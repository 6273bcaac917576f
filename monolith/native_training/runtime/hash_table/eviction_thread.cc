#include "monolith/native_training/runtime/hash_table/eviction_thread.h"

#include <utility>

namespace monolith {
namespace engine {

EvictionThread::EvictionThread(std::chrono::nanoseconds period, std::function<void()> evict)
    : period_(period), evict_(std::move(evict)), thread_([this] { Loop(); }) {}

EvictionThread::~EvictionThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void EvictionThread::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto due = std::chrono::steady_clock::now() + period_;
  while (true) {
    if (stopped_.wait_until(lock, due, [this] { return stop_; })) return;
    lock.unlock();
    evict_();
    lock.lock();
    due = std::chrono::steady_clock::now() + period_;
  }
}

}  // namespace engine
}  // namespace monolith
