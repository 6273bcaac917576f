// Puts the numbers 0 to n - 1 into buckets by their keys, in order inside each bucket: in one pass,
// where a sort by as many bits takes two and counts before them.
//
// The numbers are cut into tiles. One launch counts each tile's numbers by bucket, two add up the
// counts of the tiles and of the buckets before, and the last moves (key, number) pairs to where
// the sums say. A warp counts for itself, so that order costs no waiting.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PARTITION_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PARTITION_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"

namespace monolith {
namespace gpu {

constexpr int64_t kMaxBuckets = 4096;  // whose counters a block has room for

// How n numbers are cut, and where the counts are.
struct Tiles {
  int64_t n;
  int64_t rows;  // of a tile: a multiple of kLanes, below 2^16 for the counters
  int64_t count;
  int64_t buckets;
  uint16_t* offsets;  // (tile, warp, bucket): in the tile, of the warps before
  uint32_t* counts;   // (tile, bucket): of the tile; then of the tiles before
  uint32_t* totals;   // of the buckets

  Tiles(int64_t numbers, int64_t num_buckets)
      : n(numbers), buckets(num_buckets), offsets(nullptr), counts(nullptr), totals(nullptr) {
    constexpr int64_t kLeast = 2048, kMost = 32768, kWanted = 256;
    rows = std::min(kMost, std::max(kLeast, CeilDiv(CeilDiv(n, kWanted), kLanes) * kLanes));
    count = CeilDiv(n, rows);
  }

  MONO_DEVICE int64_t RowsOf(int64_t tile) const {
    return n - tile * rows < rows ? n - tile * rows : rows;
  }
};

MONO_DEVICE int BucketOf(const Keys& of, uint32_t key) {
  return key < of.nowhere ? static_cast<int>(key >> of.shift) : -1;
}

// LoadKey: uint32_t operator()(int64_t number).
template <typename LoadKey>
struct CountTiles {
  LoadKey keys;
  Keys of;
  Tiles tiles;

  static constexpr int kMinBlocks = 3;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    const int64_t buckets = tiles.buckets, tile = block.number, first = tile * tiles.rows;
    uint16_t* const counters = block.At<uint16_t>(0);
    block.Each([&](int lane) {
      // Two at a time.
      for (int64_t i = lane; i < buckets * (kWarps / 2); i += kLanes) block.At<uint32_t>(0)[i] = 0;
    });
    block.CountInOrder(
        tiles.RowsOf(tile), tiles.rows / kWarps, counters, buckets,
        [&](int64_t i) { return keys(first + i); }, [&](uint32_t key) { return BucketOf(of, key); },
        [](int64_t, uint32_t, int, uint32_t) {});
    block.Each([&](int lane) {
      for (int64_t b = lane; b < buckets; b += kLanes) {
        uint32_t own[kWarps], sum = 0;
        MONO_UNROLL
        for (int w = 0; w < kWarps; ++w) own[w] = counters[w * buckets + b];
        MONO_UNROLL
        for (int w = 0; w < kWarps; ++w) {
          tiles.offsets[(tile * kWarps + w) * buckets + b] = static_cast<uint16_t>(sum);
          sum += own[w];
        }
        tiles.counts[tile * buckets + b] = sum;
      }
    });
  }
};

// Turns the counts of kWarp buckets into those of the tiles before.
struct SumTiles {
  Tiles tiles;
  int64_t share;  // of a warp

  static constexpr int kAtOnce = 8;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    uint32_t* const sums = block.At<uint32_t>(0);  // (warp, bucket)
    block.Each([&](int lane) {
      const int64_t bucket = block.number * kWarp + lane % kWarp;
      const int64_t begin = lane / kWarp * share;
      const int64_t end = begin + share < tiles.count ? begin + share : tiles.count;
      uint32_t sum = 0;
      for (int64_t t = begin; bucket < tiles.buckets && t < end; t += kAtOnce) {
        MONO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (t + k < end) sum += tiles.counts[(t + k) * tiles.buckets + bucket];
        }
      }
      sums[lane] = sum;
    });
    block.Each([&](int lane) {
      const int64_t bucket = block.number * kWarp + lane % kWarp;
      if (bucket >= tiles.buckets) return;
      const int64_t begin = lane / kWarp * share;
      const int64_t end = begin + share < tiles.count ? begin + share : tiles.count;
      uint32_t sum = 0;
      for (int w = 0; w < lane / kWarp; ++w) sum += sums[w * kWarp + lane % kWarp];
      for (int64_t t = begin; t < end; t += kAtOnce) {
        uint32_t own[kAtOnce];
        MONO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          own[k] = t + k < end ? tiles.counts[(t + k) * tiles.buckets + bucket] : 0;
        }
        MONO_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (t + k < end) tiles.counts[(t + k) * tiles.buckets + bucket] = sum;
          sum += own[k];
        }
      }
      if (lane / kWarp == kWarps - 1) tiles.totals[bucket] = sum;
    });
  }
};

// Where the buckets begin and end, and how many numbers they have together.
struct PlaceBuckets {
  Tiles tiles;
  Span* spans;
  int32_t* count;

  static constexpr int kOfLane = kMaxBuckets / kLanes;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    uint32_t* const sums = block.At<uint32_t>(0);
    block.Each([&](int lane) {
      uint32_t sum = 0;
      MONO_UNROLL
      for (int k = 0; k < kOfLane; ++k) {
        const int64_t bucket = lane * kOfLane + k;
        if (bucket < tiles.buckets) sum += tiles.totals[bucket];
      }
      sums[lane] = sum;
    });
    block.SumBefore(sums);
    block.Each([&](int lane) {
      uint32_t own[kOfLane], sum = sums[lane];
      MONO_UNROLL
      for (int k = 0; k < kOfLane; ++k) {
        const int64_t bucket = lane * kOfLane + k;
        own[k] = bucket < tiles.buckets ? tiles.totals[bucket] : 0;
      }
      MONO_UNROLL
      for (int k = 0; k < kOfLane; ++k) {
        const int64_t bucket = lane * kOfLane + k;
        if (bucket >= tiles.buckets) continue;
        const uint32_t end = sum + own[k];
        spans[bucket] = {static_cast<int32_t>(sum), static_cast<int32_t>(end)};
        sum = end;
      }
      if (lane == kLanes - 1) *count = static_cast<int32_t>(sum);
    });
  }
};

template <typename LoadKey>
struct MovePairs {
  LoadKey keys;
  Keys of;
  Tiles tiles;
  const Span* spans;
  int64_t counters_bytes;
  uint64_t* pairs;

  static constexpr int kMinBlocks = 2;

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    const int64_t buckets = tiles.buckets, tile = block.number, first = tile * tiles.rows;
    uint16_t* const counters = block.At<uint16_t>(0);
    uint32_t* const begins = block.At<uint32_t>(counters_bytes);
    block.Each([&](int lane) {
      // Two at a time.
      const auto* const from =
          reinterpret_cast<const uint32_t*>(tiles.offsets + tile * kWarps * buckets);
      for (int64_t i = lane; i < buckets * (kWarps / 2); i += kLanes) {
        block.At<uint32_t>(0)[i] = from[i];
      }
      for (int64_t b = lane; b < buckets; b += kLanes) {
        begins[b] = static_cast<uint32_t>(spans[b].begin) + tiles.counts[tile * buckets + b];
      }
    });
    block.CountInOrder(
        tiles.RowsOf(tile), tiles.rows / kWarps, counters, buckets,
        [&](int64_t i) { return keys(first + i); }, [&](uint32_t key) { return BucketOf(of, key); },
        [&](int64_t i, uint32_t key, int bucket, uint32_t number) {
          pairs[begins[bucket] + number] = uint64_t{key} << 32 | static_cast<uint32_t>(first + i);
        });
  }
};

// Sets the pairs, of which *count are in buckets, and the spans of the tiles.buckets buckets.
template <typename LoadKey>
int Partition(Stream stream, const LoadKey& keys, const Keys& of, const Tiles& tiles, Span* spans,
              int32_t* count, uint64_t* pairs) {
  const int64_t counters = tiles.buckets * kWarps * static_cast<int64_t>(sizeof(uint16_t));
  constexpr int64_t kSums = kLanes * static_cast<int64_t>(sizeof(uint32_t));
  MONO_GPU_TRY(ForBlocks(stream, tiles.count, counters, CountTiles<LoadKey>{keys, of, tiles}));
  MONO_GPU_TRY(ForBlocks(stream, CeilDiv(tiles.buckets, kWarp), kSums,
                         SumTiles{tiles, CeilDiv(tiles.count, kWarps)}));
  MONO_GPU_TRY(ForBlocks(stream, 1, kSums, PlaceBuckets{tiles, spans, count}));
  return ForBlocks(stream, tiles.count,
                   counters + tiles.buckets * static_cast<int64_t>(sizeof(uint32_t)),
                   MovePairs<LoadKey>{keys, of, tiles, spans, counters, pairs});
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_PARTITION_H_
