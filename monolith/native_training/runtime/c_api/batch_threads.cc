#include "monolith/native_training/runtime/c_api/batch_threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"

namespace monolith {
namespace engine {
namespace {

// Waking a thread takes about as long.
constexpr int64_t kMinParallelNanoseconds = 20000;
constexpr int64_t kMaxThreads = 1024;

struct State {
  std::mutex busy;  // held by the thread whose batch has the pool
  std::atomic<int64_t> wanted{0};
  std::unique_ptr<ThreadPool> pool;
};

// Returns what is never destroyed: batches may run while the process ends.
template <typename T>
T* MakeForever() {
  return std::make_unique<T>().release();
}

State* state = MakeForever<State>();

// Threads do not survive a fork, and the parent may have held the lock: the child begins anew.
void AfterFork() {
  const int64_t wanted = state->wanted.load();
  state = MakeForever<State>();
  state->wanted.store(wanted);
}

int64_t ThreadsOfProcess() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max<int64_t>(1, std::thread::hardware_concurrency());
}

int64_t Wanted() {
  static const int64_t kThreads = ThreadsOfProcess();
  const int64_t wanted = state->wanted.load(std::memory_order_relaxed);
  return wanted > 0 ? wanted : kThreads;
}

}  // namespace

BatchThreads* BatchThreads::Get() {
  static BatchThreads* const kThreads = [] {
    pthread_atfork(nullptr, nullptr, &AfterFork);
    return MakeForever<BatchThreads>();
  }();
  return kThreads;
}

void BatchThreads::SetNumThreads(int64_t threads) {
  state->wanted.store(std::clamp<int64_t>(threads, 0, kMaxThreads));
}

int BatchThreads::NumThreads() const { return static_cast<int>(Wanted()); }

void BatchThreads::RunSteps(int64_t max_threads, int64_t cost, const SharedWork::Step& step) const {
  const int64_t wanted = Wanted();
  State* const now = state;
  std::unique_lock<std::mutex> lock(now->busy, std::defer_lock);
  if (wanted > 1 && max_threads > 1 && cost >= kMinParallelNanoseconds && lock.try_lock()) {
    if (now->pool == nullptr || now->pool->NumThreads() != wanted) {
      now->pool.reset();
      now->pool = std::make_unique<ThreadPool>(static_cast<int>(wanted));
    }
    now->pool->RunSteps(max_threads, cost, step);
    return;
  }
  while (step()) {
  }
}

}  // namespace engine
}  // namespace monolith
