// Adding gradient rows to the rows they came from, several of which may be the same.
//
// The rows live in a few tensors (one per server); a row is named by (tensor, row) packed into an
// int64. A thread owns a range of all rows, walks over every gradient and adds the ones it owns: no
// locks, and each row is summed in input order whatever the number of threads.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ROW_SCATTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ROW_SCATTER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

namespace monolith {
namespace distribution {

// Name of row `row` of tensor `tensor`. Both stay below 2^31 and 2^32: an id list cannot be longer.
inline int64_t PackRow(int64_t tensor, int64_t row) { return tensor << 32 | row; }
inline int64_t TensorOf(int64_t packed) { return packed >> 32; }
inline int64_t RowOf(int64_t packed) { return packed & 0xffffffff; }

// Writes all tensors completely: zero plus, for every i, row i of grads at targets[i].
// tensors[t] has num_rows[t] rows of `dim` floats; targets are inside.
inline void ScatterAddRows(const engine::ParallelRunner& parallel, const int64_t* targets,
                           int64_t n, const float* grads, int64_t dim,
                           const std::vector<float*>& tensors,
                           const std::vector<int64_t>& num_rows) {
  std::vector<int64_t> first(num_rows.size() + 1, 0);
  for (size_t t = 0; t < num_rows.size(); ++t) first[t + 1] = first[t] + num_rows[t];
  const int64_t total = first.back();
  const int64_t tasks = std::max<int64_t>(
      1, std::min(total, parallel.TasksFor(engine::ParallelRunner::Work(n + total, dim + 4))));
  parallel.RunTasks(tasks, [&](int64_t task) {
    const int64_t begin = engine::ParallelRunner::Cut(total, tasks, task);
    const int64_t end = engine::ParallelRunner::Cut(total, tasks, task + 1);
    for (size_t t = 0; t < num_rows.size(); ++t) {
      const int64_t from = std::max(begin, first[t]) - first[t];
      const int64_t to = std::min(end, first[t + 1]) - first[t];
      if (from < to) std::fill(tensors[t] + from * dim, tensors[t] + to * dim, 0.0f);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t tensor = TensorOf(targets[i]);
      const int64_t row = RowOf(targets[i]);
      const int64_t global = first[tensor] + row;
      if (global < begin || global >= end) continue;
      float* __restrict__ sum = tensors[tensor] + row * dim;
      const float* grad = grads + i * dim;
      for (int64_t j = 0; j < dim; ++j) sum[j] += grad[j];
    }
  });
}

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ROW_SCATTER_H_
