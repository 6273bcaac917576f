#include "monolith/native_training/runtime/ops/data/samples/zstd_input_stream.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "monolith/native_training/runtime/ops/data/samples/decoded_input_stream.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::DynamicLibrary;

constexpr char kVariable[] = "MONOLITH_LIBZSTD";

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
    // TensorFlow's library has functions of these names, which are those of another release.
    if (!library.Open({is_given ? given : "libzstd.so.1"}, &error,
                      DynamicLibrary::Prefers::kItself) ||
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

class ZstdStream final : public DecodedInputStream {
 public:
  using Decoder = std::unique_ptr<void, size_t (*)(void*)>;

  ZstdStream(const ZstdApi& api, Decoder decoder, std::unique_ptr<io::InputStreamInterface> input,
             int64_t buffer_size)
      : DecodedInputStream(std::move(input), buffer_size, "zstd frame"),
        api_(api),
        decoder_(std::move(decoder)) {}

 private:
  Status Decode(Step* step) override {
    ZstdInBuffer in{step->input, step->input_size, 0};
    ZstdOutBuffer out{step->output, step->output_size, 0};
    const size_t hint = api_.decompress(decoder_.get(), &out, &in);
    step->consumed = in.pos;
    step->produced = out.pos;
    step->is_inside_frame = hint != 0;
    step->has_more_output = out.pos == out.size && hint != 0;
    return Check(hint);
  }

  Status Restart() override { return Check(api_.init(decoder_.get())); }

  Status Check(size_t code) const {
    if (api_.is_error(code) == 0) return OkStatus();
    return errors::DataLoss("corrupt zstd data: ", api_.error_name(code));
  }

  const ZstdApi& api_;
  const Decoder decoder_;
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
