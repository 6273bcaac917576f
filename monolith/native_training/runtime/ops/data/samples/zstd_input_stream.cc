#include "monolith/native_training/runtime/ops/data/samples/zstd_input_stream.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::DynamicLibrary;

constexpr char kVariable[] = "MONOLITH_LIBZSTD";
constexpr size_t kOutputBuffer = 128 << 10;

// From zstd.h, the same since libzstd 1.0.
struct ZstdInBuffer {
  const void* src;
  size_t size;
  size_t pos;
};
struct ZstdOutBuffer {
  void* dst;
  size_t size;
  size_t pos;
};

struct ZstdApi {
  void* (*create)() = nullptr;
  size_t (*free)(void*) = nullptr;
  size_t (*init)(void*) = nullptr;
  size_t (*decompress)(void*, ZstdOutBuffer*, ZstdInBuffer*) = nullptr;
  unsigned (*is_error)(size_t) = nullptr;
  const char* (*error_name)(size_t) = nullptr;
};

Status GetZstd(const ZstdApi** api) {
  static mutex* const mu = std::make_unique<mutex>().release();
  static const ZstdApi* loaded = nullptr;
  mutex_lock lock(*mu);
  if (loaded == nullptr) {
    const char* const given = std::getenv(kVariable);
    const bool is_given = given != nullptr && given[0] != '\0';
    DynamicLibrary library;
    std::string error;
    auto found = std::make_unique<ZstdApi>();
    if (!library.Open({is_given ? given : "libzstd.so.1"}, &error) ||
        !library.Find("ZSTD_createDStream", &found->create, &error) ||
        !library.Find("ZSTD_freeDStream", &found->free, &error) ||
        !library.Find("ZSTD_initDStream", &found->init, &error) ||
        !library.Find("ZSTD_decompressStream", &found->decompress, &error) ||
        !library.Find("ZSTD_isError", &found->is_error, &error) ||
        !library.Find("ZSTD_getErrorName", &found->error_name, &error)) {
      return errors::FailedPrecondition(
          "ZSTD compression needs libzstd.so.1 (Debian and Ubuntu: apt-get install libzstd1), or ",
          kVariable, " to name it: ", error);
    }
    loaded = found.release();
  }
  *api = loaded;
  return OkStatus();
}

class ZstdStream final : public io::InputStreamInterface {
 public:
  using Decoder = std::unique_ptr<void, size_t (*)(void*)>;

  ZstdStream(const ZstdApi& api, Decoder decoder, std::unique_ptr<io::InputStreamInterface> input,
             int64_t buffer_size)
      : api_(api),
        decoder_(std::move(decoder)),
        input_(std::move(input)),
        buffer_size_(buffer_size),
        output_(kOutputBuffer, '\0') {}

  Status ReadNBytes(int64_t bytes_to_read, tstring* result) override {
    if (bytes_to_read < 0) {
      return errors::InvalidArgument("cannot read ", bytes_to_read, " bytes");
    }
    result->clear();
    while (static_cast<int64_t>(result->size()) < bytes_to_read) {
      if (next_ == end_) TF_RETURN_IF_ERROR(Fill());
      const size_t taken = std::min<size_t>(end_ - next_, bytes_to_read - result->size());
      result->append(output_.data() + next_, taken);
      next_ += taken;
      position_ += taken;
    }
    return OkStatus();
  }

  int64_t Tell() const override { return position_; }

  Status Reset() override {
    TF_RETURN_IF_ERROR(input_->Reset());
    compressed_.clear();
    consumed_ = next_ = end_ = 0;
    position_ = 0;
    is_inside_frame_ = has_more_output_ = false;
    return Check(api_.init(decoder_.get()));
  }

 private:
  Status Check(size_t code) const {
    if (api_.is_error(code) == 0) return OkStatus();
    return errors::DataLoss("corrupt zstd data: ", api_.error_name(code));
  }

  // Decompresses at least one byte. OutOfRange: the input has ended, and so have its frames.
  Status Fill() {
    next_ = end_ = 0;
    while (end_ == 0) {
      // Only a decoder that has written out everything it knows may be given more, or be at an end.
      if (consumed_ == compressed_.size() && !has_more_output_) {
        const Status status = input_->ReadNBytes(buffer_size_, &compressed_);
        consumed_ = 0;
        if (!status.ok() && !errors::IsOutOfRange(status)) return status;
        if (compressed_.empty()) {
          if (is_inside_frame_) return errors::DataLoss("truncated zstd frame");
          return errors::OutOfRange("end of the zstd stream");
        }
      }
      ZstdInBuffer in{compressed_.data(), compressed_.size(), consumed_};
      ZstdOutBuffer out{output_.data(), output_.size(), 0};
      const size_t hint = api_.decompress(decoder_.get(), &out, &in);
      TF_RETURN_IF_ERROR(Check(hint));
      is_inside_frame_ = hint != 0;
      has_more_output_ = out.pos == out.size && hint != 0;
      consumed_ = in.pos;
      end_ = out.pos;
    }
    return OkStatus();
  }

  const ZstdApi& api_;
  const Decoder decoder_;
  const std::unique_ptr<io::InputStreamInterface> input_;
  const int64_t buffer_size_;
  tstring compressed_;
  size_t consumed_ = 0;
  std::string output_;
  size_t next_ = 0;
  size_t end_ = 0;
  int64_t position_ = 0;
  bool is_inside_frame_ = false;
  bool has_more_output_ = false;
};

}  // namespace

Status OpenZstdStream(std::unique_ptr<io::InputStreamInterface> input, int64_t buffer_size,
                      std::unique_ptr<io::InputStreamInterface>* stream) {
  const ZstdApi* api = nullptr;
  TF_RETURN_IF_ERROR(GetZstd(&api));
  ZstdStream::Decoder decoder(api->create(), api->free);
  if (decoder == nullptr) return errors::ResourceExhausted("no memory for a zstd decoder");
  *stream = std::make_unique<ZstdStream>(*api, std::move(decoder), std::move(input), buffer_size);
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
