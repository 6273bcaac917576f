#include "monolith/native_training/runtime/data/row_reader.h"

#include <algorithm>
#include <cstring>

#include "monolith/native_training/runtime/base/crc32c.h"

namespace monolith {
namespace data {
namespace {

// Small enough that the bytes stay in the second-level cache until they are used.
constexpr int64_t kReadBytes = 256 << 10;
// A longer row is a file of another kind.
constexpr size_t kMaxRowBytes = size_t{1} << 30;

}  // namespace

ReadResult RowReader::Next(std::string_view* row) {
  return format_ == RowFormat::kLines ? NextLine(row) : NextTfRecord(row);
}

ReadResult RowReader::NextLine(std::string_view* row) {
  while (true) {
    char* const begin = buffer_.data() + position_;
    const void* const found =
        std::memchr(buffer_.data() + searched_, '\n', buffer_.size() - searched_);
    size_t size = buffer_.size() - position_;
    size_t consumed = size;
    if (found != nullptr) {
      size = static_cast<size_t>(static_cast<const char*>(found) - begin);
      consumed = size + 1;
    } else if (!at_end_) {
      searched_ = buffer_.size();
      if (size > kMaxRowBytes) return ReadResult::kTooLarge;
      Fill();
      continue;
    } else if (size == 0 || end_ != ReadResult::kEnd) {
      // The beginning of a line that cannot be read to its end is no row.
      return end_;
    }
    if (size > 0 && std::memchr(begin, '\r', size) != nullptr) {
      size = static_cast<size_t>(std::remove(begin, begin + size, '\r') - begin);
    }
    *row = std::string_view(begin, size);
    Take(consumed);
    return ReadResult::kRecord;
  }
}

ReadResult RowReader::NextTfRecord(std::string_view* row) {
  while (true) {
    const int64_t available = static_cast<int64_t>(buffer_.size() - position_);
    const char* data = nullptr;
    int64_t size = 0, consumed = 0;
    switch (engine::ReadRecord(buffer_.data() + position_, available, &data, &size, &consumed)) {
      case engine::RecordResult::kRecord:
        *row = std::string_view(data, static_cast<size_t>(size));
        Take(static_cast<size_t>(consumed));
        return ReadResult::kRecord;
      case engine::RecordResult::kCorrupt:
        return ReadResult::kBadChecksum;
      case engine::RecordResult::kIncomplete:
        break;
    }
    if (at_end_) {
      return end_ == ReadResult::kEnd && available > 0 ? ReadResult::kTruncated : end_;
    }
    if (static_cast<size_t>(available) > kMaxRowBytes) return ReadResult::kTooLarge;
    Fill();
  }
}

void RowReader::Fill() {
  buffer_.erase(0, position_);
  searched_ -= std::min(searched_, position_);
  position_ = 0;
  const bool is_read = source_->Read(kReadBytes, &chunk_);
  buffer_.append(chunk_);
  at_end_ = !is_read || static_cast<int64_t>(chunk_.size()) < kReadBytes;
  if (!is_read) end_ = ReadResult::kIoError;
}

void RowReader::Take(size_t bytes) {
  position_ += bytes;
  searched_ = position_;
  offset_ += static_cast<int64_t>(bytes);
  ++row_;
}

std::string RowReader::Explain(ReadResult result) const {
  const std::string kind = format_ == RowFormat::kLines ? "line" : "record";
  const std::string where = " at offset " + std::to_string(offset_);
  switch (result) {
    case ReadResult::kTruncated:
      return "the file ends inside of the record" + where;
    case ReadResult::kBadChecksum:
      return "the record" + where +
             " has another checksum than its content: it is corrupt, or the" +
             " file is no TFRecord file";
    case ReadResult::kTooLarge:
      return "the " + kind + where + " has more than " + std::to_string(kMaxRowBytes) + " bytes";
    case ReadResult::kIoError:
      return source_->error() + ", in the " + kind + where;
    default:
      return "";
  }
}

}  // namespace data
}  // namespace monolith
