// The actions of a user on an item, as numbers; a list of priorities says which of them counts.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ACTIONS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ACTIONS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace monolith {
namespace data {

// Borrowed values in a row.
template <typename T>
struct Span {
  const T* data = nullptr;
  int64_t size = 0;

  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  bool empty() const { return size == 0; }
};

using Actions = Span<int32_t>;

template <typename List, typename T>
bool Contains(const List& list, const T& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Index of the first of `priority` that is among the actions, or -1.
inline int64_t BestAction(const std::vector<int64_t>& priority, Actions actions) {
  for (size_t i = 0; i < priority.size(); ++i) {
    if (Contains(actions, priority[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

// The best action, or the first where none has a priority. There must be one.
inline int64_t BestOrFirst(const std::vector<int64_t>& priority, Actions actions) {
  const int64_t best = BestAction(priority, actions);
  return best >= 0 ? priority[best] : actions.data[0];
}

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ACTIONS_H_
