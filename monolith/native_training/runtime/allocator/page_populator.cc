#include "monolith/native_training/runtime/allocator/page_populator.h"

#include <sys/mman.h>
#include <sys/syscall.h>
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

constexpr int kPreferred = 1;  // MPOL_PREFERRED, without the headers of libnuma

// The memory node of the core that this thread runs on, -1 where that is not known.
int CurrentNode() {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

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
    if (num_requests_ == kMaxRequests) return;
    requests_[num_requests_++] = {begin, bytes, CurrentNode()};
  }
  requested_.notify_one();
}

void PagePopulator::Cancel(const char* begin, int64_t bytes) {
  if (InChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto end = std::remove_if(requests_, requests_ + num_requests_,
                                  [&](const Range& range) { return range.Overlaps(begin, bytes); });
  num_requests_ = static_cast<int>(end - requests_);
  done_.wait(lock, [&] { return !current_.Overlaps(begin, bytes); });
}

void PagePopulator::Drain() {
  if (InChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return num_requests_ == 0 && current_.bytes == 0; });
}

void PagePopulator::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    requested_.wait(lock, [&] { return num_requests_ > 0; });
    current_ = requests_[0];
    std::move(requests_ + 1, requests_ + num_requests_, requests_);
    --num_requests_;
    lock.unlock();
    const bool possible =
        PreferNode(current_.node) &&
        (madvise(current_.begin, static_cast<size_t>(current_.bytes), kPopulateWrite) == 0 ||
         errno != EINVAL);
    lock.lock();
    if (!possible) {
      supported_ = false;
      num_requests_ = 0;
    }
    current_ = {nullptr, 0, -1};
    done_.notify_all();
  }
}

bool PagePopulator::PreferNode(int node) {
  constexpr int kBits = static_cast<int>(8 * sizeof(unsigned long));
  unsigned long mask[16] = {};
  if (node < 0 || node == preferred_node_ || node >= 16 * kBits) return true;
  mask[node / kBits] = 1ul << (node % kBits);
  if (syscall(SYS_set_mempolicy, kPreferred, mask, 16ul * kBits) != 0) {
    // A container may forbid it; that is no matter where there is one node only.
    return access("/sys/devices/system/node/node1", F_OK) != 0;
  }
  preferred_node_ = node;
  return true;
}

}  // namespace engine
}  // namespace monolith
