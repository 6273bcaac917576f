#include "monolith/native_training/runtime/allocator/page_populator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

namespace monolith {
namespace engine {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older headers do not name it
#endif

}  // namespace

PagePopulator* PagePopulator::Get() {
  // Never destroyed: tables may outlive all static objects.
  alignas(PagePopulator) static char memory[sizeof(PagePopulator)];
  static PagePopulator* const populator = ::new (memory) PagePopulator;
  return populator;
}

PagePopulator::PagePopulator() : process_(getpid()) {}

bool PagePopulator::InChild() const { return getpid() != process_; }

void PagePopulator::Request(char* begin, int64_t bytes) {
  if (bytes <= 0 || InChild()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!supported_) return;
    if (!started_) {
      try {
        std::thread([this] { Work(); }).detach();
        started_ = true;
      } catch (const std::system_error&) {
        supported_ = false;  // no more threads: pages come when they are written to
        return;
      }
    }
    requests_.push_back({begin, bytes});
  }
  requested_.notify_one();
}

void PagePopulator::Cancel(const char* begin, int64_t bytes) {
  if (InChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  requests_.erase(std::remove_if(requests_.begin(), requests_.end(),
                                 [&](const Range& range) { return range.Overlaps(begin, bytes); }),
                  requests_.end());
  done_.wait(lock, [&] { return !current_.Overlaps(begin, bytes); });
}

void PagePopulator::Drain() {
  if (InChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return requests_.empty() && current_.bytes == 0; });
}

void PagePopulator::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    requested_.wait(lock, [&] { return !requests_.empty(); });
    current_ = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const bool unknown =
        madvise(current_.begin, static_cast<size_t>(current_.bytes), kPopulateWrite) != 0 &&
        errno == EINVAL;
    lock.lock();
    if (unknown) {
      supported_ = false;
      requests_.clear();
    }
    current_ = {nullptr, 0};
    done_.notify_all();
  }
}

}  // namespace engine
}  // namespace monolith
