// Where each element of a batch goes when the batch is split by shard, order kept: one pass counts,
// one pass fills. Both run in blocks, a block per thread, and the result does not depend on the
// number of blocks.
//
//   PartitionPlan plan;
//   plan.Build(parallel, shards, n, num_shards);      // plan.bad() >= 0: shards[bad] is out of
//   range plan.ForEach(parallel, [&](int64_t i, int64_t shard, int64_t position) {
//     out[shard][position] = in[i];
//   });
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARTITION_PLAN_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARTITION_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"

namespace monolith {
namespace distribution {

template <typename Index>
class PartitionPlan {
 public:
  // `shards` must outlive the plan.
  void Build(const engine::ParallelRunner& parallel, const Index* shards, int64_t n,
             int64_t num_shards) {
    shards_ = shards;
    n_ = n;
    num_shards_ = num_shards;
    blocks_ = std::max<int64_t>(1, std::min(n, parallel.TasksFor(n * 4)));
    starts_.assign(blocks_ * num_shards, 0);
    std::vector<int64_t> bad(blocks_, n);
    parallel.RunTasks(blocks_, [&](int64_t block) {
      // Counted apart from the others' so that threads do not share cache lines.
      std::vector<int64_t> counts(num_shards, 0);
      for (int64_t i = Begin(block), end = Begin(block + 1); i < end; ++i) {
        const int64_t shard = static_cast<int64_t>(shards[i]);
        if (shard < 0 || shard >= num_shards) {
          bad[block] = i;
          return;
        }
        ++counts[shard];
      }
      std::copy(counts.begin(), counts.end(), starts_.begin() + block * num_shards);
    });
    const int64_t first_bad = *std::min_element(bad.begin(), bad.end());
    bad_ = first_bad < n ? first_bad : -1;

    counts_.assign(num_shards, 0);
    for (int64_t block = 0; block < blocks_; ++block) {
      for (int64_t shard = 0; shard < num_shards; ++shard) {
        int64_t& start = starts_[block * num_shards + shard];
        const int64_t count = start;
        start = counts_[shard];
        counts_[shard] += count;
      }
    }
  }

  // Index of the first element whose shard is out of range, or -1.
  int64_t bad() const { return bad_; }

  const std::vector<int64_t>& counts() const { return counts_; }

  // Calls fn(element, shard, position inside the shard) in order, per block.
  template <typename Fn>
  void ForEach(const engine::ParallelRunner& parallel, const Fn& fn) const {
    parallel.RunTasks(blocks_, [&](int64_t block) {
      std::vector<int64_t> next(starts_.begin() + block * num_shards_,
                                starts_.begin() + (block + 1) * num_shards_);
      for (int64_t i = Begin(block), end = Begin(block + 1); i < end; ++i) {
        const int64_t shard = static_cast<int64_t>(shards_[i]);
        fn(i, shard, next[shard]++);
      }
    });
  }

  // parts[s] receives the rows of `input` that belong to shard s. Rows have `width` elements.
  template <typename T>
  void Split(const engine::ParallelRunner& parallel, const T* input, int64_t width,
             const std::vector<T*>& parts) const {
    Walk(parallel, width, input, parts,
         [](const T* row, T* part_row, int64_t n) { std::memcpy(part_row, row, n * sizeof(T)); });
  }

  // The inverse of Split.
  template <typename T>
  void Merge(const engine::ParallelRunner& parallel, const std::vector<const T*>& parts,
             int64_t width, T* output) const {
    Walk(parallel, width, output, parts,
         [](T* row, const T* part_row, int64_t n) { std::memcpy(row, part_row, n * sizeof(T)); });
  }

 private:
  // copy(row of whole, row of its part, width) for all rows. A pointer per part moves along; widths
  // known to the compiler make the copy a few instructions.
  template <typename Whole, typename Part, typename Copy>
  void Walk(const engine::ParallelRunner& parallel, int64_t width, Whole* whole,
            const std::vector<Part*>& parts, const Copy& copy) const {
    switch (width) {
      case 1:
        return WalkRows(parallel, std::integral_constant<int64_t, 1>(), whole, parts, copy);
      case 4:
        return WalkRows(parallel, std::integral_constant<int64_t, 4>(), whole, parts, copy);
      case 8:
        return WalkRows(parallel, std::integral_constant<int64_t, 8>(), whole, parts, copy);
      case 16:
        return WalkRows(parallel, std::integral_constant<int64_t, 16>(), whole, parts, copy);
      default:
        return WalkRows(parallel, width, whole, parts, copy);
    }
  }

  template <typename Width, typename Whole, typename Part, typename Copy>
  void WalkRows(const engine::ParallelRunner& parallel, Width width, Whole* whole,
                const std::vector<Part*>& parts, const Copy& copy) const {
    parallel.RunTasks(blocks_, [&](int64_t block) {
      std::vector<Part*> next(num_shards_);
      for (int64_t s = 0; s < num_shards_; ++s) {
        next[s] = parts[s] + starts_[block * num_shards_ + s] * width;
      }
      Part** cursor = next.data();
      const int64_t end = Begin(block + 1);
      for (int64_t i = Begin(block); i < end; ++i) {
        Part*& part = cursor[shards_[i]];
        copy(whole + i * width, part, width);
        part += width;
      }
    });
  }

  int64_t Begin(int64_t block) const { return engine::ParallelRunner::Cut(n_, blocks_, block); }

  const Index* shards_ = nullptr;
  int64_t n_ = 0;
  int64_t num_shards_ = 0;
  int64_t blocks_ = 1;
  int64_t bad_ = -1;
  std::vector<int64_t> starts_;  // [blocks, num_shards]
  std::vector<int64_t> counts_;
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_PARTITION_PLAN_H_
