// Makes the row that a serving table keeps: the values behind its compressors.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_SERVED_VALUES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_SERVED_VALUES_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"
#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

namespace monolith {
namespace engine {

// Rounds rows of a training table as the serving table of the same configuration would, so that
// both sides of a row log can compare bits. Not thread-safe.
class ServedValues {
 public:
  explicit ServedValues(const TableConfig& training) {
    TableConfig config = training;
    config.entry.type = EntryType::kServing;
    // A configuration without compressors has no serving table; rows go as they are.
    if (!CompileRowLayout(config, &layout_).ok()) return;
    for (const Segment& segment : layout_.segments) {
      exact_ &= segment.code_bytes == 4 * segment.dim;
    }
    row_.resize(static_cast<size_t>(layout_.stride));
  }

  // Rows stay as they are.
  bool exact() const { return exact_; }

  void Round(float* values) {
    if (exact_) return;
    for (const Segment& segment : layout_.segments) {
      EncodeSegment(segment, values, row_.data());
      DecodeSegment(segment, row_.data(), values);
    }
  }

 private:
  RowLayout layout_;
  std::vector<char> row_;
  bool exact_ = true;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_SERVED_VALUES_H_
