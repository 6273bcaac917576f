// Commits pages before they are first written to, on a thread of its own.
//
// The first write to a page waits for the kernel to clear it, 60 us for a huge page, and on a
// virtual machine for the host to find it, 2.4 ms: a large part of what an insert costs. A table
// that grows knows which pages come next, so this thread takes the wait over; a write that comes
// too early faults as before. (Inserting takes the writing thread a tenth less time.) The pages
// come from the memory node of the thread that asks, as if it had written to them itself.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_PAGE_POPULATOR_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_PAGE_POPULATOR_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace monolith {
namespace engine {

// Thread-safe. One for the process; its thread starts with the first request.
class PagePopulator {
 public:
  static PagePopulator* Get();

  // Commits the pages of [begin, begin + bytes) soon; both are multiples of 4 KiB. The content does
  // not change. Does nothing where the kernel cannot (before Linux 5.14), in a forked child, and
  // while too many requests wait. Throws nothing.
  void Request(char* begin, int64_t bytes);

  // Waits until no work is done on [begin, begin + bytes): it can be unmapped.
  void Cancel(const char* begin, int64_t bytes);

  // Waits until all requests are done. For tests.
  void Drain();

 private:
  struct Range {
    char* begin;
    int64_t bytes;
    int node;  // -1: not known
    bool Overlaps(const char* other, int64_t other_bytes) const {
      return begin < other + other_bytes && other < begin + bytes;
    }
  };

  PagePopulator();
  bool InChild() const;
  void Work();
  // Lets this thread's pages come from `node`. False: the system has several and refuses to choose.
  bool PreferNode(int node);

  static constexpr int kMaxRequests = 256;

  const int64_t process_;  // a fork leaves the thread behind, and maybe a locked mutex
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable done_;
  Range requests_[kMaxRequests];  // oldest first
  int num_requests_ = 0;
  Range current_ = {nullptr, 0, -1};
  int preferred_node_ = -1;  // of the working thread
  bool started_ = false;
  bool supported_ = true;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_PAGE_POPULATOR_H_
