#include "monolith/native_training/runtime/hash_table/optimizer/stochastic_rounding.h"

#include <atomic>

#include "monolith/native_training/runtime/base/random_bits.h"

namespace monolith {
namespace engine {
namespace {

float UniformDraw() {
  static std::atomic<uint64_t> threads{0};
  thread_local uint64_t state = SplitMix64(threads.fetch_add(1, std::memory_order_relaxed) + 1);
  state += kGoldenRatio64;
  return UniformFloat(SplitMix64(state));
}

}  // namespace

void StochasticRoundToHalf(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = RoundToHalf(values[i], UniformDraw());
}

}  // namespace engine
}  // namespace monolith
