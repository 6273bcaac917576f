// Adds up the rows of equal ids, such as the gradients of a batch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_

#include <cstdint>
#include <cstring>

#include "monolith/native_training/runtime/distribution/id_index.h"

namespace monolith {
namespace distribution {

// Writes the distinct ids in order of first appearance, and for each the sum of its rows of `dim`
// floats in order of appearance. The results need room for n ids. Returns how many there are.
//
// For a filter that counts occurrences an id that comes several times has then come once, as it has
// where ids are made distinct before they travel to a server. OptimizeOptions::dedup counts all.
inline int64_t SumDuplicates(const int64_t* ids, const float* rows, int64_t n, int64_t dim,
                             int64_t* unique_ids, float* sums) {
  return NumberIds(
      n, [ids](int64_t i) { return ids[i]; },
      [&](int64_t i, int64_t id, int64_t number, bool is_new) {
        const float* __restrict row = rows + i * dim;
        float* __restrict sum = sums + number * dim;
        if (is_new) {
          unique_ids[number] = id;
          std::memcpy(sum, row, dim * sizeof(float));
        } else {
          for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
        }
      });
}

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SUM_DUPLICATES_H_
