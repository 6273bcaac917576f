// Feature ids: their mixer and their slot bits.
//
//   v2 id   | sign (ignored) | 15-bit slot | 48-bit signature |
//   v1 id   | 10-bit slot | 54-bit signature |
//
//   MixId(id)   63      58 57                32 31                       0
//               | shard   |    filter only     |  line inside the shard  |
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FEATURE_ID_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FEATURE_ID_H_

#include <cstdint>

namespace monolith {
namespace engine {

constexpr int kNumSlots = 32768;

inline int SlotIdV2(int64_t id) {
  return static_cast<int>((static_cast<uint64_t>(id) >> 48) & 0x7fff);
}
inline int SlotIdV1(int64_t id) { return static_cast<int>(static_cast<uint64_t>(id) >> 54); }

// A bijection of 64-bit words without a seed, so files and behaviour are reproducible. Two
// multiply-xorshift rounds make ids that differ only in high or only in low bits land on
// independent shards and lines.
inline uint64_t MixId(int64_t id) {
  uint64_t x = static_cast<uint64_t>(id);
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return x;
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FEATURE_ID_H_
