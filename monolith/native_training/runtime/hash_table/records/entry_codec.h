// Rows to and from serialized EntryDump messages, without protobuf objects.
//
//   09 id(8) | 15 float(4) per value | 1a len { one dump per segment that has one } | 20 ts
//   dump: 0a len { member len { state fields } }
//
// Everything but the timestamp has the same bytes for all rows of a table (tags, lengths) or a
// fixed place (floats), so encoding copies a template and patches it. Optimizers with a varint in
// their state take a second, general writer. The parser accepts any field order, packed floats and
// unknown fields, and checks every length.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_ENTRY_CODEC_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_ENTRY_CODEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

struct ParsedEntry {
  int64_t id = 0;
  uint32_t ts = 0;
  int64_t state_reset = 0;  // segments that got their initial state
};

class EntryCodec {
 public:
  explicit EntryCodec(const RowLayout& layout);

  // Upper bound of the bytes Encode writes.
  int64_t max_record_bytes() const { return max_record_bytes_; }

  // Writes the record of a TRAINING row to `out` (max_record_bytes() of room) and returns its size.
  int64_t Encode(int64_t id, const char* row, uint32_t ts, bool with_id, char* out) const;

  // Parses a record into `values` (dim floats) and, for TRAINING tables, its state into `row`
  // (whose values are set as well). Malformed bytes: FailedPrecondition; wrong number of values:
  // InvalidArgument naming id and dims; a missing or foreign optimizer dump: initial state,
  // counted.
  Status Parse(const char* data, int64_t size, float* values, char* row, ParsedEntry* entry) const;

 private:
  struct Patch {
    int64_t record_offset;  // of the first float; the next follow at 5 bytes
    int64_t row_offset;
    int64_t count;
  };

  int64_t EncodeGeneral(int64_t id, const char* row, uint32_t ts, bool with_id, char* out) const;
  void BuildTemplate();
  int64_t DumpBytes(const Segment& segment, const char* row) const;
  bool ParseAsWritten(const char* data, int64_t size, char* row, ParsedEntry* entry) const;
  // False: the bytes are malformed.
  bool ParseOptimizers(const char* data, int64_t size, size_t* next_segment, char* row,
                       std::vector<uint8_t>* restored) const;
  bool ParseState(const Segment& segment, const char* data, int64_t size, char* row,
                  bool* matches) const;

  const RowLayout& layout_;
  bool fixed_size_ = true;
  int64_t max_record_bytes_ = 0;
  std::string template_;  // up to the tag of the timestamp
  std::vector<Patch> patches_;
  std::vector<size_t> dumped_segments_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_RECORDS_ENTRY_CODEC_H_
