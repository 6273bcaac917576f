#include "monolith/native_training/runtime/base/log.h"

#include <atomic>
#include <cstdio>

namespace monolith {
namespace engine {
namespace {

std::atomic<LogSink> current{nullptr};

}  // namespace

void SetLogSink(LogSink sink) { current.store(sink, std::memory_order_release); }

void Log(LogLevel level, const std::string& message) {
  if (const LogSink sink = current.load(std::memory_order_acquire)) {
    sink(level, message);
    return;
  }
  std::fprintf(stderr, "monolith %s: %s\n", level == LogLevel::kError ? "error" : "warning",
               message.c_str());
}

}  // namespace engine
}  // namespace monolith
