// Steps of the dense optimizers. Operations and their order are those of dense/dense_kernels.cc,
// and nvcc is told not to fuse multiplications and additions, so that both give the same bits.
#include <cmath>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int kScalars = 5;

struct Scalars {
  const float* pointers[kScalars];
};

Scalars MakeScalars(const float* const* pointers) {
  Scalars scalars;
  for (int i = 0; i < kScalars; ++i) scalars.pointers[i] = pointers[i];
  return scalars;
}

// Calls Step(pack of kSize elements at i) for all of n elements: packs of 4, then single ones.
template <typename Step>
struct EachPack {
  Step step;
  int64_t packs;

  MONO_DEVICE void operator()(int64_t item) const {
    if (item < packs) {
      step.template Run<4>(4 * item);
    } else {
      step.template Run<1>(3 * packs + item);
    }
  }
};

template <typename Step>
int RunStep(Stream stream, int64_t n, bool aligned, const Step& step) {
  const int64_t packs = aligned ? n / 4 : 0;
  return ForEach(stream, n - 3 * packs, EachPack<Step>{step, packs});
}

template <bool kUseV2>
struct RmspropStep {
  Scalars scalars;
  const float* grad;
  float *w, *m, *v;

  template <int kSize>
  MONO_DEVICE void Run(int64_t i) const {
    const float learning_rate = *scalars.pointers[0], beta1 = *scalars.pointers[1];
    const float beta2 = *scalars.pointers[2], epsilon = *scalars.pointers[3];
    const float weight_decay = *scalars.pointers[4];
    const Pack<kSize> grads = *reinterpret_cast<const Pack<kSize>*>(grad + i);
    Pack<kSize> ws = *reinterpret_cast<const Pack<kSize>*>(w + i);
    Pack<kSize> ms = *reinterpret_cast<const Pack<kSize>*>(m + i);
    Pack<kSize> vs = *reinterpret_cast<const Pack<kSize>*>(v + i);
    for (int k = 0; k < kSize; ++k) {
      const float g = weight_decay * ws.values[k] + grads.values[k];
      float root;
      if (kUseV2) {
        vs.values[k] = beta2 * vs.values[k] + g * g;
        root = sqrtf(vs.values[k]) + epsilon;
      } else {
        vs.values[k] += (g * g - vs.values[k]) * (1.0f - beta2);
        root = sqrtf(vs.values[k] + epsilon);
      }
      ms.values[k] = beta1 * ms.values[k] + learning_rate * g / root;
      ws.values[k] -= ms.values[k];
    }
    *reinterpret_cast<Pack<kSize>*>(v + i) = vs;
    *reinterpret_cast<Pack<kSize>*>(m + i) = ms;
    *reinterpret_cast<Pack<kSize>*>(w + i) = ws;
  }
};

template <bool kUseV2>
MONO_DEVICE float AdamomDelta(float learning_rate, float epsilon, float m, float v, float c) {
  if (kUseV2) return learning_rate * m / (sqrtf(v / c) + epsilon);
  return learning_rate * m * sqrtf(c / (v + epsilon * c));
}

template <bool kUseV2>
struct AdamomStep {
  Scalars scalars;
  const float* grad;
  float *w, *m, *v, *c;

  template <int kSize>
  MONO_DEVICE void Run(int64_t i) const {
    const float learning_rate = *scalars.pointers[0], ada_decay = *scalars.pointers[1];
    const float mom_decay = *scalars.pointers[2], epsilon = *scalars.pointers[3];
    const float weight_decay = *scalars.pointers[4];
    const Pack<kSize> grads = *reinterpret_cast<const Pack<kSize>*>(grad + i);
    Pack<kSize> ws = *reinterpret_cast<const Pack<kSize>*>(w + i);
    Pack<kSize> ms = *reinterpret_cast<const Pack<kSize>*>(m + i);
    Pack<kSize> vs = *reinterpret_cast<const Pack<kSize>*>(v + i);
    Pack<kSize> cs = *reinterpret_cast<const Pack<kSize>*>(c + i);
    // After some steps c is at its limit, 1 / (1 - ada_decay), and a ninth of the memory that a
    // step moves can be left as it is.
    bool c_moves = false;
    for (int k = 0; k < kSize; ++k) {
      const float g = weight_decay * ws.values[k] + grads.values[k];
      ms.values[k] = mom_decay * ms.values[k] + (1.0f - mom_decay) * g;
      vs.values[k] = ada_decay * vs.values[k] + g * g;
      const float c_before = cs.values[k];
      cs.values[k] = ada_decay * c_before + 1.0f;
      c_moves = c_moves || cs.values[k] != c_before;
      ws.values[k] -=
          AdamomDelta<kUseV2>(learning_rate, epsilon, ms.values[k], vs.values[k], cs.values[k]);
    }
    *reinterpret_cast<Pack<kSize>*>(m + i) = ms;
    *reinterpret_cast<Pack<kSize>*>(v + i) = vs;
    if (c_moves) *reinterpret_cast<Pack<kSize>*>(c + i) = cs;
    *reinterpret_cast<Pack<kSize>*>(w + i) = ws;
  }
};

struct FindZero {
  const float* c;
  int32_t* bad;

  MONO_DEVICE void operator()(int64_t i) const {
    if (c[i] == 0.0f) MarkBad(bad);
  }
};

template <bool kUseV2>
struct AdamomMove {
  Scalars scalars;
  const float *m, *v, *c;
  float* w;
  const int32_t* bad;

  MONO_DEVICE void operator()(int64_t i) const {
    if (*bad != 0) return;
    w[i] -= AdamomDelta<kUseV2>(*scalars.pointers[0], *scalars.pointers[3], m[i], v[i], c[i]);
  }
};

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_rmsprop(void* stream, int64_t n, const float* const* scalars, const float* grad,
                        float* w, float* m, float* v, int32_t use_v2) {
  const bool aligned = IsAligned(grad) && IsAligned(w) && IsAligned(m) && IsAligned(v);
  const Scalars s = MakeScalars(scalars);
  if (use_v2) return RunStep(stream, n, aligned, RmspropStep<true>{s, grad, w, m, v});
  return RunStep(stream, n, aligned, RmspropStep<false>{s, grad, w, m, v});
}

int mono_gpu_op_adamom(void* stream, int64_t n, const float* const* scalars, const float* grad,
                       float* w, float* m, float* v, float* c, int32_t use_v2) {
  const bool aligned =
      IsAligned(grad) && IsAligned(w) && IsAligned(m) && IsAligned(v) && IsAligned(c);
  const Scalars s = MakeScalars(scalars);
  if (use_v2) return RunStep(stream, n, aligned, AdamomStep<true>{s, grad, w, m, v, c});
  return RunStep(stream, n, aligned, AdamomStep<false>{s, grad, w, m, v, c});
}

int mono_gpu_op_adamom_move(void* stream, int64_t n, const float* const* scalars, const float* m,
                            const float* v, const float* c, float* w, int32_t use_v2,
                            void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    Workspace space;
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(ForEach(stream, n, FindZero{c, space.bad()}));
    const Scalars s = MakeScalars(scalars);
    if (use_v2) return ForEach(stream, n, AdamomMove<true>{s, m, v, c, w, space.bad()});
    return ForEach(stream, n, AdamomMove<false>{s, m, v, c, w, space.bad()});
  });
}
