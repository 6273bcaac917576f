// id -> 64-bit number, for tens of millions of ids: what a writer of a row log has published last.
//
//   slots: | id, number | 0, 0 | id, number | ...   open addressing, linear probing, at most 3/4
//   full
//
// A number of 0 marks an empty slot: an id with the number 0 is absent. Erasing moves later keys of
// the same run back, so that no marks pile up. Not thread-safe.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ID_HASHES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ID_HASHES_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace engine {

class IdHashes {
 public:
  int64_t size() const { return size_; }

  void Clear() {
    slots_.clear();
    size_ = 0;
  }

  // Brings an id's slot into the cache.
  void Fetch(int64_t id) const {
    if (!slots_.empty()) PrefetchForWrite(&slots_[Home(id)]);
  }

  // Returns the number that `id` had, 0 for none. A `number` of 0 removes it.
  uint64_t Exchange(int64_t id, uint64_t number) {
    if (number != 0 && 4 * (size_ + 1) > 3 * static_cast<int64_t>(slots_.size())) Grow();
    if (slots_.empty()) return 0;
    uint64_t at = Home(id);
    while (slots_[at].number != 0 && slots_[at].id != id) at = Next(at);
    const uint64_t before = slots_[at].number;
    if (number != 0) {
      size_ += before == 0;
      slots_[at] = {id, number};
    } else if (before != 0) {
      Remove(at);
    }
    return before;
  }

 private:
  struct Slot {
    int64_t id = 0;
    uint64_t number = 0;
  };

  uint64_t Home(int64_t id) const {
    return MixBits(static_cast<uint64_t>(id)) & (slots_.size() - 1);
  }
  uint64_t Next(uint64_t at) const { return (at + 1) & (slots_.size() - 1); }

  void Remove(uint64_t hole) {
    for (uint64_t at = Next(hole); slots_[at].number != 0; at = Next(at)) {
      // May a key move to the hole? Only if the hole is not before its home.
      const uint64_t mask = slots_.size() - 1;
      if (((at - Home(slots_[at].id)) & mask) < ((at - hole) & mask)) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole] = {};
    --size_;
  }

  void Grow() {
    std::vector<Slot> old(slots_.empty() ? 16 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.number == 0) continue;
      uint64_t at = Home(slot.id);
      while (slots_[at].number != 0) at = Next(at);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;  // none, or a power of two
  int64_t size_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ID_HASHES_H_
