// An EntryConfig compiled into flat descriptors: where every part of a row is, and what to do with
// it.
//
//   TRAINING row   | values 0 | values 1 | ... | state 0 | state 1 | ... | padding |
//                  ^ float[dim]                ^ 4-byte aligned; 64-bit fields by memcpy
//   SERVING row    | code 0 | code 1 | ... | padding |
//
// The stride is a multiple of 4 bytes up to 32 bytes, of 16 above. A state is a list of fields,
// each a float per element, one float, or one int64; the same list drives initial values,
// checkpoint records and their parser.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_LAYOUT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_LAYOUT_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_table/table_config.h"

namespace monolith {
namespace engine {

enum class RetrieverKind : uint8_t { kRaw, kFakeQuant, kHashNet };

struct StateField {
  uint8_t dump_field;  // field number inside the optimizer's dump message
  bool is_int64;       // a varint in the dump; else float
  int64_t count;       // elements: dim for a vector, 1 for a scalar
  int64_t offset;      // bytes from the start of the row
  float initial;
  bool is_scalar;  // the dump holds one value, not a list
};

struct Segment {
  int64_t dim = 0;
  int64_t value_begin = 0;   // first element inside the vector
  int64_t state_offset = 0;  // bytes from the start of the row
  int64_t state_bytes = 0;
  int64_t code_offset = 0;  // SERVING: bytes from the start of the row
  int64_t code_bytes = 0;
  int dump_number = 0;            // member of SingleOptimizerDump; 0: this optimizer has no dump
  std::vector<StateField> state;  // ascending dump_field
  RetrieverKind retriever = RetrieverKind::kRaw;
  OptimizerConfig optimizer;
  InitializerConfig initializer;
  CompressorConfig compressor;
};

struct RowLayout {
  EntryType type = EntryType::kTraining;
  int64_t dim = 0;
  int64_t row_bytes = 0;
  int64_t stride = 0;
  bool all_raw = true;  // TRAINING, and a lookup is a plain copy
  bool uses_global_step = false;
  std::vector<Segment> segments;
  std::vector<char> initial_state;  // TRAINING: of all segments, behind the values

  bool serving() const { return type == EntryType::kServing; }
  int64_t num_segments() const { return static_cast<int64_t>(segments.size()); }
};

// Whether a lookup is a plain copy: of training rows, or of serving rows whose codes are floats.
bool CopiesRows(const RowLayout& layout);

// Writes the state that a new row has for all segments, or for one. A serving row has none.
inline void InitializeState(const RowLayout& layout, char* row) {
  if (layout.initial_state.empty()) return;
  std::memcpy(row + 4 * layout.dim, layout.initial_state.data(), layout.initial_state.size());
}
inline void InitializeState(const RowLayout& layout, const Segment& segment, char* row) {
  if (segment.state_bytes == 0) return;
  const char* const state = layout.initial_state.data() + segment.state_offset - 4 * layout.dim;
  std::memcpy(row + segment.state_offset, state, segment.state_bytes);
}

// Checks the whole configuration; errors name the segment, the field and the value.
Status CompileRowLayout(const TableConfig& config, RowLayout* layout);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_LAYOUT_H_
