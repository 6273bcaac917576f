// Tells a peer that reads slowly from one that only keeps its memory.
#ifndef MONOLITH_SERVING_NATIVE_NET_READ_PACE_H_
#define MONOLITH_SERVING_NATIVE_NET_READ_PACE_H_

#include <chrono>
#include <cstdint>

namespace monolith {
namespace serving {

// Output that waits for a peer. A peer that took a byte now and then would never stall.
class ReadPace {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Output waits from now on, or still does.
  void Begin(TimePoint now) {
    if (waits_) return;
    waits_ = true;
    since_ = now;
    taken_ = 0;
  }
  void Take(int64_t bytes) { taken_ += bytes; }
  void End() { waits_ = false; }

  // Output has waited for a minute, and for a second more for every 256 KiB that the peer took.
  bool IsTooSlow(TimePoint now) const {
    return waits_ && now - since_ > kPatience + std::chrono::seconds(taken_ / kBytesPerSecond);
  }
  // Output has waited for ten minutes, whatever the peer took.
  bool IsTooLong(TimePoint now) const { return waits_ && now - since_ > kMost; }

 private:
  static constexpr std::chrono::seconds kPatience{60};
  static constexpr std::chrono::minutes kMost{10};
  static constexpr int64_t kBytesPerSecond = 256 << 10;

  bool waits_ = false;
  TimePoint since_;
  int64_t taken_ = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_READ_PACE_H_
