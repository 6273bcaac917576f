// Occurrence filters: may an id that the table does not hold enter it yet?
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_OCCURRENCE_FILTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_OCCURRENCE_FILTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace engine {

struct SlotOccurrenceThreshold {
  uint32_t slot = 0;
  uint32_t threshold = 0;
};

struct OccurrenceThresholdConfig {
  uint32_t default_threshold = 0;
  std::vector<SlotOccurrenceThreshold> slots;
};

// Threshold per slot (v2 bits of the id).
class OccurrenceThresholds {
 public:
  // `max_threshold`: what the filter can count to.
  static Status Create(const OccurrenceThresholdConfig& config, uint32_t max_threshold,
                       OccurrenceThresholds* thresholds) {
    OccurrenceThresholds result;
    result.default_ = config.default_threshold;
    if (config.default_threshold > max_threshold) {
      return TooLarge("default_occurrence_threshold", config.default_threshold, max_threshold);
    }
    if (!config.slots.empty()) result.by_slot_.assign(kMaxSlotsV2, config.default_threshold);
    for (const SlotOccurrenceThreshold& slot : config.slots) {
      if (slot.slot >= kMaxSlotsV2) {
        return Status::InvalidArgument("slot_occurrence_thresholds has slot " +
                                       std::to_string(slot.slot) + ", want less than " +
                                       std::to_string(kMaxSlotsV2));
      }
      if (slot.threshold > max_threshold) {
        return TooLarge("occurrence_threshold", slot.threshold, max_threshold);
      }
      result.by_slot_[slot.slot] = slot.threshold;
    }
    *thresholds = std::move(result);
    return Status::Ok();
  }

  uint32_t Of(int64_t id) const { return by_slot_.empty() ? default_ : by_slot_[SlotOfV2(id)]; }

 private:
  static Status TooLarge(const char* name, uint32_t value, uint32_t max) {
    return Status::InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                                   ", but this filter counts to " + std::to_string(max));
  }

  uint32_t default_ = 0;
  std::vector<uint32_t> by_slot_;  // empty: every slot has the default
};

// Thread-safe. One call handles a batch; occurrences count as if offered one by one, in order.
class OccurrenceFilter {
 public:
  virtual ~OccurrenceFilter() = default;

  // filtered[i] = 1 where ids[i], seen counts[i] more times, must be dropped. `counts` null means 1
  // each. `for_table`: the ids are known to be absent from a table that asks; false for a gradient
  // interceptor.
  virtual void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool for_table,
                      uint8_t* filtered) = 0;

  // The same with one threshold for all ids, whatever their slot, which are counted apart from
  // equal ids of another `salt`.
  virtual void FilterWith(uint32_t /*threshold*/, uint64_t /*salt*/, const int64_t* ids,
                          const uint32_t* counts, int64_t n, bool for_table, uint8_t* filtered) {
    Filter(ids, counts, n, for_table, filtered);
  }

  // The largest threshold that FilterWith knows.
  virtual uint32_t MaxThreshold() const { return 0xffffffffu; }

  // True if Filter never drops anything, so that callers may skip it.
  virtual bool NeverFilters() const { return false; }
};

// Shows one table its part of a filter that several share: its own threshold and counts.
class TableFilter : public OccurrenceFilter {
 public:
  // `shared` must outlive this object.
  static Status Create(OccurrenceFilter* shared, uint32_t threshold, uint64_t salt,
                       std::unique_ptr<TableFilter>* filter) {
    if (threshold > shared->MaxThreshold()) {
      return Status::InvalidArgument("occurrence_threshold is " + std::to_string(threshold) +
                                     ", but this filter counts to " +
                                     std::to_string(shared->MaxThreshold()));
    }
    filter->reset(new TableFilter(shared, threshold, salt));
    return Status::Ok();
  }

  void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool for_table,
              uint8_t* filtered) override {
    shared_->FilterWith(threshold_, salt_, ids, counts, n, for_table, filtered);
  }
  bool NeverFilters() const override { return threshold_ == 0 || shared_->NeverFilters(); }

 private:
  TableFilter(OccurrenceFilter* shared, uint32_t threshold, uint64_t salt)
      : shared_(shared), threshold_(threshold), salt_(salt) {}

  OccurrenceFilter* const shared_;
  const uint32_t threshold_;
  const uint64_t salt_;
};

class DummyFilter : public OccurrenceFilter {
 public:
  void Filter(const int64_t* /*ids*/, const uint32_t* /*counts*/, int64_t n, bool /*for_table*/,
              uint8_t* filtered) override {
    for (int64_t i = 0; i < n; ++i) filtered[i] = 0;
  }
  bool NeverFilters() const override { return true; }
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_OCCURRENCE_FILTER_H_
