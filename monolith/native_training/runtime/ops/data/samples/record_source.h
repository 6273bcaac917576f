// Files and standard input as sources of framed records, with decompression.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_RECORD_SOURCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_RECORD_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "monolith/native_training/runtime/data/record_framing.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Numbers are those of the attribute compression_type.
enum class Compression { kUnknown = 0, kNone = 1, kSnappy = 2, kZstd = 3, kZlib = 4, kGzip = 5 };

// Joins the two ways to ask for compression. InvalidArgument: they contradict each other.
Status ResolveCompression(bool use_snappy, int64_t compression_type, Compression* compression);

// Opens a file, or standard input for an empty name. `skip` bytes of the uncompressed data are left
// out. NotFound: no such file. FailedPrecondition: there is no libzstd for ZSTD. DataLoss: the file
// does not have that many.
Status OpenRecordSource(Env* env, const std::string& file_name, Compression compression,
                        int64_t buffer_size, int64_t skip,
                        std::unique_ptr<::monolith::data::ByteSource>* source);

// The TensorFlow error for anything but a record or a clean end; `name` is the file.
Status RecordError(const std::string& name, const ::monolith::data::RecordReader& reader,
                   ::monolith::data::ReadResult result);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_RECORD_SOURCE_H_
