// One line per event on stderr, with time and level.
#ifndef MONOLITH_SERVING_NATIVE_BASE_LOG_H_
#define MONOLITH_SERVING_NATIVE_BASE_LOG_H_

#include <string>

namespace monolith {
namespace serving {

void LogInfo(const std::string& text);
void LogWarning(const std::string& text);
void LogError(const std::string& text);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_LOG_H_
