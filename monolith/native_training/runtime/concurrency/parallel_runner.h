// How the engine borrows threads. It owns none: the caller passes a runner (the op layer wraps
// TensorFlow's worker pool), and a null runner means "in this thread".
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_

#include <cstdint>
#include <functional>

namespace monolith {
namespace engine {

class ParallelRunner {
 public:
  virtual ~ParallelRunner() = default;

  // Threads that may run at once (a hint for the size of work units), at least 1.
  virtual int NumThreads() const = 0;

  // Calls fn(begin, end) for disjoint ranges that cover [0, n), possibly at the same time, and
  // returns when all are done. `cost_per_unit` is a rough number of nanoseconds of one unit.
  virtual void ParallelFor(int64_t n, int64_t cost_per_unit,
                           const std::function<void(int64_t, int64_t)>& fn) = 0;
};

// Runs on `runner`, or in this thread where it is null or there is one unit only.
inline void RunParallel(ParallelRunner* runner, int64_t n, int64_t cost_per_unit,
                        const std::function<void(int64_t, int64_t)>& fn) {
  if (n <= 0) return;
  if (runner == nullptr || n == 1) {
    fn(0, n);
  } else {
    runner->ParallelFor(n, cost_per_unit, fn);
  }
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_
