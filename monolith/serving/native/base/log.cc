#include "monolith/serving/native/base/log.h"

#include <sys/time.h>
#include <time.h>

#include <cstdio>
#include <string>

namespace monolith {
namespace serving {
namespace {

void Log(char level, const std::string& text) {
  timeval now{};
  gettimeofday(&now, nullptr);
  tm parts{};
  localtime_r(&now.tv_sec, &parts);
  char stamp[64];
  snprintf(stamp, sizeof(stamp), "%c%02d%02d %02d:%02d:%02d.%06ld ", level, parts.tm_mon + 1,
           parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
           static_cast<long>(now.tv_usec));
  std::string line = stamp + text;
  // Names and paths may come from requests, so line breaks are escaped: one event is one line.
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < ' ') c = ' ';
  }
  line += '\n';
  fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void LogInfo(const std::string& text) { Log('I', text); }
void LogWarning(const std::string& text) { Log('W', text); }
void LogError(const std::string& text) { Log('E', text); }

}  // namespace serving
}  // namespace monolith
