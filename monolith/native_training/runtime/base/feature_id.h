// Feature ids: their hashes and their slot bits.
//
//   v2 id   | sign (ignored) | 15-bit slot | 48-bit signature |
//   v1 id   | 10-bit slot | 54-bit signature |
//
//   HashId(id)   63      58 57                       26 25                0
//                | shard   |  place inside the shard   |       unused      |
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_

#include <cstdint>

namespace monolith {
namespace engine {

constexpr int kNumSlots = 32768;

inline int SlotIdV2(int64_t id) {
  return static_cast<int>((static_cast<uint64_t>(id) >> 48) & 0x7fff);
}
inline int SlotIdV1(int64_t id) { return static_cast<int>(static_cast<uint64_t>(id) >> 54); }

// A bijection of 64-bit words. Two multiply-xorshift rounds make ids that differ only in high or
// only in low bits land on independent shards and lines.
struct IdHash {
  uint64_t first, second;  // odd

  uint64_t operator()(int64_t id) const {
    uint64_t x = static_cast<uint64_t>(id);
    x ^= x >> 32;
    x *= first;
    x ^= x >> 32;
    x *= second;
    x ^= x >> 32;
    return x;
  }
};

// The same in every process: saved filters are arrays by this hash.
inline uint64_t MixId(int64_t id) {
  return IdHash{0xd6e8feb86659fd93ull, 0xd6e8feb86659fd93ull}(id);
}

// The hash of tables, drawn once in a process, so that nobody can choose ids that share a line. No
// file depends on it, but for the order of its records. MONOLITH_TABLE_SEED fixes it. Loops keep a
// copy, in registers.
const IdHash& TableHash();

inline uint64_t HashId(int64_t id) { return TableHash()(id); }

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_
