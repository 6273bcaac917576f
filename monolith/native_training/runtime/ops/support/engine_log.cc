// Lets the engine's messages go where TensorFlow's go.
#include "monolith/native_training/runtime/base/log.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace engine = ::monolith::engine;

const bool sink_is_set = [] {
  engine::SetLogSink([](engine::LogLevel level, const std::string& message) {
    if (level == engine::LogLevel::kError) {
      LOG(ERROR) << message;
    } else {
      LOG(WARNING) << message;
    }
  });
  return true;
}();

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
