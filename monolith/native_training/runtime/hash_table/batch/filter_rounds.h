// Asks a filter about the ids of a batch, all of them at once, as if it were asked id by id.
//
// An id that comes several times is offered until it gets in; later occurrences are then those of a
// row that is there, and the filter does not count them. So the first occurrences of all ids are
// offered together, then the second ones of those that were dropped, and so on: as many calls as an
// id that is dropped comes at most.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_FILTER_ROUNDS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_FILTER_ROUNDS_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"

namespace monolith {
namespace engine {

// Memory is reused from batch to batch. Used by one thread.
class FilterRounds {
 public:
  // For ids number 0 to n - 1 of a batch.
  void Clear(int64_t n) {
    dropped_.assign(n, 0);
    next_.assign(n, kNone);
    size_t buckets = 16;
    while (buckets < static_cast<size_t>(2 * n)) buckets *= 2;
    buckets_.assign(buckets, kNone);
    chains_.clear();
  }

  // Number i is `key`, which has a row before the batch begins or has none. Numbers ascend; ids
  // that are not added pass.
  void Add(int64_t i, int64_t key, uint64_t hash, bool present) {
    const uint32_t number = static_cast<uint32_t>(i);
    size_t at = hash & (buckets_.size() - 1);
    while (buckets_[at] != kNone && chains_[buckets_[at]].key != key) {
      at = (at + 1) & (buckets_.size() - 1);
    }
    if (buckets_[at] == kNone) {
      buckets_[at] = static_cast<uint32_t>(chains_.size());
      chains_.push_back({key, number, number, present});
      return;
    }
    Chain* const chain = &chains_[buckets_[at]];
    next_[chain->last] = number;
    chain->last = number;
  }

  // Returns one flag for each number, 1 where the id is dropped. count(i) is how often number i
  // counts; erases(i): it takes the id's row away, or makes none, and is not offered.
  template <typename Count, typename Erases>
  const uint8_t* Ask(OccurrenceFilter* filter, const Count& count, const Erases& erases) {
    while (true) {
      ids_.clear();
      counts_.clear();
      size_t kept = 0;
      for (Chain chain : chains_) {
        for (; chain.at != kNone; chain.at = next_[chain.at]) {
          if (erases(chain.at)) {
            chain.present = false;
          } else if (!chain.present) {
            break;
          }
        }
        if (chain.at == kNone) continue;
        ids_.push_back(chain.key);
        counts_.push_back(count(chain.at));
        chains_[kept++] = chain;
      }
      chains_.resize(kept);
      if (kept == 0) return dropped_.data();
      answers_.resize(kept);
      filter->Filter(ids_.data(), counts_.data(), static_cast<int64_t>(kept), true,
                     answers_.data());
      for (size_t k = 0; k < kept; ++k) {
        Chain* const chain = &chains_[k];
        dropped_[chain->at] = answers_[k];
        chain->present = answers_[k] == 0;
        chain->at = next_[chain->at];
      }
    }
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;

  // The occurrences of one id.
  struct Chain {
    int64_t key;
    uint32_t at;  // the next one to look at
    uint32_t last;
    bool present;  // before it
  };

  std::vector<uint8_t> dropped_;
  std::vector<uint32_t> next_;     // occurrence of the same id
  std::vector<uint32_t> buckets_;  // open addressing: numbers of chains
  std::vector<Chain> chains_;      // those of Ask are still to be looked at
  std::vector<int64_t> ids_;
  std::vector<uint32_t> counts_;
  std::vector<uint8_t> answers_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_FILTER_ROUNDS_H_
