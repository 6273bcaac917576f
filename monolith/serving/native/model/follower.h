// Keeps a loaded model as new as the training that it comes from.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_
#define MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace monolith {
namespace serving {

// One figure of a follower, for metrics.
struct FollowerSample {
  // The metric's name; without `_total` for a counter.
  std::string name;
  // One sentence.
  const char* meaning;
  // The part of the log that it is about.
  int64_t shard;
  double value;
  // Whether it only grows.
  bool is_counter;
};

// Thread-safe. The destructor does what Close does.
class Follower {
 public:
  virtual ~Follower() = default;

  // Begins; `on_change` is called, from other threads, when one of the two below has changed.
  virtual void Start(std::function<void()> on_change) = 0;

  // Whether the model may answer.
  virtual bool is_caught_up() const = 0;

  // Why it is not caught up, or cannot go on; empty while all is well.
  virtual std::string reason() const = 0;

  virtual std::vector<FollowerSample> Samples() const = 0;

  // Ends it; when it returns, the model is not changed any more, and nothing is called.
  virtual void Close() = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_
