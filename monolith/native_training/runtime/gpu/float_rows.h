// Rows of floats on the device, of 32 or 16 bits, perhaps with gaps between them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_FLOAT_ROWS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_FLOAT_ROWS_H_

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/gpu/c_api.h"
#include "monolith/native_training/runtime/gpu/device_math.h"

namespace monolith {
namespace gpu {

enum class FloatType : int32_t {
  kFloat32 = MONO_GPU_FLOAT32,
  kFloat16 = MONO_GPU_FLOAT16,
  kBfloat16 = MONO_GPU_BFLOAT16,
};

// The float of 16 bits.
template <FloatType kType>
MONO_DEVICE float WidenHalf(uint32_t bits) {
  if (kType == FloatType::kBfloat16) return engine::BitsFloat(bits << 16);
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
#else
  return engine::HalfToFloat(static_cast<uint16_t>(bits));
#endif
}

struct FloatRows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next
  FloatType type = FloatType::kFloat32;

  static FloatRows Packed(const float* floats, int64_t dim) {
    return {floats, dim, FloatType::kFloat32};
  }

  // Whether four elements of a row can be read in one access, from every fourth on.
  bool InFours() const {
    const uintptr_t bytes = type == FloatType::kFloat32 ? 16 : 8;
    return stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0;
  }

  // A row of 32 bits.
  MONO_DEVICE const float* Floats(int64_t row) const {
    return static_cast<const float*>(data) + row * stride;
  }

  MONO_DEVICE float At(int64_t row, int64_t column) const {
    const int64_t at = row * stride + column;
    if (type == FloatType::kFloat32) return static_cast<const float*>(data)[at];
    const uint32_t bits = static_cast<const uint16_t*>(data)[at];
    return type == FloatType::kBfloat16 ? WidenHalf<FloatType::kBfloat16>(bits)
                                        : WidenHalf<FloatType::kFloat16>(bits);
  }

  // kSize elements, which are not read again; four if InFours.
  template <int kSize, FloatType kType>
  MONO_DEVICE Pack<kSize> LoadOnce(int64_t row, int64_t column) const {
    static_assert(kSize == 1 || kSize == 4);
    const int64_t at = row * stride + column;
    Pack<kSize> pack;
    if constexpr (kType == FloatType::kFloat32) {
      const float* const from = static_cast<const float*>(data) + at;
#if defined(__CUDACC__)
      if constexpr (kSize == 4) {
        const float4 v = __ldcs(reinterpret_cast<const float4*>(from));
        pack = {{v.x, v.y, v.z, v.w}};
      } else {
        pack = {{__ldcs(from)}};
      }
#else
      pack = Load<kSize>(from);
#endif
    } else {
      const uint16_t* const from = static_cast<const uint16_t*>(data) + at;
#if defined(__CUDACC__)
      if constexpr (kSize == 4) {
        const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
        pack = {{WidenHalf<kType>(v.x & 0xffffu), WidenHalf<kType>(v.x >> 16),
                 WidenHalf<kType>(v.y & 0xffffu), WidenHalf<kType>(v.y >> 16)}};
      } else {
        pack = {{WidenHalf<kType>(__ldcs(from))}};
      }
#else
      for (int i = 0; i < kSize; ++i) pack.values[i] = WidenHalf<kType>(from[i]);
#endif
    }
    return pack;
  }
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_FLOAT_ROWS_H_
