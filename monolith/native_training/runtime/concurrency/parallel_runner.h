// How the engine borrows threads. It owns none: the caller passes a runner (the op layer wraps
// TensorFlow's worker pool). Where a runner is passed by pointer, null means "in this thread".
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PARALLEL_RUNNER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "monolith/native_training/runtime/concurrency/shared_work.h"

namespace monolith {
namespace engine {

// Const, as running work changes nothing that a caller could see.
class ParallelRunner {
 public:
  virtual ~ParallelRunner() = default;

  // Threads that may run at once (a hint for the size of work units), at least 1.
  virtual int NumThreads() const = 0;

  // Calls step() again and again in this thread and in up to max_threads - 1 others at the same
  // time, in each until it has returned false; returns when all have. `cost` is a rough number of
  // nanoseconds of all steps.
  virtual void RunSteps(int64_t max_threads, int64_t cost, const SharedWork::Step& step) const = 0;

  // Calls fn(begin, end) on disjoint ranges of at most `grain` that cover [0, n), on as many
  // threads as there are ranges; returns when all are done. With one thread there is one range.
  void RunRanges(int64_t n, int64_t grain, const RangeSteps::Range& fn) const {
    if (n <= 0) return;
    grain = std::max<int64_t>(1, grain);
    const int64_t threads = std::min<int64_t>((n - 1) / grain + 1, NumThreads());
    if (threads <= 1) return fn(0, n);
    RangeSteps ranges(n, grain, fn);
    RunSteps(threads, std::numeric_limits<int64_t>::max(), [&ranges] { return ranges.Next(); });
  }

  // Calls task(0) ... task(num_tasks - 1), possibly at once; returns when all are done.
  void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const {
    RunRanges(num_tasks, /*grain=*/1, [&task](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) task(t);
    });
  }

  // Calls fn(begin, end) on disjoint ranges that cover [0, total).
  void For(int64_t total, int64_t cycles_per_unit, const RangeSteps::Range& fn) const {
    if (total <= 0) return;
    const int64_t tasks = std::min(total, SmallTasksFor(Work(total, cycles_per_unit)));
    if (tasks == 1) return fn(0, total);
    RunTasks(tasks, [&](int64_t t) { fn(Cut(total, tasks, t), Cut(total, tasks, t + 1)); });
  }

  // Number of tasks worth starting for `work` cycles when each task has a cost of its own.
  int64_t TasksFor(int64_t work) const {
    return std::clamp<int64_t>(work / kMinTaskCycles, 1, NumThreads());
  }

  // The same when more tasks cost nothing: several per thread, so that a thread which is late or
  // slow leaves its share to the others.
  int64_t SmallTasksFor(int64_t work) const {
    if (NumThreads() == 1) return 1;
    return std::clamp<int64_t>(work / kMinTaskCycles, 1, 4 * NumThreads());
  }

  // Cycles of `units` that take this many each. Sizes of tensors without elements are as large as
  // an int64; the estimate ends there.
  static int64_t Work(int64_t units, int64_t cycles_per_unit) {
    int64_t work;
    return __builtin_mul_overflow(units, std::max<int64_t>(1, cycles_per_unit), &work)
               ? std::numeric_limits<int64_t>::max()
               : work;
  }

  // Start of part t when total units are cut into equal parts.
  static int64_t Cut(int64_t total, int64_t parts, int64_t t) {
    return total / parts * t + total % parts * t / parts;
  }

 private:
  // About 20 us: less is not worth waking a thread for.
  static constexpr int64_t kMinTaskCycles = 60000;
};

// Runs everything in the calling thread.
class InlineRunner final : public ParallelRunner {
 public:
  int NumThreads() const override { return 1; }
  void RunSteps(int64_t /*max_threads*/, int64_t /*cost*/,
                const SharedWork::Step& step) const override {
    while (step()) {
    }
  }
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
