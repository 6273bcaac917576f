#include "monolith/native_training/runtime/data/record_framing.h"

#include <algorithm>

namespace monolith {
namespace data {
namespace {

constexpr uint64_t kDeadBeefLength = 0xfefefefe;
// The largest message protobuf can parse.
constexpr uint64_t kMaxRecordBytes = (uint64_t{1} << 31) - 1;
// A wrong length must not make us allocate gigabytes before the file turns out to be shorter.
constexpr uint64_t kReadStep = 1 << 20;

uint64_t LittleEndian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

void AppendLittleEndian(uint64_t value, std::string* out) {
  for (int i = 0; i < 8; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

}  // namespace

bool MemorySource::Read(int64_t size, std::string* out) {
  const size_t taken = std::min(rest_.size(), static_cast<size_t>(size));
  out->assign(rest_.data(), taken);
  rest_.remove_prefix(taken);
  return true;
}

ReadResult RecordReader::ReadBytes(uint64_t size, std::string* out) {
  out->clear();
  std::string step;
  while (out->size() < size) {
    const uint64_t wanted = std::min<uint64_t>(size - out->size(), kReadStep);
    if (!source_->Read(static_cast<int64_t>(wanted), &step)) return ReadResult::kIoError;
    offset_ += static_cast<int64_t>(step.size());
    if (out->empty() && step.size() == size) {
      out->swap(step);
      return ReadResult::kRecord;
    }
    out->append(step);
    if (step.size() < wanted) {
      return out->empty() ? ReadResult::kEnd : ReadResult::kTruncated;
    }
  }
  return ReadResult::kRecord;
}

ReadResult RecordReader::ReadLength(uint64_t* length) {
  std::string bytes;
  const ReadResult result = ReadBytes(8, &bytes);
  if (result == ReadResult::kRecord) *length = LittleEndian(bytes);
  return result;
}

ReadResult RecordReader::ReadHeader(uint32_t* data_source_key) {
  *data_source_key = 0;
  uint64_t word = 0;
  ReadResult result = ReadResult::kRecord;
  if (flags_.lagrangex_header) {
    result = ReadLength(&word);
    *data_source_key = static_cast<uint32_t>(word) >> 8 << 8;
    return result;
  }
  uint64_t sort_id_size = 0;
  if (flags_.kafka_dump_prefix) {
    result = ReadLength(&sort_id_size);
    if (result == ReadResult::kRecord && sort_id_size == 0) result = ReadLength(&word);
    if (result != ReadResult::kRecord) return result;
  }
  if (flags_.has_sort_id) {
    if (sort_id_size == 0) result = ReadLength(&sort_id_size);
    if (result != ReadResult::kRecord) return result;
    if (sort_id_size > kMaxRecordBytes) return ReadResult::kTooLarge;
    std::string sort_id;
    result = ReadBytes(sort_id_size, &sort_id);
    if (result != ReadResult::kRecord) return result;
  }
  return flags_.kafka_dump ? ReadLength(&word) : result;
}

ReadResult RecordReader::Next(std::string* payload, uint32_t* data_source_key) {
  record_offset_ = offset_;
  uint64_t length = 0;
  ReadResult result = ReadHeader(data_source_key);
  if (result == ReadResult::kRecord) result = ReadLength(&length);
  if (result == ReadResult::kRecord) {
    if (length == kDeadBeefLength) return ReadResult::kDeadBeef;
    if (length > kMaxRecordBytes) return ReadResult::kTooLarge;
    if (!source_->Accepts(length)) return ReadResult::kEnd;
    result = ReadBytes(length, payload);
  }
  // The end is clean only where the record has not begun.
  if (result == ReadResult::kEnd && offset_ != record_offset_) return ReadResult::kTruncated;
  return result;
}

std::string RecordReader::Explain(ReadResult result) const {
  const std::string where = " in the record at offset " + std::to_string(record_offset_);
  switch (result) {
    case ReadResult::kTruncated:
      return "truncated record at offset " + std::to_string(record_offset_) +
             ", the data ends at offset " + std::to_string(offset_);
    case ReadResult::kDeadBeef:
      return "DEADBEEF value found" + where;
    case ReadResult::kTooLarge:
      return "impossible length" + where + ": do the header flags fit the data?";
    case ReadResult::kIoError:
      return source_->error() + where;
    default:
      return "";
  }
}

std::string MakeRecordHeader(const HeaderFlags& flags, std::string_view data_source,
                             uint64_t payload_size) {
  std::string header;
  if (flags.lagrangex_header) {
    AppendLittleEndian(DataSourceKey(data_source), &header);
  } else {
    const int words = 2 * flags.kafka_dump_prefix + flags.has_sort_id + flags.kafka_dump;
    header.assign(static_cast<size_t>(8 * words), '\0');
  }
  AppendLittleEndian(payload_size, &header);
  return header;
}

int32_t JavaHash(std::string_view name) {
  uint32_t hash = 0;
  for (char c : name) hash = 31 * hash + static_cast<uint32_t>(static_cast<unsigned char>(c));
  return static_cast<int32_t>(hash);
}

uint32_t DataSourceKey(std::string_view name) { return static_cast<uint32_t>(JavaHash(name)) << 8; }

}  // namespace data
}  // namespace monolith
