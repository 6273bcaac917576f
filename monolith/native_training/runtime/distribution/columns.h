// A few columns of an embedding row in vector registers.
//
// Left to itself GCC keeps such an array in scalar registers as soon as the loop around it is not
// trivial, which costs a factor of two to four in the loops that pool rows; vector types leave it
// no choice. Rows need no alignment.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_COLUMNS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_COLUMNS_H_

#include <cmath>
#include <cstdint>

namespace monolith {
namespace distribution {

typedef float FourFloats __attribute__((vector_size(16)));
// Outside of the template, where GCC 11 would forget that it is not aligned.
typedef float FourUnaligned __attribute__((vector_size(16), aligned(4), may_alias));

template <bool kScalar>
struct ColumnTypes {
  using Part = FourFloats;
  using Unaligned = FourUnaligned;
};

template <>
struct ColumnTypes<true> {
  using Part = float;
  using Unaligned = float;
};

// kColumns is 1 or a multiple of 4.
template <int64_t kColumns>
class Columns {
 public:
  static Columns Load(const float* from) {
    Columns columns;
    for (int64_t p = 0; p < kParts; ++p) {
      columns.parts_[p] = *reinterpret_cast<const Unaligned*>(from + p * kLanes);
    }
    return columns;
  }

  void Store(float* to) const {
    for (int64_t p = 0; p < kParts; ++p) {
      *reinterpret_cast<Unaligned*>(to + p * kLanes) = parts_[p];
    }
  }

  void Add(const Columns& other) {
    for (int64_t p = 0; p < kParts; ++p) parts_[p] += other.parts_[p];
  }

  void Square() {
    for (int64_t p = 0; p < kParts; ++p) parts_[p] *= parts_[p];
  }

  void Divide(float divisor) {
    for (int64_t p = 0; p < kParts; ++p) parts_[p] /= divisor;
  }

  void Sqrt() {
    float values[kColumns];
    Store(values);
    for (int64_t c = 0; c < kColumns; ++c) values[c] = std::sqrt(values[c]);
    *this = Load(values);
  }

 private:
  static_assert(kColumns == 1 || kColumns % 4 == 0);
  using Part = typename ColumnTypes<kColumns == 1>::Part;
  using Unaligned = typename ColumnTypes<kColumns == 1>::Unaligned;
  static constexpr int64_t kLanes = sizeof(Part) / sizeof(float);
  static constexpr int64_t kParts = kColumns / kLanes;

  Part parts_[kParts];
};

// Calls fn(Width<k>(), first) for blocks of columns that cover [0, width): as wide as registers
// allow, then what remains.
template <int64_t kColumns>
struct Width {
  static constexpr int64_t value = kColumns;
};

template <typename Fn>
inline void ForColumnBlocks(int64_t width, const Fn& fn) {
  int64_t c = 0;
  for (; c + 32 <= width; c += 32) fn(Width<32>(), c);
  for (; c + 16 <= width; c += 16) fn(Width<16>(), c);
  for (; c + 8 <= width; c += 8) fn(Width<8>(), c);
  for (; c + 4 <= width; c += 4) fn(Width<4>(), c);
  for (; c < width; ++c) fn(Width<1>(), c);
}

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_COLUMNS_H_
