#include "monolith/native_training/runtime/ops/data/samples/inflate_input_stream.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "monolith/native_training/runtime/ops/data/samples/decoded_input_stream.h"
#include "tensorflow/core/platform/errors.h"

// From zlib.h, the same since zlib 1.0; TensorFlow's wheels export the functions, but have no such
// header.
struct MonolithZlibStream {
  const unsigned char* next_in;
  unsigned int avail_in;
  unsigned long total_in;
  unsigned char* next_out;
  unsigned int avail_out;
  unsigned long total_out;
  const char* msg;
  void* state;
  void* (*zalloc)(void*, unsigned int, unsigned int);
  void (*zfree)(void*, void*);
  void* opaque;
  int data_type;
  unsigned long adler;
  unsigned long reserved;
};
extern "C" {
int inflateInit2_(MonolithZlibStream* stream, int window_bits, const char* version, int size);
int inflateReset(MonolithZlibStream* stream);
int inflate(MonolithZlibStream* stream, int flush);
int inflateEnd(MonolithZlibStream* stream);
}

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int kOk = 0;
constexpr int kStreamEnd = 1;
constexpr int kMemoryError = -4;
constexpr int kBufferError = -5;  // nothing to do: no error
constexpr int kNoFlush = 0;
constexpr int kWindowBits = 15;
constexpr int kGzipBits = 16;

unsigned int ToUnsigned(size_t size) {
  return static_cast<unsigned int>(
      std::min<size_t>(size, std::numeric_limits<unsigned int>::max()));
}

class InflateStream final : public DecodedInputStream {
 public:
  InflateStream(std::unique_ptr<io::InputStreamInterface> input, InflateFormat format,
                int64_t buffer_size)
      : DecodedInputStream(std::move(input), buffer_size,
                           format == InflateFormat::kGzip ? "gzip member" : "zlib data"),
        format_(format) {}

  ~InflateStream() override {
    if (is_open_) inflateEnd(&zlib_);
  }

  Status Open() {
    const int bits = kWindowBits + (format_ == InflateFormat::kGzip ? kGzipBits : 0);
    const int code = inflateInit2_(&zlib_, bits, "1", static_cast<int>(sizeof(zlib_)));
    is_open_ = code == kOk;
    if (is_open_) return OkStatus();
    return errors::ResourceExhausted("zlib cannot be initialized: error ", code);
  }

 private:
  Status Decode(Step* step) override {
    if (is_at_end_) {
      if (format_ == InflateFormat::kZlib) {
        return errors::DataLoss("there are more bytes after the end of the zlib data");
      }
      TF_RETURN_IF_ERROR(Restart());
    }
    zlib_.next_in = reinterpret_cast<const unsigned char*>(step->input);
    zlib_.avail_in = ToUnsigned(step->input_size);
    zlib_.next_out = reinterpret_cast<unsigned char*>(step->output);
    zlib_.avail_out = ToUnsigned(step->output_size);
    const unsigned int given = zlib_.avail_in;
    const unsigned int room = zlib_.avail_out;
    const int code = inflate(&zlib_, kNoFlush);
    step->consumed = given - zlib_.avail_in;
    step->produced = room - zlib_.avail_out;
    is_at_end_ = code == kStreamEnd;
    step->is_inside_frame = !is_at_end_;
    step->has_more_output = !is_at_end_ && zlib_.avail_out == 0;
    if (code == kOk || code == kStreamEnd || code == kBufferError) return OkStatus();
    if (code == kMemoryError) return errors::ResourceExhausted("zlib has no memory");
    return errors::DataLoss("corrupt ", format_ == InflateFormat::kGzip ? "gzip" : "zlib",
                            " data: ", zlib_.msg == nullptr ? "no reason given" : zlib_.msg);
  }

  Status Restart() override {
    is_at_end_ = false;
    const int code = inflateReset(&zlib_);
    if (code != kOk) return errors::Internal("zlib cannot be reset: error ", code);
    return OkStatus();
  }

  const InflateFormat format_;
  MonolithZlibStream zlib_ = {};
  bool is_open_ = false;
  bool is_at_end_ = false;
};

}  // namespace

Status OpenInflateStream(std::unique_ptr<io::InputStreamInterface> input, InflateFormat format,
                         int64_t buffer_size, std::unique_ptr<io::InputStreamInterface>* stream) {
  auto opened = std::make_unique<InflateStream>(std::move(input), format, buffer_size);
  TF_RETURN_IF_ERROR(opened->Open());
  *stream = std::move(opened);
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
