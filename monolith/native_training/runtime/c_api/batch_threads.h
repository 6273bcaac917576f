// The threads of the C interface, of which a process has one set for all tables.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_BATCH_THREADS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_BATCH_THREADS_H_

#include <cstdint>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

namespace monolith {
namespace engine {

// Runs a batch on all threads, or, while another thread's batch has them, in the calling thread
// alone. A forked child starts threads of its own.
class BatchThreads final : public ParallelRunner {
 public:
  // All of them are one: the threads are the process's.
  static BatchThreads* Get();

  // At most this many, the calling one included; 0: as many as this process may run on. Holds from
  // the next batch on.
  static void SetNumThreads(int64_t threads);

  int NumThreads() const override;
  void RunSteps(int64_t max_threads, int64_t cost, const SharedWork::Step& step) const override;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_BATCH_THREADS_H_
