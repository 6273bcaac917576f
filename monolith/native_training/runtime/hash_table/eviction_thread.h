// Evicts expired rows every so often, in the background.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_

#include <chrono>
#include <functional>
#include <memory>

namespace monolith {
namespace engine {

// A table's place on the eviction thread, of which a process has one, however many tables there
// are: evictions that are due at the same time run one after another.
//
// Calls `evict` once per `period`, the first time one period after the start, then one period after
// each return. What `evict` throws is reported on standard error, once for each place, and the next
// period is another try. Destruction returns at once, or when an eviction of this place that is
// running has: never from inside `evict`. A forked child has no such thread until it asks for one,
// and places that it has inherited do nothing.
class EvictionThread {
 public:
  // Throws std::system_error or std::bad_alloc where no thread can be started.
  EvictionThread(std::chrono::nanoseconds period, std::function<void()> evict);
  ~EvictionThread();
  EvictionThread(const EvictionThread&) = delete;
  EvictionThread& operator=(const EvictionThread&) = delete;

 private:
  class Loop;
  struct Place;

  Loop* const loop_;
  const std::unique_ptr<Place> place_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EVICTION_THREAD_H_
