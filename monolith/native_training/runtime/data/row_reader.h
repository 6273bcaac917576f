// Rows of a file that is decompressed already: lines of text, or payloads of TFRecords.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ROW_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ROW_READER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "monolith/native_training/runtime/data/record_framing.h"

namespace monolith {
namespace data {

// kLines: a line ends with "\n", which the last one may lack, and loses every "\r", as TensorFlow's
// readers have it. kTfRecords: base/crc32c.h draws one.
enum class RowFormat { kLines, kTfRecords };

// Not thread-safe.
class RowReader {
 public:
  // `source` must outlive the reader and begin at `offset`, before which there were `row` rows.
  RowReader(ByteSource* source, RowFormat format, int64_t offset, int64_t row)
      : source_(source), format_(format), offset_(offset), row_(row) {}

  // Reads one row, which is valid until the next call. Anything but kRecord stays the answer. All
  // rows in front of a place that cannot be read are given.
  ReadResult Next(std::string_view* row);

  // Where the next row begins, and how many were before it.
  int64_t offset() const { return offset_; }
  int64_t row() const { return row_; }

  // Explains anything but kRecord and kEnd; the row it is about is the next one.
  std::string Explain(ReadResult result) const;

 private:
  ReadResult NextLine(std::string_view* row);
  ReadResult NextTfRecord(std::string_view* row);
  void Fill();
  void Take(size_t bytes);

  ByteSource* const source_;
  const RowFormat format_;
  std::string buffer_;
  std::string chunk_;
  size_t position_ = 0;                // of the next row in buffer_
  size_t searched_ = 0;                // no line ends between position_ and here
  bool at_end_ = false;                // nothing more can be read
  ReadResult end_ = ReadResult::kEnd;  // why
  int64_t offset_;
  int64_t row_;
};

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ROW_READER_H_
