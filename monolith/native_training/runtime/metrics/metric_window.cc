#include "monolith/native_training/runtime/metrics/metric_window.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <unordered_map>
#include <utility>
#include <vector>

namespace monolith {
namespace metrics {
namespace {

struct Registry {
  std::mutex mu;
  std::unordered_map<std::string, std::weak_ptr<MetricWindow>> windows;
};

}  // namespace

void MetricWindow::Add(int64_t now_secs, float value) {
  if (std::isnan(value)) return;
  std::lock_guard<std::mutex> lock(mu_);
  samples_.push_back({now_secs, value});
  while (samples_.size() > kMaxValues || now_secs - samples_.front().secs >= kSpanSecs) {
    samples_.pop_front();
  }
}

WindowStats MetricWindow::Stats(int64_t now_secs, int64_t span_secs) const {
  std::lock_guard<std::mutex> lock(mu_);
  return StatsLocked(now_secs, span_secs);
}

WindowStats MetricWindow::StatsLocked(int64_t now_secs, int64_t span_secs) const {
  std::vector<float> values;
  double sum = 0;
  for (auto it = samples_.rbegin(); it != samples_.rend(); ++it) {
    if (now_secs - it->secs >= span_secs) break;
    values.push_back(it->value);
    sum += it->value;
  }
  WindowStats stats;
  stats.count = values.size();
  if (values.empty()) return stats;
  const auto extremes = std::minmax_element(values.begin(), values.end());
  stats.min = *extremes.first;
  stats.max = *extremes.second;
  stats.avg = sum / static_cast<double>(values.size());
  // In integers: 0.99 is not a binary fraction, and 0.99 * 100 must be 99.
  const auto p99 = values.begin() + static_cast<std::ptrdiff_t>(values.size() * 99 / 100);
  std::nth_element(values.begin(), p99, values.end());
  stats.p99 = *p99;
  return stats;
}

std::string MetricWindow::Report(int64_t now_secs) {
  std::lock_guard<std::mutex> lock(mu_);
  if (!started_) {
    started_ = true;
    last_report_secs_ = now_secs;
  }
  if (now_secs - last_report_secs_ < kReportIntervalSecs) return "";
  last_report_secs_ = now_secs;
  std::string report;
  for (int minutes : {1, 5, 15}) {
    const WindowStats stats = StatsLocked(now_secs, minutes * 60);
    if (stats.count == 0) continue;
    char numbers[128];  // four of at most 13 characters, and the words
    std::snprintf(numbers, sizeof(numbers), " last_%d_min: min: %g, max: %g, avg: %g, p99: %g",
                  minutes, static_cast<double>(stats.min), static_cast<double>(stats.max),
                  stats.avg, static_cast<double>(stats.p99));
    if (!report.empty()) report += '\n';
    report += key_;
    report += numbers;
  }
  return report;
}

std::shared_ptr<MetricWindow> GetMetricWindow(const std::string& key) {
  // Never destroyed: a kernel may still be made while the process exits.
  static Registry& registry = *std::make_unique<Registry>().release();
  std::lock_guard<std::mutex> lock(registry.mu);
  std::weak_ptr<MetricWindow>& known = registry.windows[key];
  std::shared_ptr<MetricWindow> window = known.lock();
  if (window == nullptr) {
    window = std::make_shared<MetricWindow>(key);
    known = window;
  }
  return window;
}

}  // namespace metrics
}  // namespace monolith
