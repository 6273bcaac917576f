// Lets many threads run a model, or one thread change it.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_RUN_GATE_H_
#define MONOLITH_SERVING_NATIVE_MODEL_RUN_GATE_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace monolith {
namespace serving {

// For std::shared_lock and std::unique_lock. A std::shared_mutex may prefer readers over a waiting
// writer, who would then wait as long as requests come.
class RunGate {
 public:
  void lock_shared() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return writers_ == 0; });
    ++running_;
  }

  // Whether a run would have to wait for a change of the model, which waits for other runs itself.
  bool is_closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return writers_ > 0;
  }

  void unlock_shared() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0 && writers_ > 0) changed_.notify_all();
  }

  void lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++writers_;
    changed_.wait(lock, [&] { return running_ == 0 && !changing_; });
    changing_ = true;
  }

  void unlock() {
    std::lock_guard<std::mutex> lock(mutex_);
    changing_ = false;
    --writers_;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t running_ = 0;
  // The writers that wait, and the one that changes the model.
  int64_t writers_ = 0;
  bool changing_ = false;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_RUN_GATE_H_
