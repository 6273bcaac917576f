// A flat map from id to value for the length of one call.
//
//   slots   | id | value + 1 | id | value + 1 | ...     power of two, at most half full; 0 is empty
//
// Linear probing from the high bits of a hash that is drawn once in a process, so that ids that
// collide cannot be chosen: one cache line per id in the common case, nothing to delete, and empty
// slots are zero, so that fresh memory needs no filling. Ids are handled in groups: all of a group
// are hashed and their slots fetched before the first one is looked at.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_INDEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_INDEX_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/base/random_bits.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace distribution {

// Not thread-safe, except for concurrent Find.
class IdIndex {
 public:
  static constexpr int64_t kMissing = -1;

  // Room for about `expected_ids` distinct ids before the first growth.
  explicit IdIndex(int64_t expected_ids) { Allocate(BitsFor(expected_ids)); }

  // Forgets all ids and makes room for `expected_ids`. Keeps memory that is not much too large, so
  // that a map which is used again and again does not grow each time.
  void Clear(int64_t expected_ids) {
    const int wanted = BitsFor(expected_ids), bits = 64 - shift_;
    if (bits < wanted || bits > wanted + 3) {
      Allocate(wanted);
    } else {
      std::memset(slots_.get(), 0, (mask_ + 1) * sizeof(Slot));
    }
    size_ = 0;
  }

  // Number of ids.
  int64_t size() const { return size_; }

  // Value of `id`, after storing `value` (>= 0) if the id is new. `hash` is Hash(id).
  int64_t FindOrInsert(int64_t id, uint64_t hash, int64_t value) {
    for (uint64_t i = hash >> shift_;; i = (i + 1) & mask_) {
      Slot& slot = slots_[i];
      if (slot.value_plus_1 == 0) {
        slot = {id, value + 1};
        if (2 * ++size_ > static_cast<int64_t>(mask_)) Grow();
        return value;
      }
      if (slot.id == id) return slot.value_plus_1 - 1;
    }
  }

  // Value of `id`, or kMissing.
  int64_t Find(int64_t id, uint64_t hash) const {
    for (uint64_t i = hash >> shift_;; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (slot.value_plus_1 == 0) return kMissing;
      if (slot.id == id) return slot.value_plus_1 - 1;
    }
  }

  void Prefetch(uint64_t hash) const { engine::PrefetchForRead(&slots_[hash >> shift_]); }

  // Not the hash of tables itself: ids of one shard of a table have its high bits in common.
  uint64_t Hash(int64_t id) const { return hash_(id) * engine::kGoldenRatio64; }

 private:
  struct Slot {
    int64_t id;
    int64_t value_plus_1;
  };
  struct Free {
    void operator()(Slot* slots) const { std::free(slots); }
  };

  static int BitsFor(int64_t expected_ids) {
    int bits = 6;
    while ((int64_t{1} << bits) < 2 * expected_ids) ++bits;
    return bits;
  }

  // Returns the slots of before.
  std::unique_ptr<Slot[], Free> Allocate(int bits) {
    std::unique_ptr<Slot[], Free> slots(
        static_cast<Slot*>(std::calloc(size_t{1} << bits, sizeof(Slot))));
    if (slots == nullptr) throw std::bad_alloc();
    slots_.swap(slots);
    mask_ = (uint64_t{1} << bits) - 1;
    shift_ = 64 - bits;
    return slots;
  }

  void Grow() {
    const uint64_t old_mask = mask_;
    const std::unique_ptr<Slot[], Free> old = Allocate(64 - shift_ + 1);
    for (uint64_t o = 0; o <= old_mask; ++o) {
      if (old[o].value_plus_1 == 0) continue;
      uint64_t i = Hash(old[o].id) >> shift_;
      while (slots_[i].value_plus_1 != 0) i = (i + 1) & mask_;
      slots_[i] = old[o];
    }
  }

  engine::IdHash hash_ = engine::TableHash();
  std::unique_ptr<Slot[], Free> slots_;
  uint64_t mask_ = 0;
  int shift_ = 0;
  int64_t size_ = 0;
};

// Calls visit(i, id, hash) for i in [begin, end) with id = key(i), slots of `index` fetched ahead.
template <typename Key, typename Visit>
void ForEachHashed(const IdIndex& index, int64_t begin, int64_t end, const Key& key,
                   const Visit& visit) {
  constexpr int64_t kGroup = 32;
  uint64_t hashes[kGroup];
  for (int64_t start = begin; start < end; start += kGroup) {
    const int64_t count = std::min(kGroup, end - start);
    for (int64_t j = 0; j < count; ++j) {
      hashes[j] = index.Hash(key(start + j));
      index.Prefetch(hashes[j]);
    }
    for (int64_t j = 0; j < count; ++j) visit(start + j, key(start + j), hashes[j]);
  }
}

// Numbers the distinct keys of 0 ... n - 1 in order of first appearance: calls
// visit(i, key(i), number, is_new). Returns how many there are.
template <typename Key, typename Visit>
int64_t NumberIds(int64_t n, const Key& key, const Visit& visit) {
  // Ids of a batch repeat, so most of this stays empty, and is never touched. To grow costs more:
  // where half of the ids are distinct, numbering them took twice as long from a quarter of it.
  IdIndex index(n);
  ForEachHashed(index, 0, n, key, [&](int64_t i, int64_t id, uint64_t hash) {
    const int64_t next = index.size();
    const int64_t number = index.FindOrInsert(id, hash, next);
    visit(i, id, number, number == next);
  });
  return index.size();
}

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_INDEX_H_
