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
    const Pack<kSize> x = LoadAligned<kSize>(left + (b * s.left + l) * s.dim + k);
    const Pack<kSize> y = LoadAligned<kSize>(right + (b * s.right + r) * s.dim + k);
    Pack<kSize> z;
    for (int i = 0; i < kSize; ++i) z.values[i] = x.values[i] * y.values[i];
    StoreAligned<kSize>(z, out + pair * s.dim + k);
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

// The gradients of both sides: item = (example, left or right feature, pack of columns). Lanes of
// one example are neighbours, since both sides read all of its gradient: once from memory, then
// from the cache.
template <int kSize, bool kDot>
struct Gradient {
  Sizes s;
  const float *grad, *left, *right;
  float *left_grad, *right_grad;

  // The sum of gradient(pair) * other over `n` features, whose pairs are `step` apart.
  MONO_DEVICE Pack<kSize> Sum(int64_t pair, int64_t step, int64_t n, const float* other,
                              int64_t k) const {
    constexpr int kAtOnce = 4;
    Pack<kSize> sum = Zeros<kSize>();
    int64_t i = 0;
    for (; i + kAtOnce <= n; i += kAtOnce) {
      Pack<kSize> terms[kAtOnce], others[kAtOnce];
      for (int j = 0; j < kAtOnce; ++j) {
        terms[j] = GradientOf(pair + (i + j) * step, k);
        others[j] = LoadAligned<kSize>(other + (i + j) * s.dim + k);
      }
      for (int j = 0; j < kAtOnce; ++j) AddProduct(terms[j], others[j], &sum);
    }
    for (; i < n; ++i) {
      AddProduct(GradientOf(pair + i * step, k), LoadAligned<kSize>(other + i * s.dim + k), &sum);
    }
    return sum;
  }

  MONO_DEVICE Pack<kSize> GradientOf(int64_t pair, int64_t k) const {
    if constexpr (kDot) {
      Pack<kSize> same;
      for (int i = 0; i < kSize; ++i) same.values[i] = grad[pair];
      return same;
    } else {
      return LoadAligned<kSize>(grad + pair * s.dim + k);
    }
  }

  MONO_DEVICE static void AddProduct(const Pack<kSize>& x, const Pack<kSize>& y, Pack<kSize>* sum) {
    for (int i = 0; i < kSize; ++i) sum->values[i] += x.values[i] * y.values[i];
  }

  MONO_DEVICE void operator()(int64_t item) const {
    int64_t rest, pack, b, f;
    DivMod(item, s.dim / kSize, &rest, &pack);
    DivMod(rest, s.left + s.right, &b, &f);
    const int64_t k = pack * kSize;
    if (f < s.left) {
      StoreAligned<kSize>(
          Sum((b * s.left + f) * s.right, 1, s.right, right + b * s.right * s.dim, k),
          left_grad + (b * s.left + f) * s.dim + k);
      return;
    }
    f -= s.left;
    StoreAligned<kSize>(
        Sum(b * s.left * s.right + f, s.right, s.left, left + b * s.left * s.dim, k),
        right_grad + (b * s.right + f) * s.dim + k);
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
  if (dim % 4 == 0 && AreAligned({left, right, out})) {
    return ForEach(stream, pairs * (dim / 4), Multiply<4>{s, left, right, out});
  }
  return ForEach(stream, pairs * dim, Multiply<1>{s, left, right, out});
}

int mono_gpu_op_ffm_grad(void* stream, int64_t batch, int64_t num_left, int64_t num_right,
                         int64_t dim, int32_t dot, const float* grad, const float* left,
                         const float* right, float* left_grad, float* right_grad) {
  const Sizes s{batch, num_left, num_right, dim};
  const bool packed =
      dim % 4 == 0 && AreAligned({left, right, left_grad, right_grad}) && (dot || IsAligned(grad));
  const auto run = packed ? (dot ? RunGradient<4, true> : RunGradient<4, false>)
                          : (dot ? RunGradient<1, true> : RunGradient<1, false>);
  return run(stream, s, grad, left, right, left_grad, right_grad);
}
