// Keeps a loaded model up to date with its training.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_
#define MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace monolith {
namespace serving {

// A metric of a follower.
struct FollowerSample {
  // The metric's name; without `_total` for a counter.
  std::string name;
  // One sentence.
  const char* meaning;
  // The part of the log that it describes.
  int64_t shard;
  double value;
  // Whether it only grows.
  bool is_counter;
};

// Thread-safe. The destructor does what Close does.
class Follower {
 public:
  virtual ~Follower() = default;

  // Starts. Other threads call `on_change` when one of the two values below changes.
  virtual void Start(std::function<void()> on_change) = 0;

  // Whether the model may answer.
  virtual bool is_caught_up() const = 0;

  // The reason why it is behind or cannot go on; empty while all is well.
  virtual std::string reason() const = 0;

  virtual std::vector<FollowerSample> Samples() const = 0;

  // Stops it. Once this returns, the model no longer changes, and `on_change` is not called.
  virtual void Close() = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_FOLLOWER_H_
