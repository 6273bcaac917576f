// Waiting for another thread that is at work, without sleeping.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SPIN_WAIT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SPIN_WAIT_H_

#include <thread>

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

// Returns when done() does. For some ten microseconds of work that another thread has begun; where
// that takes longer, because others want its core, they get this one too.
template <typename Done>
void SpinUntil(const Done& done) {
  constexpr int kSpins = 1000;
  for (int spins = 0; !done(); ++spins) {
    spins < kSpins ? SpinPause() : std::this_thread::yield();
  }
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_SPIN_WAIT_H_
