// Work that is done step by step by threads that are free: the one that started it, and helpers.
//
// The starting thread works instead of waiting for a pool, so a helper that comes late, or never,
// costs nothing: waking a sleeping thread takes longer than many a batch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace monolith {
namespace engine {

// Held by shared_ptr: a helper may find out that it came too late after the work has returned.
class SharedWork {
 public:
  // Does some of the work. False: there is nothing left that this thread could do. Where one
  // throws, the others still come to their end, and Finish throws it.
  using Step = std::function<bool()>;

  // For the calling thread and at most `max_helpers` others. `step` has to stay alive until Finish
  // returns.
  SharedWork(const Step& step, int64_t max_helpers);
  SharedWork(const SharedWork&) = delete;
  SharedWork& operator=(const SharedWork&) = delete;

  // Takes steps until one returns false. For helpers; returns at once for those that come late or
  // are too many.
  void Help();

  // The same for the thread that started the work; returns when no helper is at work any more.
  void Finish() { Finish(nullptr); }

  // The same with `max_helpers` on their way: calls call_helper() again for those that do not come.
  // Where no core is idle for a moment, the kernel puts a woken thread on this one, and may leave
  // it there for milliseconds although another has become idle. A second thread is put there.
  void Finish(const std::function<void()>& call_helper);

 private:
  // Set in `helpers_` when new ones come too late.
  static constexpr int64_t kClosed = int64_t{1} << 62;

  void RunSteps(const std::function<void()>& call_helper);
  // Keeps the exception that is being handled, if it is the first.
  void KeepError();
  // Returns when no helper is at work, and lets no other begin.
  void Close();

  const Step* const step_;
  const int64_t max_helpers_;
  std::atomic<int64_t> helpers_{0};  // at work
  std::atomic<int64_t> came_{0};     // helpers so far
  std::mutex mutex_;
  std::condition_variable idle_;
  std::exception_ptr error_;
};

// The steps of a loop: fn(begin, end) with ranges of at most `grain` units that cover [0, n) once.
class RangeSteps {
 public:
  using Range = std::function<void(int64_t, int64_t)>;

  // `fn` has to stay alive as long as this.
  RangeSteps(int64_t n, int64_t grain, const Range& fn)
      : n_(n), grain_(std::max<int64_t>(1, grain)), fn_(fn) {}

  bool Next() {
    const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) return false;
    fn_(begin, std::min(n_, begin + grain_));
    return true;
  }

 private:
  const int64_t n_;
  const int64_t grain_;
  const Range& fn_;
  alignas(64) std::atomic<int64_t> next_{0};  // on a line of its own: all threads write it
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_
