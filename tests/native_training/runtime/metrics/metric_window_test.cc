#include "monolith/native_training/runtime/metrics/metric_window.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace monolith {
namespace metrics {
namespace {

TEST(MetricWindow, EmptyWindowHasNoValues) {
  MetricWindow window("key");
  EXPECT_EQ(window.Stats(0, 60).count, 0u);
}

TEST(MetricWindow, NegativeValuesHaveANegativeMaximum) {
  MetricWindow window("key");
  for (float value : {-3.0f, -1.0f, -2.0f}) window.Add(0, value);
  const WindowStats stats = window.Stats(0, 60);
  EXPECT_EQ(stats.count, 3u);
  EXPECT_EQ(stats.min, -3.0f);
  EXPECT_EQ(stats.max, -1.0f);
  EXPECT_EQ(stats.avg, -2.0);
}

TEST(MetricWindow, P99IsTheElementAtFloorOf99Percent) {
  for (int n : {1, 2, 99, 100, 101, 1000}) {
    MetricWindow window("key");
    for (int i = n - 1; i >= 0; --i) window.Add(0, static_cast<float>(i));
    EXPECT_EQ(window.Stats(0, 60).p99, static_cast<float>(n * 99 / 100)) << n;
  }
}

TEST(MetricWindow, ExtremesExpire) {
  MetricWindow window("key");
  window.Add(0, 100.0f);
  window.Add(100, 1.0f);
  EXPECT_EQ(window.Stats(100, 60).max, 1.0f);
  EXPECT_EQ(window.Stats(100, 300).max, 100.0f);
  window.Add(MetricWindow::kSpanSecs, 2.0f);
  EXPECT_EQ(window.Stats(MetricWindow::kSpanSecs, MetricWindow::kSpanSecs).max, 2.0f);
}

TEST(MetricWindow, NanIsLeftOut) {
  MetricWindow window("key");
  window.Add(0, std::numeric_limits<float>::quiet_NaN());
  window.Add(0, 5.0f);
  EXPECT_EQ(window.Stats(0, 60).count, 1u);
  EXPECT_EQ(window.Stats(0, 60).p99, 5.0f);
}

TEST(MetricWindow, MemoryIsBounded) {
  MetricWindow window("key");
  for (size_t i = 0; i < MetricWindow::kMaxValues + 10; ++i) window.Add(0, static_cast<float>(i));
  EXPECT_EQ(window.Stats(0, 60).count, MetricWindow::kMaxValues);
  EXPECT_EQ(window.Stats(0, 60).min, 10.0f);
}

TEST(MetricWindow, ReportsEveryTenMinutes) {
  MetricWindow window("steps");
  window.Add(0, 7.0f);
  EXPECT_EQ(window.Report(0), "");
  window.Add(590, 1.0f);
  window.Add(595, 3.0f);
  EXPECT_EQ(window.Report(599), "");
  EXPECT_EQ(window.Report(600),
            "steps last_1_min: min: 1, max: 3, avg: 2, p99: 3\n"
            "steps last_5_min: min: 1, max: 3, avg: 2, p99: 3\n"
            "steps last_15_min: min: 1, max: 7, avg: 3.66667, p99: 7");
  EXPECT_EQ(window.Report(601), "");
}

TEST(MetricWindow, KeysDoNotShareTheirReports) {
  auto first = GetMetricWindow("first");
  auto second = GetMetricWindow("second");
  first->Report(0);
  second->Report(0);
  first->Add(600, 1.0f);
  second->Add(600, 1.0f);
  EXPECT_NE(first->Report(600), "");
  EXPECT_NE(second->Report(600), "");
}

TEST(MetricWindow, OneWindowPerKeyWhileHeld) {
  auto first = GetMetricWindow("same");
  EXPECT_EQ(first, GetMetricWindow("same"));
  first->Add(0, 1.0f);
  first.reset();
  EXPECT_EQ(GetMetricWindow("same")->Stats(0, 60).count, 0u);
}

TEST(MetricWindow, ThreadsMayAddTogether) {
  MetricWindow window("key");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&window] {
      for (int i = 0; i < 1000; ++i) {
        window.Add(i, 1.0f);
        window.Report(i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(window.Stats(999, MetricWindow::kSpanSecs).max, 1.0f);
}

}  // namespace
}  // namespace metrics
}  // namespace monolith
