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

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/distribution/columns.h"

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
SegmentCheck CheckSegments(const engine::ParallelRunner& parallel, const Index* segments, int64_t k,
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

// Applied to a value before it is summed.
template <Reduction kReduction, int64_t kColumns>
inline Columns<kColumns> LoadTerm(const float* value) {
  Columns<kColumns> term = Columns<kColumns>::Load(value);
  if (kReduction == Reduction::kSquareNorm) term.Square();
  return term;
}

// Turns the sum of `count` terms into the result and writes it.
template <Reduction kReduction, int64_t kColumns>
inline void Finish(Columns<kColumns> sum, int64_t count, float* out) {
  if (kReduction == Reduction::kMean) sum.Divide(static_cast<float>(count));
  if (kReduction == Reduction::kSquareNorm) sum.Sqrt();
  sum.Store(out);
}

// out[j] = reduction over the rows [begin, end), at least one, of values[row * dim + column + j].
template <Reduction kReduction>
inline void ReduceRows(const float* values, int64_t dim, int64_t begin, int64_t end, int64_t column,
                       int64_t width, float* out) {
  ForColumnBlocks(width, [&](auto columns, int64_t first) {
    constexpr int64_t kColumns = decltype(columns)::value;
    const float* value = values + begin * dim + column + first;
    Columns<kColumns> sum = LoadTerm<kReduction, kColumns>(value);
    for (int64_t i = begin + 1; i < end; ++i) {
      value += dim;
      sum.Add(LoadTerm<kReduction, kColumns>(value));
    }
    Finish<kReduction, kColumns>(sum, end - begin, out + first);
  });
}

// The same for the first kColumns columns and all rows from `begin` on that have its segment, at
// most up to `end`. Returns the row after them: found while summing, not in a loop of its own, so
// that a segment costs one mispredicted branch.
template <Reduction kReduction, int64_t kColumns, typename Index>
inline int64_t ReduceRun(const Index* segments, int64_t begin, int64_t end, const float* values,
                         int64_t dim, float* out) {
  const Index segment = segments[begin];
  const float* value = values + begin * dim;
  Columns<kColumns> sum = LoadTerm<kReduction, kColumns>(value);
  int64_t i = begin + 1;
  for (; i < end && segments[i] == segment; ++i) {
    value += dim;
    sum.Add(LoadTerm<kReduction, kColumns>(value));
  }
  Finish<kReduction, kColumns>(sum, i - begin, out);
  return i;
}

inline void ZeroRows(const std::vector<ColumnSink>& sinks, int64_t begin, int64_t end) {
  for (const ColumnSink& sink : sinks) {
    std::fill(sink.data + begin * sink.width, sink.data + end * sink.width, 0.0f);
  }
}

// The rows of `values` that have the segment of row `begin`, summed into that row of every sink.
// Returns the row after them.
template <Reduction kReduction, int64_t kLeading, typename Index>
inline int64_t ReduceOneSegment(const Index* segments, int64_t begin, int64_t end,
                                const float* values, int64_t dim,
                                const std::vector<ColumnSink>& sinks) {
  const int64_t segment = static_cast<int64_t>(segments[begin]);
  const ColumnSink& first = sinks[0];
  float* out = first.data + segment * first.width;
  const int64_t last =
      ReduceRun<kReduction, kLeading>(segments, begin, end, values + first.column, dim, out);
  if (first.width > kLeading) {
    ReduceRows<kReduction>(values, dim, begin, last, first.column + kLeading,
                           first.width - kLeading, out + kLeading);
  }
  for (size_t s = 1; s < sinks.size(); ++s) {
    ReduceRows<kReduction>(values, dim, begin, last, sinks[s].column, sinks[s].width,
                           sinks[s].data + segment * sinks[s].width);
  }
  return last;
}

// Returns false, leaving garbage in the sinks, when segments are not sorted or not in [0, rows):
// looking for that while summing saves a pass over them.
template <Reduction kReduction, int64_t kLeading, typename Index>
bool ReduceSorted(const engine::ParallelRunner& parallel, const Index* segments, int64_t k,
                  int64_t rows, const float* values, int64_t dim,
                  const std::vector<ColumnSink>& sinks) {
  const int64_t tasks = std::max<int64_t>(
      1, std::min(k, parallel.SmallTasksFor(engine::ParallelRunner::Work(k + rows, dim + 8))));
  // Task t takes the values [starts[t], starts[t + 1]) and writes rows [first_rows[t],
  // first_rows[t + 1]). An even cut moves to the end of the segment it falls into.
  std::vector<int64_t> starts(tasks + 1, 0), first_rows(tasks + 1, 0);
  for (int64_t t = 1; t <= tasks; ++t) {
    int64_t& i = starts[t];
    i = std::max(engine::ParallelRunner::Cut(k, tasks, t), starts[t - 1]);
    while (i > 0 && i < k && segments[i] == segments[i - 1]) ++i;
    first_rows[t] = i < k ? static_cast<int64_t>(segments[i]) : rows;
    if (first_rows[t] < first_rows[t - 1] || first_rows[t] > rows) return false;
  }
  std::atomic<bool> sorted{true};
  parallel.RunTasks(tasks, [&](int64_t t) {
    const int64_t end = starts[t + 1], end_row = first_rows[t + 1];
    int64_t row = first_rows[t];
    for (int64_t i = starts[t]; i < end;) {
      const int64_t segment = static_cast<int64_t>(segments[i]);
      if (segment < row || segment >= end_row) {
        sorted = false;
        return;
      }
      if (segment > row) ZeroRows(sinks, row, segment);
      i = ReduceOneSegment<kReduction, kLeading>(segments, i, end, values, dim, sinks);
      row = segment + 1;
    }
    if (row < end_row) ZeroRows(sinks, row, end_row);
  });
  return sorted;
}

template <Reduction kReduction, typename Index>
void ReduceUnsorted(const engine::ParallelRunner& parallel, const Index* segments, int64_t k,
                    int64_t rows, const float* values, int64_t dim,
                    const std::vector<ColumnSink>& sinks) {
  constexpr bool kSquare = kReduction == Reduction::kSquareNorm;
  const int64_t tasks = std::max<int64_t>(
      1, std::min(rows, parallel.TasksFor(engine::ParallelRunner::Work(k + rows, dim + 8))));
  parallel.RunTasks(tasks, [&](int64_t t) {
    const int64_t begin = engine::ParallelRunner::Cut(rows, tasks, t);
    const int64_t end = engine::ParallelRunner::Cut(rows, tasks, t + 1);
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

// Every output row is written, rows without values become 0. Where the result names a bad segment,
// the sinks hold garbage.
template <Reduction kReduction, typename Index>
SegmentCheck ReduceSegments(const engine::ParallelRunner& parallel, const Index* segments,
                            int64_t k, int64_t rows, const float* values, int64_t dim,
                            const std::vector<ColumnSink>& sinks) {
  const auto reduce_sorted = [&](auto leading) {
    return ReduceSorted<kReduction, decltype(leading)::value>(parallel, segments, k, rows, values,
                                                              dim, sinks);
  };
  bool done = false;
  if (!sinks.empty() && sinks[0].width > 0) {
    const int64_t width = sinks[0].width;
    done = width >= 32   ? reduce_sorted(Width<32>())
           : width >= 16 ? reduce_sorted(Width<16>())
           : width >= 4  ? reduce_sorted(Width<4>())
                         : reduce_sorted(Width<1>());
  }
  if (done) return {};
  const SegmentCheck check = CheckSegments(parallel, segments, k, rows);
  // Rows without columns may be more than anybody could count.
  const bool has_columns = std::any_of(sinks.begin(), sinks.end(),
                                       [](const ColumnSink& sink) { return sink.width > 0; });
  if (check.bad < 0 && has_columns) {
    ReduceUnsorted<kReduction>(parallel, segments, k, rows, values, dim, sinks);
  }
  return check;
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
void SumSplits(const engine::ParallelRunner& parallel, const Index* splits, int64_t rows,
               const float* values, int64_t dim, const std::vector<ColumnSink>& sinks) {
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
void BroadcastSegments(const engine::ParallelRunner& parallel, const Index* segments, int64_t k,
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
void SquareNormGradient(const engine::ParallelRunner& parallel, const Index* segments, int64_t k,
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
