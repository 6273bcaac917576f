#include "monolith/native_training/runtime/hash_filter/probabilistic_filter.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "monolith/native_training/runtime/base/random_bits.h"

namespace monolith {
namespace engine {

Status ProbabilisticFilter::Create(bool equal_probability, const OccurrenceThresholdConfig& config,
                                   std::unique_ptr<ProbabilisticFilter>* filter) {
  OccurrenceThresholds thresholds;
  Status status =
      OccurrenceThresholds::Create(config, std::numeric_limits<uint32_t>::max(), &thresholds);
  if (!status.ok()) return status;
  std::random_device device;
  const uint64_t seed = (uint64_t{device()} << 32) ^ device();
  filter->reset(new ProbabilisticFilter(equal_probability, std::move(thresholds), seed));
  return Status::Ok();
}

ProbabilisticFilter::ProbabilisticFilter(bool equal_probability, OccurrenceThresholds thresholds,
                                         uint64_t seed)
    : equal_probability_(equal_probability), thresholds_(std::move(thresholds)), seed_(seed) {}

void ProbabilisticFilter::Filter(const int64_t* ids, const uint32_t* counts, int64_t n,
                                 bool for_table, uint8_t* filtered) {
  Draw([this, ids](int64_t i) { return thresholds_.Of(ids[i]); }, counts, n, for_table, filtered);
}

void ProbabilisticFilter::FilterWith(uint32_t threshold, uint64_t /*salt*/, const int64_t* /*ids*/,
                                     const uint32_t* counts, int64_t n, bool for_table,
                                     uint8_t* filtered) {
  Draw([threshold](int64_t) { return threshold; }, counts, n, for_table, filtered);
}

template <typename Threshold>
void ProbabilisticFilter::Draw(const Threshold& threshold_of, const uint32_t* counts, int64_t n,
                               bool for_table, uint8_t* filtered) {
  if (!for_table) {
    std::fill(filtered, filtered + n, uint8_t{0});
    return;
  }
  const uint64_t first = draws_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
  for (int64_t i = 0; i < n; ++i) {
    const double p = InsertProbability(threshold_of(i), counts == nullptr ? 1 : counts[i]);
    const uint64_t bits = SplitMix64(seed_ + (first + i) * kGoldenRatio64);
    filtered[i] = UniformDouble(bits) < p ? 0 : 1;
  }
}

}  // namespace engine
}  // namespace monolith
