#include "monolith/serving/native/http2/gzip.h"

#include <algorithm>
#include <utility>

#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/lib/io/zlib_compression_options.h"
#include "tensorflow/core/lib/io/zlib_inputstream.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/tstring.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;
// The last bytes are the length of the uncompressed data.
constexpr size_t kLengthBytes = 4;

class StringStream : public tensorflow::io::InputStreamInterface {
 public:
  explicit StringStream(const std::string& text) : text_(text) {}

  tensorflow::Status ReadNBytes(int64_t size, tensorflow::tstring* result) override {
    const size_t available = std::min(text_.size() - place_, static_cast<size_t>(size));
    result->assign(text_.data() + place_, available);
    place_ += available;
    if (available == static_cast<size_t>(size)) return tensorflow::Status();
    return tensorflow::errors::OutOfRange("the message has ended");
  }
  int64_t Tell() const override { return static_cast<int64_t>(place_); }
  tensorflow::Status Reset() override {
    place_ = 0;
    return tensorflow::Status();
  }

 private:
  const std::string& text_;
  size_t place_ = 0;
};

uint32_t ReadLength(const std::string& message) {
  uint32_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    const auto byte = static_cast<unsigned char>(message[message.size() - kLengthBytes + i]);
    length |= static_cast<uint32_t>(byte) << (8 * i);
  }
  return length;
}

}  // namespace

Status Decompress(int64_t max_bytes, MemoryLease* lease, std::string* message) {
  const int64_t leased = lease->bytes();
  StringStream stream(*message);
  tensorflow::io::ZlibInputStream reader(&stream, kChunkBytes, kChunkBytes,
                                         tensorflow::io::ZlibCompressionOptions::GZIP());
  std::string result;
  tensorflow::tstring chunk;
  tensorflow::Status status;
  while (status.ok()) {
    status = reader.ReadNBytes(kChunkBytes, &chunk);
    const int64_t size = static_cast<int64_t>(result.size() + chunk.size());
    if (size > max_bytes) {
      return Status(Code::kResourceExhausted, "the message has more than " +
                                                  std::to_string(max_bytes) +
                                                  " bytes when it is decompressed");
    }
    // A growing string reserves up to twice its size.
    if (!lease->Resize(leased + 2 * size)) {
      return Status(Code::kResourceExhausted, "the requests take too much memory");
    }
    result.append(chunk.data(), chunk.size());
  }
  // The reader does not distinguish truncated data from complete data.
  if (!tensorflow::errors::IsOutOfRange(status) || message->size() < kLengthBytes ||
      ReadLength(*message) != static_cast<uint32_t>(result.size())) {
    return Status(Code::kInternal, "the message cannot be decompressed");
  }
  *message = std::move(result);
  return Status();
}

}  // namespace serving
}  // namespace monolith
