// Scaling many tensors in one launch, and the norm of all of them: clipping, flat concatenation.
#include <cmath>
#include <limits>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int kPacks = 4;  // of 4 floats, for each lane of a tile
constexpr int64_t kTileFloats = int64_t{kLanes} * kPacks * 4;

struct Tensor {
  const float* in;
  float* out;
  int64_t size;
  int64_t padded;
  int64_t first_tile;
  bool aligned;
};

// Sets first_tile of all; returns the number of tiles.
int64_t CutIntoTiles(std::vector<Tensor>* tensors) {
  int64_t tiles = 0;
  for (Tensor& tensor : *tensors) {
    tensor.first_tile = tiles;
    tiles += CeilDiv(tensor.padded, kTileFloats);
  }
  return tiles;
}

std::vector<Tensor> MakeTensors(int64_t n, const float* const* inputs, const int64_t* sizes,
                                float* const* outputs, const int64_t* padded) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < n; ++i) {
    float* const out = outputs == nullptr ? nullptr : outputs[i];
    // A tensor without elements would share its first tile with the next.
    if (padded[i] == 0) continue;
    tensors.push_back(
        {inputs[i], out, sizes[i], padded[i], 0, IsAligned(inputs[i]) && IsAligned(out)});
  }
  return tensors;
}

struct ScaleTile {
  const Tensor* tensors;
  int64_t n;
  const float* factor;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Tensor tensor = tensors[FindPart(tensors, n, tile)];
    const int64_t begin = (tile - tensor.first_tile) * kTileFloats;
    const float by = *factor;
    if (tensor.aligned && begin + kTileFloats <= tensor.size) {
      const Pack<4>* const in = reinterpret_cast<const Pack<4>*>(tensor.in + begin) + lane;
      Pack<4>* const out = reinterpret_cast<Pack<4>*>(tensor.out + begin) + lane;
      Pack<4> packs[kPacks];
      for (int p = 0; p < kPacks; ++p) packs[p] = in[p * kLanes];
      for (int p = 0; p < kPacks; ++p) {
        for (int k = 0; k < 4; ++k) packs[p].values[k] *= by;
        out[p * kLanes] = packs[p];
      }
      return;
    }
    const int64_t end = begin + kTileFloats < tensor.padded ? begin + kTileFloats : tensor.padded;
    for (int64_t i = begin + lane; i < end; i += kLanes) {
      tensor.out[i] = i < tensor.size ? tensor.in[i] * by : 0.0f;
    }
  }
};

// The product of two floats is exact in double.
struct SquareTile {
  const Tensor* tensors;
  int64_t n;

  MONO_DEVICE double operator()(int64_t tile, int lane) const {
    const Tensor tensor = tensors[FindPart(tensors, n, tile)];
    const int64_t begin = (tile - tensor.first_tile) * kTileFloats;
    double sum = 0;
    if (tensor.aligned && begin + kTileFloats <= tensor.size) {
      const Pack<4>* const in = reinterpret_cast<const Pack<4>*>(tensor.in + begin) + lane;
      Pack<4> packs[kPacks];
      for (int p = 0; p < kPacks; ++p) packs[p] = in[p * kLanes];
      for (int p = 0; p < kPacks; ++p) {
        for (int k = 0; k < 4; ++k) {
          const double value = packs[p].values[k];
          sum += value * value;
        }
      }
      return sum;
    }
    const int64_t end = begin + kTileFloats < tensor.size ? begin + kTileFloats : tensor.size;
    for (int64_t i = begin + lane; i < end; i += kLanes) {
      const double value = tensor.in[i];
      sum += value * value;
    }
    return sum;
  }
};

struct StoreSum {
  float* sum;

  MONO_DEVICE void operator()(double total) const { *sum = static_cast<float>(total); }
};

struct StoreNorm {
  float clip_norm;
  float* norm;
  float* factor;

  MONO_DEVICE void operator()(double total) const {
    const float root = static_cast<float>(sqrt(total));
    *norm = root;
    // A norm that is not finite makes every element NaN: a diverged step must not look small.
    if (!(root - root == 0.0f)) {
      *factor = nanf("");
    } else {
      *factor = root > clip_norm ? clip_norm / root : 1.0f;
    }
  }
};

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_scale(void* stream, int64_t n, const float* const* inputs, const int64_t* sizes,
                      float* const* outputs, const int64_t* padded, const float* factor,
                      void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    std::vector<Tensor> tensors = MakeTensors(n, inputs, sizes, outputs, padded);
    const int64_t tiles = CutIntoTiles(&tensors);
    Workspace space;
    const auto slot = space.Put(tensors);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    return ForTiles(stream, tiles,
                    ScaleTile{space.At(slot), static_cast<int64_t>(tensors.size()), factor});
  });
}

int mono_gpu_op_scale_by(void* stream, int64_t n, const float* const* inputs, const int64_t* sizes,
                         float* const* outputs, const int64_t* padded, float factor,
                         void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    std::vector<Tensor> tensors = MakeTensors(n, inputs, sizes, outputs, padded);
    const int64_t tiles = CutIntoTiles(&tensors);
    Workspace space;
    const auto slot = space.Put(tensors);
    const auto by = space.Put(std::vector<float>{factor});
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    return ForTiles(stream, tiles,
                    ScaleTile{space.At(slot), static_cast<int64_t>(tensors.size()), space.At(by)});
  });
}

int mono_gpu_op_sum_of_squares(void* stream, int64_t n, const float* const* inputs,
                               const int64_t* sizes, float* sum, void* workspace,
                               int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    std::vector<Tensor> tensors = MakeTensors(n, inputs, sizes, nullptr, sizes);
    const int64_t tiles = CutIntoTiles(&tensors);
    Workspace space;
    const auto slot = space.Put(tensors);
    const auto finished = space.Put(std::vector<uint32_t>{0});
    const auto partial = space.Scratch<double>(kSumBlocks);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    return Sum(stream, tiles, SquareTile{space.At(slot), static_cast<int64_t>(tensors.size())},
               StoreSum{sum}, space.At(partial), space.At(finished));
  });
}

int mono_gpu_op_clip(void* stream, int64_t n, const float* const* inputs, const int64_t* sizes,
                     float* const* outputs, float clip_norm, float* norm, void* workspace,
                     int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    std::vector<Tensor> tensors = MakeTensors(n, inputs, sizes, outputs, sizes);
    const int64_t tiles = CutIntoTiles(&tensors);
    Workspace space;
    const auto slot = space.Put(tensors);
    const auto finished = space.Put(std::vector<uint32_t>{0});
    const auto partial = space.Scratch<double>(kSumBlocks);
    const auto factor = space.Scratch<float>(1);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    const int64_t count = static_cast<int64_t>(tensors.size());
    MONO_GPU_TRY(Sum(stream, tiles, SquareTile{space.At(slot), count},
                     StoreNorm{clip_norm, norm, space.At(factor)}, space.At(partial),
                     space.At(finished)));
    return ForTiles(stream, tiles, ScaleTile{space.At(slot), count, space.At(factor)});
  });
}
