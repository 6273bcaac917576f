#include "monolith/native_training/runtime/ops/data/samples/record_source.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "monolith/native_training/runtime/ops/data/samples/inflate_input_stream.h"
#include "monolith/native_training/runtime/ops/data/samples/zstd_input_stream.h"
#include "tensorflow/core/lib/io/buffered_inputstream.h"
#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/lib/io/random_inputstream.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/snappy.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::ByteSource;
using ::monolith::data::ReadResult;
using ::monolith::data::RecordReader;

// Datasets open many files at once, so a file's buffer is bounded whatever the caller asks for.
constexpr int64_t kMaxFileBuffer = 1 << 20;
constexpr uint32_t kMaxSnappyBlock = 1u << 30;
constexpr size_t kMaxSnappyRatio = 64;  // three bytes of input make at most 64

// Hadoop's block format: [block length][[chunk length][raw snappy]]..., lengths 4 bytes big-endian.
class HadoopSnappyStream final : public io::InputStreamInterface {
 public:
  explicit HadoopSnappyStream(std::unique_ptr<io::InputStreamInterface> input)
      : input_(std::move(input)) {}

  Status ReadNBytes(int64_t bytes_to_read, tstring* result) override {
    result->clear();
    while (static_cast<int64_t>(result->size()) < bytes_to_read) {
      if (next_ == chunk_.size()) {
        const Status status = ReadChunk();
        if (!status.ok()) return status;
      }
      const size_t taken = std::min<size_t>(chunk_.size() - next_, bytes_to_read - result->size());
      result->append(chunk_.data() + next_, taken);
      next_ += taken;
    }
    position_ += bytes_to_read;
    return OkStatus();
  }

  int64_t Tell() const override { return position_; }

  Status Reset() override {
    chunk_.clear();
    next_ = 0;
    position_ = 0;
    block_left_ = 0;
    has_block_ = false;
    return input_->Reset();
  }

 private:
  // OutOfRange only where another block would start: Hadoop writes one even for nothing.
  Status ReadSize(uint32_t* size, bool at_block) {
    tstring bytes;
    const Status status = input_->ReadNBytes(4, &bytes);
    if (errors::IsOutOfRange(status) && !(at_block && bytes.empty() && has_block_)) {
      return errors::DataLoss("truncated snappy block");
    }
    TF_RETURN_IF_ERROR(status);
    has_block_ = true;
    *size = 0;
    for (int i = 0; i < 4; ++i) *size = *size << 8 | static_cast<unsigned char>(bytes[i]);
    if (*size > kMaxSnappyBlock) return errors::DataLoss("snappy block of ", *size, " bytes");
    return OkStatus();
  }

  Status ReadChunk() {
    while (block_left_ == 0) TF_RETURN_IF_ERROR(ReadSize(&block_left_, /*at_block=*/true));
    uint32_t compressed_size = 0;
    TF_RETURN_IF_ERROR(ReadSize(&compressed_size, /*at_block=*/false));
    // Sizes are believed as far as bytes follow.
    std::string compressed;
    while (compressed.size() < compressed_size) {
      tstring piece;
      const Status status = input_->ReadNBytes(
          std::min<int64_t>(kMaxFileBuffer, compressed_size - compressed.size()), &piece);
      if (errors::IsOutOfRange(status)) return errors::DataLoss("truncated snappy chunk");
      TF_RETURN_IF_ERROR(status);
      compressed.append(piece.data(), piece.size());
    }
    size_t size;
    if (!port::Snappy_GetUncompressedLength(compressed.data(), compressed.size(), &size) ||
        size > block_left_ || size == 0 || size / kMaxSnappyRatio > compressed.size()) {
      return errors::DataLoss("corrupt snappy chunk");
    }
    chunk_.resize(size);
    next_ = 0;
    if (!port::Snappy_Uncompress(compressed.data(), compressed.size(), chunk_.data())) {
      chunk_.clear();
      return errors::DataLoss("corrupt snappy chunk");
    }
    block_left_ -= static_cast<uint32_t>(size);
    return OkStatus();
  }

  std::unique_ptr<io::InputStreamInterface> input_;
  std::string chunk_;
  size_t next_ = 0;
  uint32_t block_left_ = 0;
  bool has_block_ = false;
  int64_t position_ = 0;
};

class FileSource final : public ByteSource {
 public:
  FileSource(std::unique_ptr<RandomAccessFile> file,
             std::unique_ptr<io::InputStreamInterface> stream)
      : file_(std::move(file)), stream_(std::move(stream)) {}

  bool Read(int64_t size, std::string* out) override {
    const Status status = stream_->ReadNBytes(size, &bytes_);
    out->assign(bytes_.data(), bytes_.size());
    if (status.ok() || errors::IsOutOfRange(status)) return true;
    error_ = std::string(status.message());
    return false;
  }

  std::string error() const override { return error_; }

 private:
  std::unique_ptr<RandomAccessFile> file_;
  std::unique_ptr<io::InputStreamInterface> stream_;
  tstring bytes_;
  std::string error_;
};

class StdinSource final : public ByteSource {
 public:
  explicit StdinSource(int64_t buffer_size) : buffer_size_(buffer_size) {}

  bool Read(int64_t size, std::string* out) override {
    out->resize(static_cast<size_t>(size));
    out->resize(std::fread(out->data(), 1, static_cast<size_t>(size), stdin));
    return std::ferror(stdin) == 0;
  }

  std::string error() const override { return "reading standard input failed"; }

  bool Accepts(uint64_t payload_size) const override {
    if (payload_size <= static_cast<uint64_t>(buffer_size_)) return true;
    LOG(ERROR) << "a record of " << payload_size << " bytes does not fit the buffer of "
               << buffer_size_ << ": end of standard input";
    return false;
  }

 private:
  int64_t buffer_size_;
};

}  // namespace

Status ResolveCompression(bool use_snappy, int64_t compression_type, Compression* compression) {
  if (compression_type < 0 || compression_type > 5) {
    return errors::InvalidArgument("compression_type is ", compression_type, ", want 0 to 5");
  }
  *compression = static_cast<Compression>(compression_type);
  if (!use_snappy) return OkStatus();
  if (*compression != Compression::kUnknown && *compression != Compression::kSnappy) {
    return errors::InvalidArgument("use_snappy is true, but compression_type is ", compression_type,
                                   ", want 0 (UNKNOW) or 2 (SNAPPY)");
  }
  *compression = Compression::kSnappy;
  return OkStatus();
}

Status OpenRecordSource(Env* env, const std::string& file_name, Compression compression,
                        int64_t buffer_size, int64_t skip, std::unique_ptr<ByteSource>* source) {
  if (file_name.empty()) {
    *source = std::make_unique<StdinSource>(buffer_size);
    return OkStatus();
  }
  std::unique_ptr<RandomAccessFile> file;
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(file_name, &file));
  const int64_t file_buffer = std::clamp<int64_t>(buffer_size, 4096, kMaxFileBuffer);
  std::unique_ptr<io::InputStreamInterface> stream = std::make_unique<io::BufferedInputStream>(
      new io::RandomAccessInputStream(file.get()), file_buffer, /*owns_input_stream=*/true);
  switch (compression) {
    case Compression::kUnknown:
    case Compression::kNone:
      break;
    case Compression::kSnappy:
      stream = std::make_unique<HadoopSnappyStream>(std::move(stream));
      break;
    case Compression::kZlib:
    case Compression::kGzip: {
      const InflateFormat format =
          compression == Compression::kZlib ? InflateFormat::kZlib : InflateFormat::kGzip;
      TF_RETURN_IF_ERROR(OpenInflateStream(std::move(stream), format, file_buffer, &stream));
      break;
    }
    case Compression::kZstd:
      TF_RETURN_IF_ERROR(OpenZstdStream(std::move(stream), file_buffer, &stream));
      break;
  }
  if (skip > 0) {
    const Status status = stream->SkipNBytes(skip);
    if (!status.ok()) {
      // Never OutOfRange, which would be the end of a dataset.
      return errors::DataLoss(file_name, ": cannot go on at offset ", skip, ": ", status.message());
    }
  }
  *source = std::make_unique<FileSource>(std::move(file), std::move(stream));
  return OkStatus();
}

Status RecordError(const std::string& name, const RecordReader& reader, ReadResult result) {
  const std::string text = name + ": " + reader.Explain(result);
  switch (result) {
    case ReadResult::kRecord:
    case ReadResult::kEnd:
      return OkStatus();
    case ReadResult::kDeadBeef:
      return errors::InvalidArgument(text);
    default:
      return errors::DataLoss(text);
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow
