// Streams of Zstandard frames, decompressed by the system's libzstd, which is loaded when first
// used.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ZSTD_INPUT_STREAM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ZSTD_INPUT_STREAM_H_

#include <memory>

#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Wraps `input`, of which up to `buffer_size` bytes are read at once. Reads of the stream fail with
// DataLoss when the input is no Zstandard, or ends inside of a frame. FailedPrecondition: there is
// no libzstd; the environment variable MONOLITH_LIBZSTD may name one.
Status OpenZstdStream(std::unique_ptr<io::InputStreamInterface> input, int64_t buffer_size,
                      std::unique_ptr<io::InputStreamInterface>* stream);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_ZSTD_INPUT_STREAM_H_
