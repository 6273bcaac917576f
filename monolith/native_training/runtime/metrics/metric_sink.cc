#include "monolith/native_training/runtime/metrics/metric_sink.h"

#include <mutex>
#include <shared_mutex>

namespace {

// Readers are emitters, the writer is the thread that changes the sink: it waits for calls under
// way.
std::shared_mutex g_mu;
MonolithMetricSink g_sink = nullptr;

}  // namespace

namespace monolith {
namespace metrics {

void EmitMetric(const std::string& key, float value, const std::string& tags) {
  std::shared_lock<std::shared_mutex> lock(g_mu);
  if (g_sink != nullptr) g_sink(key.c_str(), value, tags.c_str());
}

}  // namespace metrics
}  // namespace monolith

void MonolithSetMetricSink(MonolithMetricSink sink) {
  std::unique_lock<std::shared_mutex> lock(g_mu);
  g_sink = sink;
}
