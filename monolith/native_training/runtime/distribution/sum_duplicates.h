// Adds up the rows of equal ids, such as the gradients of a batch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/distribution/id_index.h"

namespace monolith {
namespace distribution {

// The distinct ids of what was added, in order of first appearance: for each the sum of its rows in
// order of appearance, and how often it came. Memory is kept for the next use.
class SumsById {
 public:
  // Forgets everything. At most `max_ids` ids follow, with rows of `dim` floats.
  void Clear(int64_t max_ids, int64_t dim) {
    // A batch repeats its ids: a table for every occurrence would mostly stay empty.
    index_.Clear(max_ids / 4);
    dim_ = dim;
    // Each for itself: one may fail after another has grown.
    GrowTo(max_ids, &ids_);
    GrowTo(max_ids, &counts_);
    GrowTo(max_ids * dim, &sums_);
  }

  // Adds n ids: the k-th is ids[position(k)], its row the one of that number in `rows`, which
  // begins `stride` floats after the one before it.
  template <typename Position>
  void Add(const int64_t* ids, const float* rows, int64_t stride, int64_t n,
           const Position& position) {
    constexpr int64_t kAhead = 16;
    const int64_t dim = dim_;
    ForEachHashed(
        index_, 0, n, [&](int64_t k) { return ids[position(k)]; },
        [&](int64_t k, int64_t id, uint64_t hash) {
          if (k + kAhead < n) engine::PrefetchForRead(rows + position(k + kAhead) * stride);
          const float* __restrict row = rows + position(k) * stride;
          const int64_t next = index_.size();
          const int64_t number = index_.FindOrInsert(id, hash, next);
          float* __restrict sum = sums_.data() + number * dim;
          if (number == next) {
            ids_[number] = id;
            counts_[number] = 1;
            std::memcpy(sum, row, dim * sizeof(float));
          } else {
            ++counts_[number];
            for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
          }
        });
  }

  int64_t size() const { return index_.size(); }
  const int64_t* ids() const { return ids_.data(); }
  const uint32_t* counts() const { return counts_.data(); }
  const float* sums() const { return sums_.data(); }

 private:
  template <typename T>
  static void GrowTo(int64_t size, std::vector<T>* vector) {
    if (static_cast<int64_t>(vector->size()) < size) vector->resize(size);
  }

  IdIndex index_{0};
  int64_t dim_ = 0;
  std::vector<int64_t> ids_;
  std::vector<uint32_t> counts_;
  std::vector<float> sums_;
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_
