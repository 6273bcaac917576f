// Counters of the server in the text format of Prometheus.
#ifndef MONOLITH_SERVING_NATIVE_METRICS_H_
#define MONOLITH_SERVING_NATIVE_METRICS_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/model_manager.h"

namespace monolith {
namespace serving {

class Metrics {
 public:
  // Counts one answered request. Thread-safe.
  // `model` is "" where the client named one that is not configured.
  void Count(const std::string& model, const char* method, Code code,
             std::chrono::nanoseconds latency);

  // Returns "OK", "NOT_FOUND" and so on.
  static const char* CodeName(int code);

  std::string ToText(const ModelManager::Counts& models) const;

 private:
  static constexpr int kNumBuckets = 15;

  struct Histogram {
    std::array<int64_t, kNumBuckets + 1> counts{};
    int64_t total = 0;
    double sum_seconds = 0;
  };

  mutable std::mutex mutex_;
  // Model, method, code.
  std::map<std::tuple<std::string, std::string, int>, int64_t> requests_;
  std::map<std::pair<std::string, std::string>, Histogram> latencies_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_METRICS_H_
