// Where TensorFlow's versions, 2.15 to 2.21, differ for the ops: the only header that asks which
// one it is. The model server has its own, serving/native/base/tensorflow_versions.h.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_VERSIONS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_VERSIONS_H_

// Streams of snappy have moved.
#if __has_include("tsl/lib/io/snappy/snappy_inputstream.h")
#include "tsl/lib/io/snappy/snappy_inputstream.h"
#include "tsl/lib/io/snappy/snappy_outputbuffer.h"
#else
#include "xla/tsl/lib/io/snappy/snappy_inputstream.h"
#include "xla/tsl/lib/io/snappy/snappy_outputbuffer.h"
#endif

// Sinks of messages: TensorFlow's own, or, where it logs through Abseil, Abseil's.
#if __has_include("tsl/platform/default/logging.h")
#include "tsl/platform/default/logging.h"
#define MONOLITH_TENSORFLOW_HAS_LOG_SINKS
#elif __has_include("xla/tsl/platform/default/logging.h")
#include "xla/tsl/platform/default/logging.h"
#define MONOLITH_TENSORFLOW_HAS_LOG_SINKS
#else
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/internal/globals.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_VERSIONS_H_
