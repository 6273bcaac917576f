// How the distribution code asks for threads without knowing whose they are: kernels hand in
// TensorFlow's pool, tests run in line or on threads of their own.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARALLEL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

namespace monolith {
namespace distribution {

class Parallel {
 public:
  virtual ~Parallel() = default;

  // Most tasks that can run at once, at least 1.
  virtual int num_threads() const = 0;

  // Calls task(0) ... task(num_tasks - 1), possibly at once; returns when all are done.
  virtual void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const = 0;

  // Number of tasks worth starting for `work` cycles when each task has a cost of its own.
  int64_t TasksFor(int64_t work) const {
    return std::clamp<int64_t>(work / kMinTaskCycles, 1, num_threads());
  }

  // The same when more tasks cost nothing: several per thread, so that a thread which is late or
  // slow leaves its share to the others.
  int64_t SmallTasksFor(int64_t work) const {
    if (num_threads() == 1) return 1;
    return std::clamp<int64_t>(work / kMinTaskCycles, 1, 4 * num_threads());
  }

  // Calls fn(begin, end) on disjoint ranges that cover [0, total).
  void For(int64_t total, int64_t cycles_per_unit,
           const std::function<void(int64_t, int64_t)>& fn) const {
    if (total <= 0) return;
    const int64_t tasks = std::min(total, SmallTasksFor(Work(total, cycles_per_unit)));
    if (tasks == 1) {
      fn(0, total);
      return;
    }
    RunTasks(tasks, [&](int64_t t) { fn(Cut(total, tasks, t), Cut(total, tasks, t + 1)); });
  }

  // Cycles of `units` that take so many each. Sizes of tensors without elements are as large as an
  // int64; the estimate ends there.
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

// Runs everything on the calling thread.
class Inline final : public Parallel {
 public:
  int num_threads() const override { return 1; }
  void RunTasks(int64_t num_tasks, const std::function<void(int64_t)>& task) const override {
    for (int64_t t = 0; t < num_tasks; ++t) task(t);
  }
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARALLEL_H_
