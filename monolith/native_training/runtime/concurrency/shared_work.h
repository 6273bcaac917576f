// A loop whose pieces are taken by whoever is free: the thread that started it, and helpers.
//
// The starting thread works instead of waiting for a pool, so a helper that comes late, or never,
// costs nothing: waking a sleeping thread takes longer than many a batch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace monolith {
namespace engine {

// Tells the processor that this thread only looks at a flag again and again.
inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Held by shared_ptr: a helper may find out that it came too late after the loop has returned.
class SharedWork {
 public:
  using Range = std::function<void(int64_t, int64_t)>;

  // `fn` is called with ranges of at most `grain` units that cover [0, n) once. It has to stay
  // alive until Finish returns.
  SharedWork(int64_t n, int64_t grain, const Range& fn);
  SharedWork(const SharedWork&) = delete;
  SharedWork& operator=(const SharedWork&) = delete;

  // Takes pieces until none is left. For helpers; returns at once when they come late.
  void Help();

  // The same for the thread that started the loop; returns when all pieces are done.
  void Finish();

 private:
  const int64_t n_;
  const int64_t grain_;
  const Range* const fn_;
  // On lines of their own: all threads write the first, and at the end one waits for the second.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> unfinished_;
  std::mutex mutex_;
  std::condition_variable done_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SHARED_WORK_H_
