// id -> 64-bit number, for tens of millions of ids: what a writer of a row log has published last.
//
//   high bits of hash(id)       low bits of hash(id)
//        |                            |
//        v                            v
//   +--------+    +------------------------------------------+
//   | part 0 | -> | id, number | 0, 0 | id, number | ...     |  open addressing, linear probing,
//   |  ...   |    +------------------------------------------+  at most 3/4 full
//   +--------+
//
// A number of 0 marks an empty slot: an id with the number 0 is absent. Erasing moves later keys of
// the same run back, so that no marks pile up.
//
// A ConcurrentKeySet gives its ids out in the order of the same bits: who goes through such a set
// walks along the slots of one part after another, instead of jumping about in all of the memory.
// Parts grow one by one, or the first of them would be full while the others wait for their ids.
//
// Not thread-safe.
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
  // Hashes the ids of `table`, as in TableKey.
  explicit IdHashes(const void* table) : salt_(TableSalt(table)), parts_(size_t{1} << kPartBits) {}

  int64_t size() const { return size_; }

  void Clear() {
    for (Part& part : parts_) part = {};
    size_ = 0;
  }

  uint64_t Hash(int64_t id) const { return MixBits(static_cast<uint64_t>(id) ^ salt_); }

  // Brings an id's slot into the cache, and returns its hash.
  uint64_t Fetch(int64_t id) const {
    const uint64_t hash = Hash(id);
    const Part& part = parts_[hash >> (64 - kPartBits)];
    if (!part.slots.empty()) PrefetchForWrite(&part.slots[hash & part.mask()]);
    return hash;
  }

  // Returns the number that `id` had, 0 for none. A `number` of 0 removes it. `hash` is the id's.
  uint64_t Exchange(int64_t id, uint64_t hash, uint64_t number) {
    Part& part = parts_[hash >> (64 - kPartBits)];
    if (number != 0 && 4 * (part.used + 1) > 3 * part.slots.size()) Grow(&part);
    if (part.slots.empty()) return 0;
    uint64_t at = hash & part.mask();
    while (part.slots[at].number != 0 && part.slots[at].id != id) at = (at + 1) & part.mask();
    const uint64_t before = part.slots[at].number;
    if (number != 0) {
      part.used += before == 0;
      size_ += before == 0;
      part.slots[at] = {id, number};
    } else if (before != 0) {
      Remove(&part, at);
    }
    return before;
  }

 private:
  static constexpr int kPartBits = 6;

  struct Slot {
    int64_t id = 0;
    uint64_t number = 0;
  };

  struct Part {
    std::vector<Slot> slots;  // none, or a power of two
    uint64_t used = 0;

    uint64_t mask() const { return slots.size() - 1; }
  };

  void Remove(Part* part, uint64_t hole) {
    std::vector<Slot>& slots = part->slots;
    const uint64_t mask = part->mask();
    for (uint64_t at = (hole + 1) & mask; slots[at].number != 0; at = (at + 1) & mask) {
      // May a key move to the hole? Only if the hole is not before its home.
      if (((at - Hash(slots[at].id)) & mask) < ((at - hole) & mask)) continue;
      slots[hole] = slots[at];
      hole = at;
    }
    slots[hole] = {};
    --part->used;
    --size_;
  }

  void Grow(Part* part) {
    std::vector<Slot> old(part->slots.empty() ? 16 : 2 * part->slots.size());
    old.swap(part->slots);
    for (const Slot& slot : old) {
      if (slot.number == 0) continue;
      uint64_t at = Hash(slot.id) & part->mask();
      while (part->slots[at].number != 0) at = (at + 1) & part->mask();
      part->slots[at] = slot;
    }
  }

  const uint64_t salt_;
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ID_HASHES_H_
