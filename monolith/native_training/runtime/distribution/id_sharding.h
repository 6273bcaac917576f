// The one rule that maps an id to its home: shard = floor modulo of the signed 64-bit id.
//
// Every C++ path (split, fused reorder, parser, packed transfer) goes through this file and the
// Python side uses tf.math.floormod, which is the same function. A second rule would split an id's
// row between two servers, so do not write `id % n` anywhere else.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_SHARDING_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_SHARDING_H_

#include <cstdint>

namespace monolith {
namespace distribution {

// Shard of `id` in [0, num_shards), also for negative ids. num_shards must be positive.
constexpr int64_t ShardOfId(int64_t id, int64_t num_shards) {
  const int64_t remainder = id % num_shards;
  return remainder < 0 ? remainder + num_shards : remainder;
}

// ShardOfId for many ids and one number of shards: a multiplication instead of a division per id.
class IdSharder {
 public:
  // num_shards must be positive.
  explicit IdSharder(int64_t num_shards)
      : shards_(static_cast<uint64_t>(num_shards)),
        reciprocal_(UINT64_MAX / shards_),
        negative_correction_(shards_ - Wrap(UINT64_MAX % shards_ + 1)) {}

  int64_t num_shards() const { return static_cast<int64_t>(shards_); }

  int64_t operator()(int64_t id) const {
    const uint64_t bits = static_cast<uint64_t>(id);
    if ((shards_ & (shards_ - 1)) == 0) return static_cast<int64_t>(bits & (shards_ - 1));
    // reciprocal_ is a floor, so the quotient is at most one too small.
    const uint64_t quotient =
        static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * reciprocal_) >> 64);
    uint64_t remainder = Wrap(bits - quotient * shards_);
    // A negative id reads as id + 2^64: take 2^64 mod shards off again.
    if (id < 0) remainder = Wrap(remainder + negative_correction_);
    return static_cast<int64_t>(remainder);
  }

 private:
  // Arguments stay below 2 * shards_ <= 2^64.
  uint64_t Wrap(uint64_t value) const { return value >= shards_ ? value - shards_ : value; }

  uint64_t shards_;
  uint64_t reciprocal_;
  uint64_t negative_correction_;
};

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_ID_SHARDING_H_
