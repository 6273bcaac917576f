#include "monolith/serving/native/metrics.h"

#include <cstdio>

namespace monolith {
namespace serving {
namespace {

constexpr double kBucketSeconds[] = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                     0.2,    0.5,   1,     2,     5,    10,   30};

std::string Escape(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\' || c == '"') escaped += '\\';
    escaped += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return escaped;
}

std::string Number(double value) {
  char buffer[64];
  snprintf(buffer, sizeof(buffer), "%.9g", value);
  return buffer;
}

// Lines of one metric stand together.
void AppendFollowers(const ModelManager::Counts& models, std::string* text) {
  std::map<std::string, std::string> families;
  for (const auto& [model, samples] : models.followers) {
    for (const FollowerSample& sample : samples) {
      const std::string name = sample.name + (sample.is_counter ? "_total" : "");
      std::string& family = families[name];
      if (family.empty()) {
        family = "# HELP " + name + " " + sample.meaning + "\n# TYPE " + name +
                 (sample.is_counter ? " counter\n" : " gauge\n");
      }
      char value[64];
      snprintf(value, sizeof(value), "%.17g", sample.value);
      family += name + "{model=\"" + Escape(model) + "\",shard=\"" + std::to_string(sample.shard) +
                "\"} " + value + "\n";
    }
  }
  for (const auto& [name, family] : families) *text += family;
}

}  // namespace

const char* Metrics::CodeName(int code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  return code >= 0 && code <= 16 ? kNames[code] : "UNKNOWN";
}

void Metrics::Count(const std::string& model, const char* method, Code code,
                    std::chrono::nanoseconds latency) {
  const double seconds = std::chrono::duration<double>(latency).count();
  int bucket = 0;
  while (bucket < kNumBuckets && seconds > kBucketSeconds[bucket]) ++bucket;
  std::lock_guard<std::mutex> lock(mutex_);
  ++requests_[{model, method, static_cast<int>(code)}];
  Histogram& histogram = latencies_[{model, method}];
  ++histogram.counts[bucket];
  ++histogram.total;
  histogram.sum_seconds += seconds;
}

std::string Metrics::ToText(const ModelManager::Counts& models) const {
  std::string text =
      "# HELP monolith_serving_requests_total Requests that were answered, by the code of the "
      "answer.\n# TYPE monolith_serving_requests_total counter\n";
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, count] : requests_) {
    const auto& [model, method, code] = key;
    text += std::string("monolith_serving_requests_total{code=\"") + CodeName(code) +
            "\",method=\"" + method + "\",model=\"" + Escape(model) + "\"} " +
            std::to_string(count) + "\n";
  }
  const std::string name = "monolith_serving_request_seconds";
  text += "# HELP " + name + " Time from a request's arrival to its answer.\n# TYPE " + name +
          " histogram\n";
  for (const auto& [key, histogram] : latencies_) {
    const std::string labels = "method=\"" + key.second + "\",model=\"" + Escape(key.first) + "\"";
    int64_t below = 0;
    for (int i = 0; i <= kNumBuckets; ++i) {
      below += histogram.counts[i];
      const std::string limit = i < kNumBuckets ? Number(kBucketSeconds[i]) : "+Inf";
      text += name + "_bucket{" + labels + ",le=\"" + limit + "\"} " + std::to_string(below) + "\n";
    }
    text += name + "_sum{" + labels + "} " + Number(histogram.sum_seconds) + "\n";
    text += name + "_count{" + labels + "} " + std::to_string(histogram.total) + "\n";
  }
  text +=
      "# HELP monolith_serving_model_state 1 for the state in which a version is.\n"
      "# TYPE monolith_serving_model_state gauge\n";
  for (const auto& [model, version, state] : models.versions) {
    text += "monolith_serving_model_state{model=\"" + Escape(model) + "\",state=\"" +
            api::ModelVersionStatus::State_Name(state) + "\",version=\"" + std::to_string(version) +
            "\"} 1\n";
  }
  text += "# TYPE monolith_serving_model_loads_total counter\nmonolith_serving_model_loads_total " +
          std::to_string(models.loads) +
          "\n# TYPE monolith_serving_model_load_errors_total counter\n"
          "monolith_serving_model_load_errors_total " +
          std::to_string(models.load_errors) + "\n";
  AppendFollowers(models, &text);
  return text;
}

}  // namespace serving
}  // namespace monolith
