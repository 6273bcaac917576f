// Pairs columns of pooled tensors with columns of tables' rows.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_POOLED_PARTS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_POOLED_PARTS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// `width` columns of the rows of one input, from `column` on, lie in one pooled tensor, from
// `pooled_column` on.
struct PooledPart {
  int64_t column;
  int64_t width;
  int64_t pooled;
  int64_t pooled_column;
};

// Reads five numbers for each part: its input, and the fields of PooledPart. Returns the parts of
// each input. Fails with InvalidArgument if a number is out of range; `widths` are those of the
// pooled tensors, null where they are not known.
inline Status ReadPooledParts(const std::vector<int64_t>& numbers, int64_t num_inputs,
                              int64_t num_pooled, const std::vector<int64_t>* widths,
                              std::vector<std::vector<PooledPart>>* parts) {
  constexpr int64_t kMaxColumns = std::numeric_limits<int32_t>::max();
  if (numbers.size() % 5 != 0) {
    return errors::InvalidArgument("parts has ", numbers.size(), " elements, want a multiple of 5");
  }
  parts->assign(num_inputs, {});
  for (size_t i = 0; i < numbers.size(); i += 5) {
    const int64_t input = numbers[i];
    const PooledPart part{numbers[i + 1], numbers[i + 2], numbers[i + 3], numbers[i + 4]};
    if (input < 0 || input >= num_inputs || part.pooled < 0 || part.pooled >= num_pooled ||
        part.column < 0 || part.column > kMaxColumns || part.width < 1 ||
        part.width > kMaxColumns || part.pooled_column < 0 || part.pooled_column > kMaxColumns) {
      return errors::InvalidArgument("parts[", i, ":", i + 5, "] is (", input, ", ", part.column,
                                     ", ", part.width, ", ", part.pooled, ", ", part.pooled_column,
                                     "), want one of ", num_inputs, " inputs, columns, and one of ",
                                     num_pooled, " pooled tensors");
    }
    if (widths != nullptr && part.pooled_column + part.width > (*widths)[part.pooled]) {
      return errors::InvalidArgument("parts[", i, ":", i + 5, "] ends at column ",
                                     part.pooled_column + part.width, " of a pooled tensor with ",
                                     (*widths)[part.pooled]);
    }
    (*parts)[input].push_back(part);
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_POOLED_PARTS_H_
