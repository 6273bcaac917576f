// FFM: interactions of every left with every right feature of an example. The order of each sum is
// that of the CPU kernel, so that both give the same bits.
#include "monolith/native_training/runtime/gpu/device_math.h"

namespace monolith {
namespace gpu {
namespace {

struct Sizes {
  int64_t batch, left, right, dim;
};

// Products by element: item = (example, left, right, pack of columns).
template <int kSize>
struct Multiply {
  Sizes s;
  const float *left, *right;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    int64_t pair, pack, rest, r, b, l;
    DivMod(item, s.dim / kSize, &pair, &pack);
    DivMod(pair, s.right, &rest, &r);
    DivMod(rest, s.left, &b, &l);
    const int64_t k = pack * kSize;
    const Pack<kSize> x = Load<kSize>(left + (b * s.left + l) * s.dim + k);
    const Pack<kSize> y = Load<kSize>(right + (b * s.right + r) * s.dim + k);
    Pack<kSize> z;
    for (int i = 0; i < kSize; ++i) z.values[i] = x.values[i] * y.values[i];
    Store<kSize>(z, out + pair * s.dim + k);
  }
};

// Inner products: item = (example, left, right). Four running sums, as on the CPU.
struct DotProduct {
  Sizes s;
  const float *left, *right;
  float* out;

  MONO_DEVICE void operator()(int64_t item) const {
    int64_t rest, r, b, l;
    DivMod(item, s.right, &rest, &r);
    DivMod(rest, s.left, &b, &l);
    const float* const x = left + (b * s.left + l) * s.dim;
    const float* const y = right + (b * s.right + r) * s.dim;
    float lanes[4] = {0, 0, 0, 0};
    int64_t k = 0;
    for (; k + 4 <= s.dim; k += 4) {
      const Pack<4> xs = Load<4>(x + k), ys = Load<4>(y + k);
      for (int i = 0; i < 4; ++i) lanes[i] += xs.values[i] * ys.values[i];
    }
    float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (; k < s.dim; ++k) sum += x[k] * y[k];
    out[item] = sum;
  }
};

// The gradients of both sides: items are packs of left_grad, then packs of right_grad.
template <int kSize, bool kDot>
struct Gradient {
  Sizes s;
  const float *grad, *left, *right;
  float *left_grad, *right_grad;

  // Adds gradient(pair, k) * other[k].
  MONO_DEVICE void Add(int64_t pair, int64_t k, const float* other, Pack<kSize>* sum) const {
    const Pack<kSize> y = Load<kSize>(other + k);
    if (kDot) {
      const float g = grad[pair];
      for (int i = 0; i < kSize; ++i) sum->values[i] += g * y.values[i];
    } else {
      const Pack<kSize> g = Load<kSize>(grad + pair * s.dim + k);
      for (int i = 0; i < kSize; ++i) sum->values[i] += g.values[i] * y.values[i];
    }
  }

  MONO_DEVICE void operator()(int64_t item) const {
    const int64_t packs = s.dim / kSize;
    const int64_t left_items = s.batch * s.left * packs;
    int64_t rest, pack, b, f;
    Pack<kSize> sum = Zeros<kSize>();
    if (item < left_items) {
      DivMod(item, packs, &rest, &pack);
      DivMod(rest, s.left, &b, &f);
      const int64_t k = pack * kSize;
      for (int64_t r = 0; r < s.right; ++r) {
        Add((b * s.left + f) * s.right + r, k, right + (b * s.right + r) * s.dim, &sum);
      }
      Store<kSize>(sum, left_grad + rest * s.dim + k);
      return;
    }
    DivMod(item - left_items, packs, &rest, &pack);
    DivMod(rest, s.right, &b, &f);
    const int64_t k = pack * kSize;
    for (int64_t l = 0; l < s.left; ++l) {
      Add((b * s.left + l) * s.right + f, k, left + (b * s.left + l) * s.dim, &sum);
    }
    Store<kSize>(sum, right_grad + rest * s.dim + k);
  }
};

template <int kSize, bool kDot>
int RunGradient(Stream stream, const Sizes& s, const float* grad, const float* left,
                const float* right, float* left_grad, float* right_grad) {
  return ForEach(stream, s.batch * (s.left + s.right) * (s.dim / kSize),
                 Gradient<kSize, kDot>{s, grad, left, right, left_grad, right_grad});
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_ffm(void* stream, int64_t batch, int64_t num_left, int64_t num_right, int64_t dim,
                    int32_t dot, const float* left, const float* right, float* out) {
  const Sizes s{batch, num_left, num_right, dim};
  const int64_t pairs = batch * num_left * num_right;
  if (dot) return ForEach(stream, pairs, DotProduct{s, left, right, out});
  if (dim % 4 == 0) return ForEach(stream, pairs * (dim / 4), Multiply<4>{s, left, right, out});
  return ForEach(stream, pairs * dim, Multiply<1>{s, left, right, out});
}

int mono_gpu_op_ffm_grad(void* stream, int64_t batch, int64_t num_left, int64_t num_right,
                         int64_t dim, int32_t dot, const float* grad, const float* left,
                         const float* right, float* left_grad, float* right_grad) {
  const Sizes s{batch, num_left, num_right, dim};
  const auto run = dim % 4 == 0 ? (dot ? RunGradient<4, true> : RunGradient<4, false>)
                                : (dot ? RunGradient<1, true> : RunGradient<1, false>);
  return run(stream, s, grad, left, right, left_grad, right_grad);
}
