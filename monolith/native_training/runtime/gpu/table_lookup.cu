// Lookups of GPU tables.
#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"

namespace monolith {
namespace gpu {
namespace {

MONO_DEVICE void LoadIds(const int64_t* ids, int64_t n, int64_t word, int lane, PerId<int64_t>* own,
                         PerId<bool>* wanted) {
  for (int k = 0; k < kIdsPerLane; ++k) {
    const int64_t i = word * kWordIds + OwnId(lane, k);
    wanted->own[k] = i < n;
    own->own[k] = i < n ? ids[i] : 0;
  }
}

struct IgnoreHit {
  MONO_DEVICE void operator()(TableSlot*, const TableSlot&, int) const {}
};

// Values that are read once leave no trace in the caches.
template <int kSize>
MONO_DEVICE Pack<kSize> LoadOnce(const float* from) {
#if defined(__CUDACC__)
  Pack<kSize> pack;
  if constexpr (kSize == 4) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(from));
    pack.values[0] = v.x, pack.values[1] = v.y, pack.values[2] = v.z, pack.values[3] = v.w;
  } else if constexpr (kSize == 2) {
    const float2 v = __ldcs(reinterpret_cast<const float2*>(from));
    pack.values[0] = v.x, pack.values[1] = v.y;
  } else {
    pack.values[0] = __ldcs(from);
  }
  return pack;
#else
  return *reinterpret_cast<const Pack<kSize>*>(from);
#endif
}

template <int kSize>
MONO_DEVICE void StoreOnce(const Pack<kSize>& pack, float* to) {
#if defined(__CUDACC__)
  if constexpr (kSize == 4) {
    __stcs(reinterpret_cast<float4*>(to),
           make_float4(pack.values[0], pack.values[1], pack.values[2], pack.values[3]));
  } else if constexpr (kSize == 2) {
    __stcs(reinterpret_cast<float2*>(to), make_float2(pack.values[0], pack.values[1]));
  } else {
    __stcs(to, pack.values[0]);
  }
#else
  *reinterpret_cast<Pack<kSize>*>(to) = pack;
#endif
}

// Copies rows as they are: kTile lanes take a row, kSize floats at a time.
template <int kTile, int kSize>
struct CopyRows {
  IndexView index;
  const char* rows;
  int64_t stride;
  const int64_t* ids;
  int64_t n;
  float* out;
  uint8_t* found;
  int dim;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    PerId<int64_t> own;
    PerId<bool> wanted;
    LoadIds(ids, n, word, lane, &own, &wanted);
    PerId<uint32_t> row;
    FindRows(index, lane, own, wanted, IgnoreHit(), &row);
    const int64_t first = word * kWordIds;
    if (found != nullptr) {
      for (int k = 0; k < kIdsPerLane; ++k) {
        if (wanted.own[k]) found[first + OwnId(lane, k)] = row.own[k] != 0;
      }
    }
    constexpr int kTiles = kWarpLanes / kTile;
    constexpr int kAtOnce = kWarpLanes == 1 ? 1 : 4;
    const int tile = lane / kTile;
    const int column = lane % kTile * kSize;
    for (int begin = 0; begin < kWordIds; begin += kTiles * kAtOnce) {
      uint32_t numbers[kAtOnce];
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) numbers[u] = row.Get(begin + u * kTiles + tile);
      for (int c = column; c < dim; c += kTile * kSize) {
        Pack<kSize> packs[kAtOnce];
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          packs[u] =
              LoadOnce<kSize>(reinterpret_cast<const float*>(rows + numbers[u] * stride) + c);
        }
        MONO_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          const int64_t i = first + begin + u * kTiles + tile;
          if (i < n) StoreOnce<kSize>(packs[u], out + i * dim + c);
        }
      }
    }
  }
};

// Through the retrievers, an element at a time.
template <int kTile>
struct RetrieveRows {
  IndexView index;
  const char* rows;
  int64_t stride;
  const int64_t* ids;
  int64_t n;
  float* out;
  uint8_t* found;
  RowPlan plan;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    PerId<int64_t> own;
    PerId<bool> wanted;
    LoadIds(ids, n, word, lane, &own, &wanted);
    PerId<uint32_t> row;
    FindRows(index, lane, own, wanted, IgnoreHit(), &row);
    const int64_t first = word * kWordIds;
    if (found != nullptr) {
      for (int k = 0; k < kIdsPerLane; ++k) {
        if (wanted.own[k]) found[first + OwnId(lane, k)] = row.own[k] != 0;
      }
    }
    constexpr int kTiles = kWarpLanes / kTile;
    for (int j = lane / kTile; j < kWordIds; j += kTiles) {
      const uint32_t number = row.Get(j);
      if (first + j >= n) continue;
      const float* const from = reinterpret_cast<const float*>(rows + number * stride);
      float* const to = out + (first + j) * plan.dim;
      for (int s = 0; s < plan.num_segments; ++s) {
        const SegmentPlan& segment = plan.segments[s];
        for (int i = lane % kTile; i < segment.dim; i += kTile) {
          const int e = segment.value_begin + i;
          to[e] = number == 0 ? 0.0f : Retrieved(segment, from[e]);
        }
      }
    }
  }
};

}  // namespace

int LaunchLookup(Stream stream, const IndexView& index, const char* rows, int64_t stride,
                 const RowPlan& plan, bool all_raw, const int64_t* ids, int64_t n, float* out,
                 uint8_t* found) {
  const int64_t words = CeilDiv(n, kWordIds);
  const int dim = plan.dim;
#if defined(__CUDACC__)
  if (!all_raw) {
    return ForWarps<4>(stream, words, kAllBlocks,
                       RetrieveRows<16>{index, rows, stride, ids, n, out, found, plan});
  }
  const auto copy = [&](auto tile, auto size) {
    constexpr int kBlocks = decltype(tile)::value <= 8 ? 6 : 4;
    return ForWarps<kBlocks>(stream, words, kAllBlocks,
                             CopyRows<decltype(tile)::value, decltype(size)::value>{
                                 index, rows, stride, ids, n, out, found, dim});
  };
  const auto with_size = [&](auto size) {
    const int packs = dim / decltype(size)::value;
    if (packs <= 4) return copy(std::integral_constant<int, 4>(), size);
    if (packs <= 8) return copy(std::integral_constant<int, 8>(), size);
    if (packs <= 16) return copy(std::integral_constant<int, 16>(), size);
    return copy(std::integral_constant<int, 32>(), size);
  };
  const uintptr_t address = reinterpret_cast<uintptr_t>(out);
  if (dim % 4 == 0 && stride % 16 == 0 && address % 16 == 0) {
    return with_size(std::integral_constant<int, 4>());
  }
  if (dim % 2 == 0 && stride % 8 == 0 && address % 8 == 0) {
    return with_size(std::integral_constant<int, 2>());
  }
  return with_size(std::integral_constant<int, 1>());
#else
  if (!all_raw) {
    return ForWarps(stream, words, kAllBlocks,
                    RetrieveRows<1>{index, rows, stride, ids, n, out, found, plan});
  }
  return ForWarps(stream, words, kAllBlocks,
                  CopyRows<1, 1>{index, rows, stride, ids, n, out, found, dim});
#endif
}

int GpuTable::Lookup(Stream stream, const int64_t* ids, int64_t n, float* out, uint8_t* found) {
  if (n < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(n));
  }
  if (n == 0) return MONO_GPU_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(BeginRead(stream));
  RowPlan plan = PlanFor(RowMode::kOptimize);
  MONO_GPU_TRY(LaunchLookup(stream, View(), arena_.base(), stride_, plan, layout_.all_raw, ids, n,
                            out, found));
  return EndRead(stream);
}

}  // namespace gpu
}  // namespace monolith
