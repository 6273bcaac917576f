// Pooling of embedding rows into batch rows: sum, mean and column-wise L2 norm, with their
// gradients.
//
//   values   [k, dim]      row i belongs to segment segments[i]
//   out      [rows, dim]   cut by columns into one or more outputs (ColumnSink)
//
// Segments usually come from row ids and are sorted. Then every thread takes a range of values that
// starts and ends between two segments, reduces a segment in registers and writes its row once.
// Unsorted segments are scattered: every thread owns a range of output rows. Either way a row is
// summed in input order, so the result does not depend on the number of threads.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SEGMENT_REDUCE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SEGMENT_REDUCE_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/distribution/parallel.h"

namespace monolith {
namespace distribution {

enum class Reduction { kSum, kMean, kSquareNorm };

// Columns [column, column + width) of the reduced matrix, stored row by row at `data`.
struct ColumnSink {
  float* data;
  int64_t column;
  int64_t width;
};

struct SegmentCheck {
  int64_t bad = -1;  // first i whose segment is outside [0, rows)
  bool sorted = true;
};

template <typename Index>
SegmentCheck CheckSegments(const Parallel& parallel, const Index* segments, int64_t k,
                           int64_t rows) {
  std::atomic<bool> any_out_of_range{false}, any_unsorted{false};
  parallel.For(k, 2, [&](int64_t begin, int64_t end) {
    // Branch-free over the usual case; the culprit is looked for afterwards.
    bool out_of_range = false, unsorted = false;
    int64_t before = begin > 0 ? static_cast<int64_t>(segments[begin - 1]) : 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t segment = static_cast<int64_t>(segments[i]);
      out_of_range |= static_cast<uint64_t>(segment) >= static_cast<uint64_t>(rows);
      unsorted |= segment < before;
      before = segment;
    }
    if (out_of_range) any_out_of_range = true;
    if (unsorted) any_unsorted = true;
  });
  SegmentCheck check;
  check.sorted = !any_unsorted;
  for (int64_t i = 0; any_out_of_range && check.bad < 0; ++i) {
    const int64_t segment = static_cast<int64_t>(segments[i]);
    if (segment < 0 || segment >= rows) check.bad = i;
  }
  return check;
}

// out[j] = reduction over the rows [begin, end) of values of column j; columns [column, column +
// width).
template <Reduction kReduction>
inline void ReduceRows(const float* values, int64_t dim, int64_t begin, int64_t end, int64_t column,
                       int64_t width, float* __restrict__ out) {
  constexpr bool kSquare = kReduction == Reduction::kSquareNorm;
  constexpr int64_t kBlock = 16;  // columns kept in registers
  const float count = static_cast<float>(end - begin);
  const auto finish = [count](float sum) {
    if (kReduction == Reduction::kMean) return sum / count;
    if (kReduction == Reduction::kSquareNorm) return std::sqrt(sum);
    return sum;
  };
  int64_t j = 0;
  for (; j + kBlock <= width; j += kBlock) {
    float sum[kBlock];
    const float* row = values + begin * dim + column + j;
    for (int64_t c = 0; c < kBlock; ++c) sum[c] = kSquare ? row[c] * row[c] : row[c];
    for (int64_t i = begin + 1; i < end; ++i) {
      row += dim;
      for (int64_t c = 0; c < kBlock; ++c) sum[c] += kSquare ? row[c] * row[c] : row[c];
    }
    for (int64_t c = 0; c < kBlock; ++c) out[j + c] = finish(sum[c]);
  }
  for (; j < width; ++j) {
    const float* value = values + begin * dim + column + j;
    float sum = kSquare ? *value * *value : *value;
    for (int64_t i = begin + 1; i < end; ++i) {
      value += dim;
      sum += kSquare ? *value * *value : *value;
    }
    out[j] = finish(sum);
  }
}

inline void ZeroRows(const std::vector<ColumnSink>& sinks, int64_t begin, int64_t end) {
  for (const ColumnSink& sink : sinks) {
    std::fill(sink.data + begin * sink.width, sink.data + end * sink.width, 0.0f);
  }
}

// Segments are sorted and inside [0, rows).
template <Reduction kReduction, typename Index>
void ReduceSorted(const Parallel& parallel, const Index* segments, int64_t k, int64_t rows,
                  const float* values, int64_t dim, const std::vector<ColumnSink>& sinks) {
  const int64_t tasks =
      std::max<int64_t>(1, std::min(k, parallel.SmallTasksFor((k + rows) * (dim + 8))));
  // First value of task t: the start of the segment at or after an even cut.
  const auto start_of = [&](int64_t t) {
    int64_t i = Parallel::Cut(k, tasks, t);
    while (i > 0 && i < k && segments[i] == segments[i - 1]) ++i;
    return i;
  };
  parallel.RunTasks(tasks, [&](int64_t t) {
    int64_t i = start_of(t);
    const int64_t end = start_of(t + 1);
    if (i == end && t + 1 < tasks) return;
    // Rows before the task's first segment belong to the task before, which ends at them.
    int64_t row = i < k && i > 0 ? static_cast<int64_t>(segments[i]) : (i == 0 ? 0 : rows);
    const int64_t end_row = end < k ? static_cast<int64_t>(segments[end]) : rows;
    while (i < end) {
      const int64_t segment = static_cast<int64_t>(segments[i]);
      if (segment > row) ZeroRows(sinks, row, segment);
      int64_t last = i + 1;
      while (last < end && static_cast<int64_t>(segments[last]) == segment) ++last;
      for (const ColumnSink& sink : sinks) {
        ReduceRows<kReduction>(values, dim, i, last, sink.column, sink.width,
                               sink.data + segment * sink.width);
      }
      row = segment + 1;
      i = last;
    }
    if (row < end_row) ZeroRows(sinks, row, end_row);
  });
}

template <Reduction kReduction, typename Index>
void ReduceUnsorted(const Parallel& parallel, const Index* segments, int64_t k, int64_t rows,
                    const float* values, int64_t dim, const std::vector<ColumnSink>& sinks) {
  constexpr bool kSquare = kReduction == Reduction::kSquareNorm;
  const int64_t tasks =
      std::max<int64_t>(1, std::min(rows, parallel.TasksFor((k + rows) * (dim + 8))));
  parallel.RunTasks(tasks, [&](int64_t t) {
    const int64_t begin = Parallel::Cut(rows, tasks, t);
    const int64_t end = Parallel::Cut(rows, tasks, t + 1);
    ZeroRows(sinks, begin, end);
    std::vector<int64_t> counts(kReduction == Reduction::kMean ? end - begin : 0);
    for (int64_t i = 0; i < k; ++i) {
      const int64_t row = static_cast<int64_t>(segments[i]);
      if (row < begin || row >= end) continue;
      for (const ColumnSink& sink : sinks) {
        const float* value = values + i * dim + sink.column;
        float* __restrict__ out = sink.data + row * sink.width;
        for (int64_t j = 0; j < sink.width; ++j) {
          out[j] += kSquare ? value[j] * value[j] : value[j];
        }
      }
      if (kReduction == Reduction::kMean) ++counts[row - begin];
    }
    if (kReduction == Reduction::kSum) return;
    for (const ColumnSink& sink : sinks) {
      for (int64_t row = begin; row < end; ++row) {
        float* out = sink.data + row * sink.width;
        if (kReduction == Reduction::kMean) {
          const float count = static_cast<float>(std::max<int64_t>(1, counts[row - begin]));
          for (int64_t j = 0; j < sink.width; ++j) out[j] /= count;
        } else {
          for (int64_t j = 0; j < sink.width; ++j) out[j] = std::sqrt(out[j]);
        }
      }
    }
  });
}

// Every output row is written, rows without values become 0. `check` must be clean.
template <Reduction kReduction, typename Index>
void ReduceSegments(const Parallel& parallel, const Index* segments, int64_t k, int64_t rows,
                    const SegmentCheck& check, const float* values, int64_t dim,
                    const std::vector<ColumnSink>& sinks) {
  if (check.sorted) {
    ReduceSorted<kReduction>(parallel, segments, k, rows, values, dim, sinks);
  } else {
    ReduceUnsorted<kReduction>(parallel, segments, k, rows, values, dim, sinks);
  }
}

// Number of values per row.
template <typename Index>
std::vector<int64_t> CountSegments(const Index* segments, int64_t k, int64_t rows) {
  std::vector<int64_t> counts(rows, 0);
  for (int64_t i = 0; i < k; ++i) ++counts[static_cast<int64_t>(segments[i])];
  return counts;
}

// Sum of row splits segments: out row b = sum of the values [splits[b], splits[b + 1]).
template <typename Index>
void SumSplits(const Parallel& parallel, const Index* splits, int64_t rows, const float* values,
               int64_t dim, const std::vector<ColumnSink>& sinks) {
  const int64_t k = static_cast<int64_t>(splits[rows]);
  parallel.For(
      rows, (k / std::max<int64_t>(1, rows) + 1) * (dim + 8), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (splits[row] == splits[row + 1]) {
            ZeroRows(sinks, row, row + 1);
            continue;
          }
          for (const ColumnSink& sink : sinks) {
            ReduceRows<Reduction::kSum>(values, dim, splits[row], splits[row + 1], sink.column,
                                        sink.width, sink.data + row * sink.width);
          }
        }
      });
}

// Gradient of a sum: row i of out (width dim) is row segments[i] of the gradient, whose columns lie
// in `sinks`; mean divides by counts (null for a sum).
template <typename Index>
void BroadcastSegments(const Parallel& parallel, const Index* segments, int64_t k,
                       const std::vector<ColumnSink>& sinks, const int64_t* counts, int64_t dim,
                       float* out) {
  parallel.For(k, dim + 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = static_cast<int64_t>(segments[i]);
      for (const ColumnSink& sink : sinks) {
        const float* grad = sink.data + row * sink.width;
        float* __restrict__ to = out + i * dim + sink.column;
        if (counts == nullptr) {
          std::copy(grad, grad + sink.width, to);
        } else {
          const float count = static_cast<float>(counts[row]);
          for (int64_t j = 0; j < sink.width; ++j) to[j] = grad[j] / count;
        }
      }
    }
  });
}

// Gradient of the column-wise L2 norm: grad * value / norm, 0 where the norm is 0.
template <typename Index>
void SquareNormGradient(const Parallel& parallel, const Index* segments, int64_t k,
                        const float* values, const float* norms, const float* grads, int64_t dim,
                        float* out) {
  parallel.For(k, 4 * dim + 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = static_cast<int64_t>(segments[i]);
      const float* value = values + i * dim;
      const float* norm = norms + row * dim;
      const float* grad = grads + row * dim;
      float* __restrict__ to = out + i * dim;
      for (int64_t j = 0; j < dim; ++j) {
        to[j] = norm[j] == 0.0f ? 0.0f : grad[j] * value[j] / norm[j];
      }
    }
  });
}

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SEGMENT_REDUCE_H_
