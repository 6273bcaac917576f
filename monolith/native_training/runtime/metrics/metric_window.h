// Statistics of a metric over the last minutes. Standard library only.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_WINDOW_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_WINDOW_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace monolith {
namespace metrics {

struct WindowStats {
  size_t count = 0;
  float min = 0;
  float max = 0;
  double avg = 0;
  float p99 = 0;  // the sorted values' element floor(0.99 * count)
};

// Values of one metric of the last 15 minutes, newest last. Thread-safe. Adding costs O(1)
// amortised; a report sorts what is kept.
class MetricWindow {
 public:
  static constexpr int64_t kSpanSecs = 15 * 60;
  static constexpr int64_t kReportIntervalSecs = 600;
  // Bounds the memory of a metric that is emitted very often: the oldest values go first.
  static constexpr size_t kMaxValues = size_t{1} << 18;

  explicit MetricWindow(std::string key) : key_(std::move(key)) {}

  // Adds a value at a time in seconds. NaN is left out, it has no order.
  void Add(int64_t now_secs, float value);

  // Summarizes the values younger than `span_secs`.
  WindowStats Stats(int64_t now_secs, int64_t span_secs) const;

  // One line per window of 1, 5 and 15 minutes, or "" if the last report of this metric is
  // younger than kReportIntervalSecs. The first call starts the interval.
  std::string Report(int64_t now_secs);

 private:
  struct Sample {
    int64_t secs;
    float value;
  };

  WindowStats StatsLocked(int64_t now_secs, int64_t span_secs) const;

  const std::string key_;
  mutable std::mutex mu_;
  std::deque<Sample> samples_;
  bool started_ = false;
  int64_t last_report_secs_ = 0;
};

// Returns the window of a key. It lives as long as it is held, and is the same for all calls
// meanwhile.
std::shared_ptr<MetricWindow> GetMetricWindow(const std::string& key);

}  // namespace metrics
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_WINDOW_H_
