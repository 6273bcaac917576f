// Unique keys per row of a ragged batch, and where every occurrence of a key lies in the flat value
// buffer that holds all occurrences one after the other (row r: dims[r] floats per occurrence).
//
//   row 0 (dim 2)   7 8 7          buffer  7 7 8 8 7 7 | 9 9 9
//   row 1 (dim 3)   9              keys    [7, 8] [9]    offsets  7: 0, 4   8: 2   9: 6
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_UNIQUE_OFFSETS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_UNIQUE_OFFSETS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/distribution/id_index.h"

namespace monolith {
namespace distribution {

// Rows are independent; they are shared out among the threads.
class UniqueOffsets {
 public:
  static constexpr int64_t kMaxKeys = UINT32_MAX;

  // Numbers the distinct keys. `splits` are num_rows + 1 valid row splits of `keys`, of which there
  // are at most kMaxKeys; both must outlive this.
  UniqueOffsets(const engine::ParallelRunner& parallel, const int64_t* keys, const int64_t* splits,
                int64_t num_rows)
      : splits_(splits),
        rows_(num_rows),
        // make_unique would fill it with zeros first.
        number_of_(new uint32_t[splits[num_rows]]) {
    ForRows(parallel, 30, [&](int64_t row) {
      const int64_t* key = keys + splits[row];
      uint32_t* number_of = number_of_.get() + splits[row];
      std::vector<int64_t>& unique = rows_[row].keys;
      NumberIds(
          splits[row + 1] - splits[row], [key](int64_t i) { return key[i]; },
          [&](int64_t i, int64_t id, int64_t number, bool is_new) {
            number_of[i] = static_cast<uint32_t>(number);
            if (is_new) unique.push_back(id);
          });
    });
    for (Row& row : rows_) {
      row.first_unique = num_unique_;
      num_unique_ += static_cast<int64_t>(row.keys.size());
    }
  }

  int64_t num_unique() const { return num_unique_; }

  // Sizes: unique_keys num_unique, unique_splits num_rows + 1, offsets as many as keys,
  // offset_splits num_unique + 1.
  void Fill(const engine::ParallelRunner& parallel, const std::vector<int64_t>& dims,
            int64_t* unique_keys, int64_t* unique_splits, int64_t* offsets,
            int64_t* offset_splits) const {
    std::vector<int64_t> first_float(rows_.size() + 1, 0);
    for (size_t row = 0; row < rows_.size(); ++row) {
      unique_splits[row] = rows_[row].first_unique;
      first_float[row + 1] = first_float[row] + (splits_[row + 1] - splits_[row]) * dims[row];
    }
    unique_splits[rows_.size()] = num_unique_;
    offset_splits[num_unique_] = splits_[rows_.size()];

    ForRows(parallel, 10, [&](int64_t r) {
      const Row& row = rows_[r];
      std::copy(row.keys.begin(), row.keys.end(), unique_keys + row.first_unique);
      const int64_t length = splits_[r + 1] - splits_[r];
      const uint32_t* number_of = number_of_.get() + splits_[r];
      // Occurrences of each key, then where its next one goes.
      std::vector<uint32_t> next(row.keys.size(), 0);
      for (int64_t i = 0; i < length; ++i) ++next[number_of[i]];
      uint32_t begin = 0;
      for (size_t u = 0; u < next.size(); ++u) {
        offset_splits[row.first_unique + u] = splits_[r] + begin;
        begin += std::exchange(next[u], begin);
      }
      int64_t* row_offsets = offsets + splits_[r];
      int64_t offset = first_float[r];
      for (int64_t i = 0; i < length; ++i, offset += dims[r]) {
        row_offsets[next[number_of[i]]++] = offset;
      }
    });
  }

 private:
  struct Row {
    std::vector<int64_t> keys;  // distinct, in order of first appearance
    int64_t first_unique = 0;   // number of distinct keys in earlier rows
  };

  template <typename Fn>
  void ForRows(const engine::ParallelRunner& parallel, int64_t cycles_per_key, const Fn& fn) const {
    const int64_t num_rows = static_cast<int64_t>(rows_.size());
    if (parallel.TasksFor(splits_[num_rows] * cycles_per_key) == 1 || num_rows == 1) {
      for (int64_t row = 0; row < num_rows; ++row) fn(row);
    } else {
      parallel.RunTasks(num_rows, fn);
    }
  }

  const int64_t* splits_;
  std::vector<Row> rows_;
  std::unique_ptr<uint32_t[]> number_of_;  // number of each key inside its row
  int64_t num_unique_ = 0;
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_UNIQUE_OFFSETS_H_
