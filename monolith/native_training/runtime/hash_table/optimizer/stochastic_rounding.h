// Unbiased rounding of float32 values to the float16 grid; storage stays float32.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_

#include <cstdint>

namespace monolith {
namespace engine {

// Replaces every element by one of its two float16 neighbours, the upper one with probability (w -
// lower) / (upper - lower). Representable values and NaN stay; magnitudes above 65504 become 65504.
// Random numbers come from a generator per thread, each with its own seed.
void StochasticRoundToHalf(float* values, int64_t n);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_STOCHASTIC_ROUNDING_H_
