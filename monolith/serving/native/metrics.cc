#include "monolith/serving/native/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

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

int64_t CountOpenFiles() {
  int64_t count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/fd"), &closedir);
  while (folder != nullptr && readdir(folder.get()) != nullptr) ++count;
  return count - 3;  // "." and "..", and the folder itself
}

// Adds the metrics of the process, by the names of Prometheus's own libraries.
void AppendProcess(std::string* text) {
  const auto append = [text](const std::string& name, const char* kind, double value) {
    *text += "# TYPE " + name + " " + kind + "\n" + name + " " + Number(value) + "\n";
  };
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    append("process_cpu_seconds_total", "counter",
           static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
               static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
  }
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen("/proc/self/statm", "r"), &fclose);
  long long size = 0;
  long long resident = 0;
  if (file != nullptr && fscanf(file.get(), "%lld %lld", &size, &resident) == 2) {
    const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
    append("process_virtual_memory_bytes", "gauge", static_cast<double>(size) * page);
    append("process_resident_memory_bytes", "gauge", static_cast<double>(resident) * page);
  }
  append("process_open_fds", "gauge", static_cast<double>(CountOpenFiles()));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    append("process_max_fds", "gauge", static_cast<double>(limit.rlim_cur));
  }
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
  AppendProcess(&text);
  return text;
}

}  // namespace serving
}  // namespace monolith
