// How the engine borrows threads. It owns none: the caller passes a runner (the op layer wraps
// TensorFlow's worker pool), and a null runner means "in this thread".
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/concurrency/shared_work.h"

namespace monolith {
namespace engine {

class ParallelRunner {
 public:
  virtual ~ParallelRunner() = default;

  // Threads that may run at once (a hint for the size of work units), at least 1.
  virtual int NumThreads() const = 0;

  // Calls step() again and again in this thread and in up to max_threads - 1 others at the same
  // time, in each until it has returned false; returns when all have. `cost` is a rough number of
  // nanoseconds of all steps.
  virtual void RunSteps(int64_t max_threads, int64_t cost, const SharedWork::Step& step) = 0;
};

// Calls fn(begin, end) for disjoint ranges that cover [0, n), possibly at the same time, and
// returns when all are done: on `runner`, or in this thread where it is null or there is one unit
// only. `cost_per_unit` is a rough number of nanoseconds of one unit.
inline void RunParallel(ParallelRunner* runner, int64_t n, int64_t cost_per_unit,
                        const RangeSteps::Range& fn) {
  if (n <= 0) return;
  if (runner == nullptr || n == 1) return fn(0, n);
  // Several ranges per thread, so that one that comes late leaves its share to the others.
  constexpr int64_t kRangesPerThread = 8;
  RangeSteps ranges(n, n / (kRangesPerThread * runner->NumThreads()), fn);
  runner->RunSteps(n, n * cost_per_unit, [&ranges] { return ranges.Next(); });
}

// Calls step() until it has returned false, on `runner` or in this thread.
inline void RunSteps(ParallelRunner* runner, int64_t max_threads, int64_t cost,
                     const SharedWork::Step& step) {
  if (runner != nullptr && max_threads > 1) return runner->RunSteps(max_threads, cost, step);
  while (step()) {
  }
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_
