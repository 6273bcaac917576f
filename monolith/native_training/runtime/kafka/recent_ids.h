// Finds samples that come again: keeps the ids of the latest ones in a table with open addressing.
//
//   id -> slot: | id | number of its last sample |
//
// An id counts as long as its last sample is among the latest. Slots of older ones stay until
// the table is half full and is made anew, so nothing is ever removed one by one, and an id costs
// one place in memory.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RECENT_IDS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RECENT_IDS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace monolith {
namespace kafka {

// Not thread-safe.
class RecentIds {
 public:
  // Among how many of the last ids a repeated one is found.
  explicit RecentIds(int64_t limit) : limit_(limit) {}

  // Returns whether the id, which must be a good hash, is not among the last ones, and adds it to
  // them.
  bool Add(uint64_t id) {
    if (2 * (used_ + 1) > slots_.size()) Rebuild();
    ++count_;
    Slot& slot = Find(id);
    const bool is_new = slot.number == 0 || count_ - slot.number > limit_;
    used_ += slot.number == 0;
    slot = {id, count_};
    return is_new;
  }

  // Slots that are there, for tests.
  size_t capacity() const { return slots_.size(); }

 private:
  struct Slot {
    uint64_t id = 0;
    int64_t number = 0;  // from 1 on; 0: the slot is free
  };

  static constexpr size_t kMinSlots = 1024;

  // Returns the slot of the id, or the free one where it belongs.
  Slot& Find(uint64_t id) {
    const size_t mask = slots_.size() - 1;
    size_t at = static_cast<size_t>(id) & mask;
    while (slots_[at].number != 0 && slots_[at].id != id) at = (at + 1) & mask;
    return slots_[at];
  }

  // Keeps what the next id may repeat, with room for at least as many again.
  void Rebuild() {
    const auto counts = [this](const Slot& slot) {
      return slot.number != 0 && count_ - slot.number < limit_;
    };
    size_t live = 0;
    for (const Slot& slot : slots_) live += counts(slot);
    size_t size = kMinSlots;
    while (size < 4 * live) size *= 2;
    std::vector<Slot> old(size);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (counts(slot)) Find(slot.id) = slot;
    }
    used_ = live;
  }

  const int64_t limit_;
  std::vector<Slot> slots_;  // none, or a power of two
  size_t used_ = 0;
  int64_t count_ = 0;  // of ids so far
};

}  // namespace kafka
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RECENT_IDS_H_
