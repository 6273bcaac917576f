// CRC-32C and TFRecord framing at memory speed.
//
//   | length u64 | masked crc of length u32 | data | masked crc of data u32 |   little endian
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_CRC32C_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_CRC32C_H_

#include <cstdint>
#include <cstring>
#include <string>

namespace monolith {
namespace engine {

// Uses the CRC instructions of ARM64 or x86-64 where the running machine has them, else tables.
// `before` is the checksum of the bytes in front of `data`: pieces one after another give the
// checksum of the whole.
uint32_t Crc32c(const void* data, int64_t size, uint32_t before = 0);

// The table-driven version, for tests.
uint32_t Crc32cPortable(const void* data, int64_t size, uint32_t before = 0);

inline uint32_t MaskCrc(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

constexpr int64_t kRecordHeaderBytes = 12;
constexpr int64_t kRecordFooterBytes = 4;

// Writes the 12 bytes in front of `size` bytes of data.
inline void WriteRecordHeader(uint64_t size, char* out) {
  std::memcpy(out, &size, 8);
  const uint32_t crc = MaskCrc(Crc32c(out, 8));
  std::memcpy(out + 8, &crc, 4);
}

// Writes the 4 bytes behind the data.
inline void WriteRecordFooter(const char* data, int64_t size, char* out) {
  const uint32_t crc = MaskCrc(Crc32c(data, size));
  std::memcpy(out, &crc, 4);
}

inline void AppendRecord(const char* data, int64_t size, std::string* out) {
  const size_t begin = out->size();
  out->resize(begin + kRecordHeaderBytes + size + kRecordFooterBytes);
  char* to = &(*out)[begin];
  WriteRecordHeader(static_cast<uint64_t>(size), to);
  std::memcpy(to + kRecordHeaderBytes, data, size);
  WriteRecordFooter(data, size, to + kRecordHeaderBytes + size);
}

// The payload of one record, in a borrowed buffer.
struct RecordView {
  const char* data = nullptr;
  int64_t size = 0;
};

enum class RecordResult { kRecord, kIncomplete, kCorrupt };

// Finds the frame at the front of `buffer`. kRecord: `*data` and `*size` are the payload, which is
// not looked at, and `*consumed` the bytes of the frame. kIncomplete: the buffer ends inside the
// frame. kCorrupt: the length's checksum is wrong.
inline RecordResult FindRecord(const char* buffer, int64_t available, const char** data,
                               int64_t* size, int64_t* consumed) {
  if (available < kRecordHeaderBytes) return RecordResult::kIncomplete;
  uint64_t length;
  uint32_t crc;
  std::memcpy(&length, buffer, 8);
  std::memcpy(&crc, buffer + 8, 4);
  if (crc != MaskCrc(Crc32c(buffer, 8))) return RecordResult::kCorrupt;
  const uint64_t room = static_cast<uint64_t>(available - kRecordHeaderBytes);
  if (room < kRecordFooterBytes || length > room - kRecordFooterBytes) {
    return RecordResult::kIncomplete;
  }
  *data = buffer + kRecordHeaderBytes;
  *size = static_cast<int64_t>(length);
  *consumed = kRecordHeaderBytes + *size + kRecordFooterBytes;
  return RecordResult::kRecord;
}

// Whether a payload that FindRecord has found matches the checksum behind it.
inline bool IsIntact(const RecordView& record) {
  uint32_t crc;
  std::memcpy(&crc, record.data + record.size, 4);
  return crc == MaskCrc(Crc32c(record.data, record.size));
}

// The same as FindRecord, but kCorrupt also if the payload's checksum is wrong.
inline RecordResult ReadRecord(const char* buffer, int64_t available, const char** data,
                               int64_t* size, int64_t* consumed) {
  const RecordResult found = FindRecord(buffer, available, data, size, consumed);
  if (found != RecordResult::kRecord) return found;
  return IsIntact({*data, *size}) ? RecordResult::kRecord : RecordResult::kCorrupt;
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_CRC32C_H_
