// Snappy streams in TensorFlow's format over the engine's files.
#include <algorithm>
#include <memory>
#include <utility>

#include "monolith/native_training/runtime/ops/files/env_file_system.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/tensorflow_versions.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// TensorFlow's own block size; readers size their buffers by it.
constexpr int64_t kBlockBytes = 256 << 10;
constexpr int64_t kReadBytes = 10 << 20;

// Adapts an engine file to the interface that the Snappy reader reads from.
class CompressedStream final : public io::InputStreamInterface {
 public:
  explicit CompressedStream(std::unique_ptr<engine::InputFile> file) : file_(std::move(file)) {}

  Status ReadNBytes(int64_t size, tstring* result) override {
    result->resize_uninitialized(static_cast<size_t>(size));
    int64_t read = 0;
    const Status status = FromEngine(file_->Read(size, result->mdata(), &read));
    result->resize(static_cast<size_t>(read));
    position_ += read;
    TF_RETURN_IF_ERROR(status);
    return read < size ? errors::OutOfRange("the end of the file") : OkStatus();
  }
  int64_t Tell() const override { return position_; }
  Status Reset() override { return errors::Unimplemented("a file is read once"); }

 private:
  const std::unique_ptr<engine::InputFile> file_;
  int64_t position_ = 0;
};

class SnappyInput final : public engine::InputFile {
 public:
  explicit SnappyInput(std::unique_ptr<engine::InputFile> compressed)
      : stream_(std::make_unique<CompressedStream>(std::move(compressed)).release(), kReadBytes,
                /*owns_input=*/true) {}

  engine::Status Read(int64_t size, char* out, int64_t* read) override {
    const int64_t before = stream_.Tell();
    const Status status = stream_.ReadNBytes(size, &chunk_);
    *read = 0;
    if (!status.ok() && !errors::IsOutOfRange(status)) return ToEngine(status);
    // At the end the stream leaves the chunk at the requested size, so count what was read.
    *read = std::min<int64_t>(stream_.Tell() - before, static_cast<int64_t>(chunk_.size()));
    std::memcpy(out, chunk_.data(), static_cast<size_t>(*read));
    return engine::Status::Ok();
  }

 private:
  tsl::io::SnappyInputStream stream_;
  tstring chunk_;  // a member, to reuse its memory
};

// Adapts an engine file to the interface that the Snappy writer writes to.
class CompressedFile final : public WritableFile {
 public:
  explicit CompressedFile(engine::OutputFile* file) : file_(file) {}
  Status Append(StringPiece data) override {
    return FromEngine(file_->Append(data.data(), static_cast<int64_t>(data.size())));
  }
  Status Close() override { return OkStatus(); }
  Status Flush() override { return OkStatus(); }
  Status Sync() override { return OkStatus(); }

 private:
  engine::OutputFile* const file_;
};

class SnappyOutput final : public engine::OutputFile {
 public:
  explicit SnappyOutput(engine::OutputFile* file)
      : file_(file), buffer_(&file_, kBlockBytes, kBlockBytes) {}

  engine::Status Append(const char* data, int64_t size) override {
    // A larger piece would become a block that readers have no room for.
    for (int64_t begin = 0; begin < size; begin += kBlockBytes) {
      const StringPiece piece(data + begin,
                              static_cast<size_t>(std::min(kBlockBytes, size - begin)));
      const Status status = buffer_.Write(piece);
      if (!status.ok()) return ToEngine(status);
    }
    return engine::Status::Ok();
  }
  engine::Status Close() override { return ToEngine(buffer_.Flush()); }

 private:
  CompressedFile file_;
  tsl::io::SnappyOutputBuffer buffer_;
};

}  // namespace

std::unique_ptr<engine::InputFile> NewSnappyInput(std::unique_ptr<engine::InputFile> compressed) {
  return std::make_unique<SnappyInput>(std::move(compressed));
}

std::unique_ptr<engine::OutputFile> NewSnappyOutput(engine::OutputFile* file) {
  return std::make_unique<SnappyOutput>(file);
}

}  // namespace monolith_tf
}  // namespace tensorflow
