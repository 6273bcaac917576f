#include "monolith/native_training/runtime/ops/file_pool.h"

#include <unistd.h>

#include <atomic>
#include <memory>

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::TaskPool;

constexpr int kThreads = 8;

struct ProcessPool {
  TaskPool pool{kThreads};
  pid_t process = getpid();
};

}  // namespace

TaskPool* FilePool() {
  static std::atomic<ProcessPool*> current{nullptr};
  ProcessPool* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->process != getpid()) {
    auto made = std::make_unique<ProcessPool>();
    if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
      found = made.release();
    }
  }
  return &found->pool;
}

}  // namespace monolith_tf
}  // namespace tensorflow
