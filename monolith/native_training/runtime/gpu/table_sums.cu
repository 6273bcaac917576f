// Adds up the gradients of ids that come often (table_sums.h), balanced over warps: a tile of lanes
// takes a chunk, and who ends last of the chunks that are added together adds them.
#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/stretches.h"
#include "monolith/native_training/runtime/gpu/table_sums.h"

namespace monolith {
namespace gpu {
namespace {

// Counts on from ~0; returns how many came before.
MONO_DEVICE uint32_t CountArrival(uint32_t* arrived) {
#if defined(__CUDACC__)
  return atomicAdd(arrived, 1u) + 1;
#else
  return ++*arrived;
#endif
}

// Reads a sum that another multiprocessor has stored during this launch.
template <int kSize>
MONO_DEVICE Pack<kSize> LoadSum(const float* from) {
#if defined(__CUDACC__)
  if constexpr (kSize == 4) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    return {{v.x, v.y, v.z, v.w}};
  } else {
    return {{__ldcg(from)}};
  }
#else
  return Load<kSize>(from);
#endif
}

// Adds load(0), load(1), ... load(count - 1) in this order.
template <int kSize, typename Loader>
MONO_DEVICE Pack<kSize> AddInOrder(uint32_t count, const Loader& load) {
  Pack<kSize> sum = Zeros<kSize>();
  for (uint32_t first = 0; first < count; first += kSumRows) {
    Pack<kSize> rows[kSumRows];
    MONO_UNROLL
    for (uint32_t k = 0; k < kSumRows; ++k) {
      if (first + k < count) rows[k] = load(first + k);
    }
    MONO_UNROLL
    for (uint32_t k = 0; k < kSumRows; ++k) {
      if (first + k == 0) {
        sum = rows[k];
      } else if (first + k < count) {
        AddTo(&sum, rows[k]);
      }
    }
  }
  return sum;
}

template <int kSize, FloatType kType>
struct AddChunks {
  SumTask task;
  int log_lanes;  // of a tile

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const int log_tiles = LogLanes(kWarpLanes, 5) - log_lanes;
    const int64_t chunk = (word << log_tiles) + (lane >> log_lanes);
    if (chunk < static_cast<int64_t>(*task.num_chunks)) Add(chunk, lane);
  }

  MONO_DEVICE float* Row(int64_t chunk) const { return task.sums + chunk * task.dim; }

  // Calls body(column) for this lane's columns.
  template <typename Body>
  MONO_DEVICE void ForColumns(int lane, const Body& body) const {
    const int own = lane & ((1 << log_lanes) - 1);
    for (int c = own * kSize; c < task.dim; c += kSize << log_lanes) body(c);
  }

  MONO_DEVICE void Add(int64_t chunk, int lane) const {
    const SumChunk what = task.chunks[chunk];
    if (what.id == kNoChunk) return;
    const int64_t begin = task.batches.begins[what.batch];
    const uint32_t* const starts = task.starts + begin + what.batch + what.id;
    const uint32_t start = starts[0], all = starts[1] - start;
    const uint32_t* const order = task.order + begin + start + what.number * kSumChunk;
    const uint32_t left = all - what.number * kSumChunk;
    const FloatRows& gradients = task.batches.gradients[what.batch];
    ForColumns(lane, [&](int c) {
      const Pack<kSize> sum = AddInOrder<kSize>(
          left < kSumChunk ? left : kSumChunk,
          [&](uint32_t k) { return gradients.LoadOnce<kSize, kType>(order[k], c); });
      StoreAligned<kSize>(sum, Row(chunk) + c);
    });
    AddUp(chunk - what.number, what.number, (all + kSumChunk - 1) / kSumChunk, lane);
  }

  // Chunk `number` of the id whose chunks begin at `first` is added up.
  MONO_DEVICE void AddUp(int64_t first, uint32_t number, uint32_t all, int lane) const {
    int64_t width = 1;  // chunks that a sum stands for
    for (int level = 0; width < all; ++level, width *= kSumChunk) {
      number /= kSumChunk;
      const int64_t begin = first + number * width * kSumChunk;
      const int64_t rest = (first + all - begin + width - 1) / width;
      const uint32_t count = rest < kSumChunk ? static_cast<uint32_t>(rest) : kSumChunk;
      if (count == 1) continue;
      // The counters of different levels lie at different chunks: begin is a multiple of
      // kSumChunk behind the first.
      if (!IsLast(task.arrived + begin + level, count, lane)) return;
      ForColumns(lane, [&](int c) {
        const Pack<kSize> sum = AddInOrder<kSize>(
            count, [&](uint32_t k) { return LoadSum<kSize>(Row(begin + k * width) + c); });
        StoreAligned<kSize>(sum, Row(begin) + c);
      });
    }
  }

  // Whether the lanes of a tile come last of `count` tiles.
  MONO_DEVICE bool IsLast(uint32_t* arrived, uint32_t count, int lane) const {
#if defined(__CUDACC__)
    const unsigned lanes = log_lanes == 5 ? kAllLanes : (1u << (1 << log_lanes)) - 1;
    const int leader = lane >> log_lanes << log_lanes;
    const unsigned tile = lanes << leader;
    __threadfence();
    __syncwarp(tile);
    uint32_t before = 0;
    if (lane == leader) before = CountArrival(arrived);
    before = __shfl_sync(tile, before, leader);
    __threadfence();
    return before == count - 1;
#else
    (void)lane;
    return CountArrival(arrived) == count - 1;
#endif
  }
};

template <int kSize, FloatType kType>
int LaunchSumsOf(Stream stream, const SumTask& task) {
  const int log_warp = LogLanes(kWarpLanes, 5);
  const int log_lanes = LogLanes(CeilDiv(task.dim, kSize), log_warp);
  const int64_t words = CeilDiv(task.most_chunks, int64_t{1} << (log_warp - log_lanes));
  // How many chunks there are, only the device knows: as many warps as it holds share them.
  return ForWarps<3>(stream, words, kFewBlocks, AddChunks<kSize, kType>{task, log_lanes});
}

}  // namespace

// Those of 16 bits that are not packed were turned into 32 before.
int LaunchSums(Stream stream, const SumTask& task, FloatType type, bool packed) {
  switch (type) {
    case FloatType::kFloat16:
      return LaunchSumsOf<4, FloatType::kFloat16>(stream, task);
    case FloatType::kBfloat16:
      return LaunchSumsOf<4, FloatType::kBfloat16>(stream, task);
    default:
      return packed ? LaunchSumsOf<4, FloatType::kFloat32>(stream, task)
                    : LaunchSumsOf<1, FloatType::kFloat32>(stream, task);
  }
}

}  // namespace gpu
}  // namespace monolith
