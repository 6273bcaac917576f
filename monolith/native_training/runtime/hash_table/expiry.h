// When a row is too old. Times are seconds; limits are days per slot (v2 bits of the id).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EXPIRY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EXPIRY_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/hash_table/table_config.h"

namespace monolith {
namespace engine {

// Rows have 32 bits for the time of their last write.
inline uint32_t ClampTimestamp(int64_t seconds) {
  return static_cast<uint32_t>(
      std::clamp<int64_t>(seconds, 0, std::numeric_limits<uint32_t>::max()));
}

class ExpiryPolicy {
 public:
  static Status Create(const ExpiryConfig& config, ExpiryPolicy* policy) {
    ExpiryPolicy result;
    result.default_seconds_ = int64_t{config.default_days} * kSecondsPerDay;
    if (!config.slots.empty()) result.slot_seconds_.assign(kMaxSlotsV2, result.default_seconds_);
    for (const SlotExpireTime& slot : config.slots) {
      if (slot.slot >= kMaxSlotsV2) {
        return Status::InvalidArgument("slot_expire_times has slot " + std::to_string(slot.slot) +
                                       ", want less than " + std::to_string(kMaxSlotsV2));
      }
      result.slot_seconds_[slot.slot] = int64_t{slot.days} * kSecondsPerDay;
    }
    *policy = std::move(result);
    return Status::Ok();
  }

  // `newest` is the table's MaxUpdateTs(). An expire time of 0 days expires every row.
  bool IsExpired(int64_t id, uint32_t last_update, int64_t newest) const {
    const int64_t limit = slot_seconds_.empty() ? default_seconds_ : slot_seconds_[SlotOfV2(id)];
    return newest - int64_t{last_update} >= limit;
  }

  // Limits in seconds: one for every slot, or none where all have the default.
  const std::vector<int64_t>& slot_seconds() const { return slot_seconds_; }
  int64_t default_seconds() const { return default_seconds_; }

 private:
  static constexpr int64_t kSecondsPerDay = 86400;
  int64_t default_seconds_ = int64_t{36500} * kSecondsPerDay;
  std::vector<int64_t> slot_seconds_;  // empty: every slot has the default
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_EXPIRY_H_
