// Streams of gzip and zlib data, decompressed by the zlib inside of TensorFlow.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_INFLATE_INPUT_STREAM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_INFLATE_INPUT_STREAM_H_

#include <cstdint>
#include <memory>

#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

enum class InflateFormat { kZlib, kGzip };

// Wraps `input`, of which up to `buffer_size` bytes are read at once. TensorFlow's own stream takes
// the end of the file for the end of the data; this one fails with DataLoss unless the data has
// ended, too, with a checksum that is right. Gzip data may have many members.
Status OpenInflateStream(std::unique_ptr<io::InputStreamInterface> input, InflateFormat format,
                         int64_t buffer_size, std::unique_ptr<io::InputStreamInterface>* stream);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_INFLATE_INPUT_STREAM_H_
