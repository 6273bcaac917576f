#include "monolith/native_training/runtime/base/feature_id.h"

#include <cstdlib>
#include <random>

#include "monolith/native_training/runtime/base/random_bits.h"

namespace monolith {
namespace engine {
namespace {

IdHash DrawHash() {
  const char* value = std::getenv("MONOLITH_TABLE_SEED");
  uint64_t seed;
  if (value != nullptr && value[0] != '\0') {
    seed = std::strtoull(value, nullptr, 10);
  } else {
    std::random_device device;
    seed = (uint64_t{device()} << 32) ^ device();
  }
  return {SplitMix64(seed + kGoldenRatio64) | 1, SplitMix64(seed + 2 * kGoldenRatio64) | 1};
}

}  // namespace

const IdHash& TableHash() {
  static const IdHash hash = DrawHash();
  return hash;
}

}  // namespace engine
}  // namespace monolith
