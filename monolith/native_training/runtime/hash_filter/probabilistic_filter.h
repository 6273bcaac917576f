// Lets an absent id in with a probability; remembers nothing.
//
//   unequal  P = min(1, count / T)
//   equal    P = 1 - (1 - p)^count, p = 1 - 0.05^(1/T): 0.95 after T occurrences
//   T = 0    always in
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_PROBABILISTIC_FILTER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_PROBABILISTIC_FILTER_H_

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>

#include "monolith/native_training/runtime/base/host_device.h"
#include "monolith/native_training/runtime/hash_filter/occurrence_filter.h"

namespace monolith {
namespace engine {

// That probability.
MONOLITH_HOST_DEVICE inline double InsertProbability(bool equal_probability, uint32_t threshold,
                                                     uint32_t count) {
  if (threshold == 0) return 1.0;
  const double share = static_cast<double>(count) / threshold;
  if (!equal_probability) return share < 1.0 ? share : 1.0;
  // (1 - p)^count with 1 - p = 0.05^(1 / T)
  return 1.0 - pow(0.05, share);
}

// The draw of 64 random bits: in [0, 1).
MONOLITH_HOST_DEVICE inline double UniformDouble(uint64_t bits) {
  return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
}

// Thread-safe: draws are numbered by an atomic counter, taken once per batch.
class ProbabilisticFilter : public OccurrenceFilter {
 public:
  static Status Create(bool equal_probability, const OccurrenceThresholdConfig& thresholds,
                       std::unique_ptr<ProbabilisticFilter>* filter);

  // Without a table (gradient interceptors) nothing is filtered.
  void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool for_table,
              uint8_t* filtered) override;

  void FilterWith(uint32_t threshold, uint64_t salt, const int64_t* ids, const uint32_t* counts,
                  int64_t n, bool for_table, uint8_t* filtered) override;

  double InsertProbability(uint32_t threshold, uint32_t count) const {
    return engine::InsertProbability(equal_probability_, threshold, count);
  }

 private:
  template <typename Threshold>
  void Draw(const Threshold& threshold_of, const uint32_t* counts, int64_t n, bool for_table,
            uint8_t* filtered);

  ProbabilisticFilter(bool equal_probability, OccurrenceThresholds thresholds, uint64_t seed);

  const bool equal_probability_;
  const OccurrenceThresholds thresholds_;
  const uint64_t seed_;
  std::atomic<uint64_t> draws_{0};
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_FILTER_PROBABILISTIC_FILTER_H_
