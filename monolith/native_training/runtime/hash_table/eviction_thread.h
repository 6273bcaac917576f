// A background thread that evicts expired rows every so often.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace monolith {
namespace engine {

// Calls `evict` once per `period`, the first time one period after the start. Destruction stops at
// once (after an eviction that is running): the thread waits on a condition variable, it does not
// sleep.
class EvictionThread {
 public:
  EvictionThread(std::chrono::nanoseconds period, std::function<void()> evict);
  ~EvictionThread();
  EvictionThread(const EvictionThread&) = delete;
  EvictionThread& operator=(const EvictionThread&) = delete;

 private:
  void Loop();

  const std::chrono::nanoseconds period_;
  const std::function<void()> evict_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_
