// Records of sample files and Kafka messages: [header] [payload length] [payload], repeated.
//
// All lengths are 8 bytes, little-endian. The header depends on four flags, in this order:
//
//   lagrangex_header (alone)   1 byte type | 3 bytes data source | 4 bytes 0
//   kafka_dump_prefix          8 bytes p; if p = 0, 8 more are skipped, else p is the sort id's
//   size has_sort_id                8 bytes k, unless p was it | k bytes of sort id kafka_dump 8
//   bytes
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_RECORD_FRAMING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_RECORD_FRAMING_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace monolith {
namespace data {

struct HeaderFlags {
  bool has_sort_id = false;
  bool kafka_dump = false;
  bool kafka_dump_prefix = false;
  bool lagrangex_header = false;
};

// Where records come from.
class ByteSource {
 public:
  virtual ~ByteSource() = default;

  // Reads up to `size` bytes into `out`, replacing it; fewer only at the end. False: the device
  // failed, and error() says how; `out` has the bytes before.
  virtual bool Read(int64_t size, std::string* out) = 0;

  virtual std::string error() const { return ""; }

  // Whether a payload of this size can be read; if not, the data counts as ended.
  virtual bool Accepts(uint64_t payload_size) const {
    (void)payload_size;
    return true;
  }
};

// Bytes in memory, which must outlive the source.
class MemorySource final : public ByteSource {
 public:
  explicit MemorySource(std::string_view bytes) : rest_(bytes) {}

  bool Read(int64_t size, std::string* out) override;

 private:
  std::string_view rest_;
};

enum class ReadResult {
  kRecord,
  kEnd,        // no byte left where a record would start
  kTruncated,  // the end is inside a record
  kDeadBeef,   // the marker 0xfefefefe where a length should be
  kTooLarge,   // a length that no record has: the file is not what the flags say
  kBadChecksum,
  kIoError,
};

class RecordReader {
 public:
  // `source` must outlive the reader.
  RecordReader(ByteSource* source, const HeaderFlags& flags) : source_(source), flags_(flags) {}

  // Reads one record. `data_source_key` is 0 without lagrangex header.
  ReadResult Next(std::string* payload, uint32_t* data_source_key);

  // Bytes consumed, and where the last record began.
  int64_t offset() const { return offset_; }
  int64_t record_offset() const { return record_offset_; }
  void set_offset(int64_t offset) { offset_ = offset; }

  // Explains anything but kRecord and kEnd.
  std::string Explain(ReadResult result) const;

 private:
  ReadResult ReadBytes(uint64_t size, std::string* out);
  ReadResult ReadLength(uint64_t* length);
  ReadResult ReadHeader(uint32_t* data_source_key);

  ByteSource* source_;
  HeaderFlags flags_;
  int64_t offset_ = 0;
  int64_t record_offset_ = 0;
};

// The header a writer without metadata emits, and the length of the payload.
std::string MakeRecordHeader(const HeaderFlags& flags, std::string_view data_source,
                             uint64_t payload_size);

// Java's String.hashCode.
int32_t JavaHash(std::string_view name);

// Returns the form of a data source's name in `data_source_key`.
uint32_t DataSourceKey(std::string_view name);

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_RECORD_FRAMING_H_
