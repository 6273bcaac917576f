// Checks of what ops on several tables say about them; kernels on a CPU and on a GPU share them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_PLACES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_PLACES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Fails with InvalidArgument if `values`, the argument called `name`, has a value twice. `what`
// says what a value stands for, as the message names it.
template <typename T>
Status CheckEachOnce(const char* name, const char* what, std::vector<T> values) {
  std::sort(values.begin(), values.end());
  const auto twice = std::adjacent_find(values.begin(), values.end());
  if (twice == values.end()) return OkStatus();
  return errors::InvalidArgument(name, " has ", *twice, " twice, want every ", what, " once");
}

// Fails with InvalidArgument unless `tables` has, for each input, a place in a group of that size.
inline Status CheckTablePlaces(const std::vector<int64_t>& tables, int num_inputs,
                               int64_t group_size) {
  if (static_cast<int64_t>(tables.size()) != num_inputs) {
    return errors::InvalidArgument("tables has ", tables.size(), " elements, want ", num_inputs,
                                   ", one per input");
  }
  for (const int64_t place : tables) {
    if (place < 0 || place >= group_size) {
      return errors::InvalidArgument("tables has ", place, ", want a value in [0, ", group_size,
                                     ")");
    }
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_TABLES_TABLE_PLACES_H_
