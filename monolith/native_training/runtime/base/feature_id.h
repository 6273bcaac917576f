// Feature ids ("fids"): slot in the high bits, signature in the low ones; and their hashes.
//
//   v1   | 10-bit slot            | 54-bit signature |
//   v2   | 0 | 15-bit slot        | 48-bit signature |
//
// Tensors carry the bit pattern as signed int64, so v1 ids with a slot of 512 or more are negative.
// Tables and filters take any int64 and ignore the sign bit of a v2 id.
//
//   HashId(id)   63      58 57                       26 25                0
//                | shard   |  place inside the shard   |       unused      |
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "monolith/native_training/runtime/base/host_device.h"

namespace monolith {
namespace engine {

constexpr int kSignatureBitsV1 = 54;
constexpr int kSignatureBitsV2 = 48;
constexpr uint64_t kSignatureMaskV1 = (uint64_t{1} << kSignatureBitsV1) - 1;
constexpr uint64_t kSignatureMaskV2 = (uint64_t{1} << kSignatureBitsV2) - 1;
constexpr int64_t kMaxSlotsV1 = 1 << 10;
constexpr int64_t kMaxSlotsV2 = 1 << 15;

constexpr int64_t SlotOfV1(uint64_t fid) { return static_cast<int64_t>(fid >> kSignatureBitsV1); }
MONOLITH_HOST_DEVICE constexpr int64_t SlotOfV2(uint64_t fid) {
  return static_cast<int64_t>((fid >> kSignatureBitsV2) & (kMaxSlotsV2 - 1));
}

// The slot must be valid; the signature is cut to its bits.
constexpr uint64_t MakeFidV1(int64_t slot, uint64_t signature) {
  return (static_cast<uint64_t>(slot) << kSignatureBitsV1) | (signature & kSignatureMaskV1);
}
constexpr uint64_t MakeFidV2(int64_t slot, uint64_t signature) {
  return (static_cast<uint64_t>(slot) << kSignatureBitsV2) | (signature & kSignatureMaskV2);
}

// Bits 48 to 53 of the signature are lost: two v1 ids can become one.
constexpr uint64_t FidV1ToV2(uint64_t fid) {
  return (fid & kSignatureMaskV2) | ((fid >> kSignatureBitsV1) << kSignatureBitsV2);
}

// Checked values. Constructors throw std::invalid_argument.
class FIDV1 {
 public:
  explicit FIDV1(uint64_t value) : value_(value) {}
  FIDV1(int64_t slot, uint64_t signature) : value_(MakeFidV1(Checked(slot), signature)) {}

  operator uint64_t() const { return value_; }
  int64_t slot() const { return SlotOfV1(value_); }
  uint64_t signature() const { return value_ & kSignatureMaskV1; }

 private:
  static int64_t Checked(int64_t slot) {
    if (slot >= 0 && slot < kMaxSlotsV1) return slot;
    throw std::invalid_argument("slot should be less than 1024, while got " + std::to_string(slot));
  }

  uint64_t value_;
};

class FIDV2 {
 public:
  explicit FIDV2(uint64_t value) : value_(value) {
    if (value >> 63) Checked(static_cast<int64_t>(value >> kSignatureBitsV2));
  }
  FIDV2(int64_t slot, uint64_t signature) : value_(MakeFidV2(Checked(slot), signature)) {}

  operator uint64_t() const { return value_; }
  int64_t slot() const { return SlotOfV2(value_); }
  uint64_t signature() const { return value_ & kSignatureMaskV2; }

 private:
  static int64_t Checked(int64_t slot) {
    if (slot >= 0 && slot < kMaxSlotsV2) return slot;
    throw std::invalid_argument("slot should be less than 32768, while got " +
                                std::to_string(slot));
  }

  uint64_t value_;
};

static_assert(sizeof(FIDV1) == 8 && sizeof(FIDV2) == 8, "ids are stored in arrays");

// A bijection of 64-bit words. Two multiply-xorshift rounds make ids that differ only in high or
// only in low bits land on independent shards and lines.
struct IdHash {
  uint64_t first, second;  // odd

  MONOLITH_HOST_DEVICE uint64_t operator()(int64_t id) const {
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

// The hash of tables, drawn once in a process, so that ids that share a line cannot be chosen. No
// file depends on it, but for the order of its records. MONOLITH_TABLE_SEED fixes it. Loops keep a
// copy, in registers.
const IdHash& TableHash();

inline uint64_t HashId(int64_t id) { return TableHash()(id); }

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_FEATURE_ID_H_
