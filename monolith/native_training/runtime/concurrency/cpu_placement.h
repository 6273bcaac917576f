// On which core a thread runs. Elsewhere than on Linux nothing is known and nothing is done.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CPU_PLACEMENT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CPU_PLACEMENT_H_

#if defined(__linux__)
#include <sched.h>
#endif

namespace monolith {
namespace engine {

// The core that this thread runs on, -1 where that is not known.
inline int CurrentCpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread to another core than `cpu` at once, if it may use one; where it may run does
// not change.
inline void LeaveCpu([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(allowed), &allowed);
#endif
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CPU_PLACEMENT_H_
