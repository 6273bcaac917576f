// Where emitted metrics go: nowhere, until a sink is set. Standard library only.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_SINK_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_SINK_H_

#include <string>

namespace monolith {
namespace metrics {

// Hands a value to the sink, if there is one. Thread-safe.
void EmitMetric(const std::string& key, float value, const std::string& tags);

}  // namespace metrics
}  // namespace monolith

extern "C" {

typedef void (*MonolithMetricSink)(const char* key, float value, const char* tags);

// Sets the sink of the process, null to remove it. Returns once no thread is inside the old one.
// The sink is called from any thread and must not call this function.
__attribute__((visibility("default"))) void MonolithSetMetricSink(MonolithMetricSink sink);

}  // extern "C"

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_METRIC_SINK_H_
