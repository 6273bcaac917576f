// Tells an operator what happened: on standard error, until a sink is set.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_LOG_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_LOG_H_

#include <string>

namespace monolith {
namespace engine {

enum class LogLevel { kWarning, kError };

using LogSink = void (*)(LogLevel level, const std::string& message);

// Replaces the sink of the process; null goes back to standard error. The sink is called from any
// thread and must not throw.
void SetLogSink(LogSink sink);

void Log(LogLevel level, const std::string& message);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_LOG_H_
