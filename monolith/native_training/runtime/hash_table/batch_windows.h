// Tiles of a batch, sorted by shard, and the pipeline of windows of lookups that need shard locks.
//
//   ids      | tile 0 (<= kTileIds)         | tile 1                    | ...
//   entries  | shard 0 | shard 1 | ... | 63 | shard 0 | ...               stable counting sort
//   windows  | w0 | w1 | w2 |                                   <= kWindow ids of one shard
//
//   Fetch w0   Fetch w1   Fetch w2     Fetch w3    ...   prefetch home lines of the index
//              Probe w0   Probe w1     Probe w2    ...   prefetch rows, or the next lines
//                         Resolve w0   Resolve w1  ...   keys that are not in their home line
//                                      Finish w0   ...   copy
//
// A tile is small enough that its output or gradient rows stay in the second-level cache although
// they are visited in another order. Between two stages of one window lies the work of three other
// windows: that is what hides a cache miss.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WINDOWS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WINDOWS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/hash_table/feature_id.h"
#include "monolith/native_training/runtime/hash_table/flat_index.h"

namespace monolith {
namespace engine {

constexpr int kWindow = 32;
constexpr int64_t kTileIds = 8192;

struct BatchEntry {
  int64_t key;
  uint32_t hash;      // low 32 bits of MixId(key)
  uint32_t position;  // of the id inside its tile
};

using ShardOffsets = uint32_t[kNumShards + 1];

// Sorts n <= 2^32 ids into 2^group_bits groups of neighbouring shards, keeping their order inside a
// group: entries[offsets[g] .. offsets[g + 1]) belong to group g. `hashes` is scratch for n words.
inline void SortByShards(const int64_t* ids, int64_t n, int group_bits, uint64_t* hashes,
                         BatchEntry* entries, ShardOffsets& offsets) {
  const int groups = 1 << group_bits;
  const int shift = kShardBits - group_bits;
  uint32_t next[kNumShards] = {};
  for (int64_t i = 0; i < n; ++i) {
    hashes[i] = MixId(ids[i]);
    ++next[ShardOf(hashes[i]) >> shift];
  }
  uint32_t sum = 0;
  for (int g = 0; g < groups; ++g) {
    offsets[g] = sum;
    sum += next[g];
    next[g] = offsets[g];
  }
  offsets[groups] = sum;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i];
    entries[next[ShardOf(hash) >> shift]++] = {ids[i], static_cast<uint32_t>(hash),
                                               static_cast<uint32_t>(i)};
  }
}

// Sorted tile in memory that is reused from call to call.
struct TileScratch {
  std::vector<uint64_t> hashes;
  std::vector<BatchEntry> entries;
  ShardOffsets offsets;

  void Sort(const int64_t* ids, int64_t n, int group_bits) {
    if (static_cast<int64_t>(entries.size()) < n) {
      hashes.resize(n);
      entries.resize(n);
    }
    SortByShards(ids, n, group_bits, hashes.data(), entries.data(), offsets);
  }
};

struct Window {
  int shard;
  bool first;  // of its shard
  bool last;   // of its shard
  int count;
  const BatchEntry* entries;
  const char* rows[kWindow];  // null: absent
  int pending[kWindow];       // entries that Probe left to Resolve, ascending
  int num_pending;
};

// Sends the entries of all shards through stages.Fetch, Probe, Resolve and Finish.
template <typename Stages>
void RunWindows(const BatchEntry* entries, const ShardOffsets& offsets, Stages* stages) {
  Window ring[4];
  int shard = 0;
  uint32_t at = 0;
  int64_t end = std::numeric_limits<int64_t>::max() - 3;  // number of windows, once known
  for (int64_t step = 0; step < end + 3; ++step) {
    if (step < end) {
      while (shard < kNumShards && at == offsets[shard + 1]) ++shard;
      if (shard == kNumShards) {
        end = step;
      } else {
        Window* window = &ring[step % 4];
        const uint32_t stop = std::min(at + kWindow, offsets[shard + 1]);
        window->shard = shard;
        window->first = at == offsets[shard];
        window->last = stop == offsets[shard + 1];
        window->count = static_cast<int>(stop - at);
        window->entries = entries + at;
        at = stop;
        stages->Fetch(window);
      }
    }
    if (step >= 1 && step - 1 < end) stages->Probe(&ring[(step - 1) % 4]);
    if (step >= 2 && step - 2 < end) stages->Resolve(&ring[(step - 2) % 4]);
    if (step >= 3 && step - 3 < end) stages->Finish(&ring[(step - 3) % 4]);
  }
}

// A search that goes on behind `line` rarely needs more than two lines. Reaching over the end of
// the index is harmless.
__attribute__((always_inline)) inline void PrefetchOverflow(const FlatIndex::Line* line) {
  concurrency::PrefetchForRead(line + 1);
  concurrency::PrefetchForRead(line + 2);
}

// Prefetches the cache lines of [begin, begin + bytes), at most the first eight: wide rows are left
// to the hardware prefetcher, which follows them once they are read. The last line is often
// prefetched twice, which is cheaper than to find out.
template <int kForWrite>
__attribute__((always_inline)) inline void PrefetchBytes(const void* begin, int64_t bytes) {
  const char* const first = static_cast<const char*>(begin);
  bytes = std::min<int64_t>(bytes, 512);
  for (int64_t at = 0; at < bytes; at += 64) {
    kForWrite ? concurrency::PrefetchForWrite(first + at)
              : concurrency::PrefetchForRead(first + at);
  }
  const char* const last = first + bytes - 1;
  kForWrite ? concurrency::PrefetchForWrite(last) : concurrency::PrefetchForRead(last);
}

// Ids per tile so that the tiles of a batch divide evenly among `threads`: at least three each, so
// that one that starts late delays nobody.
inline int64_t TileSize(int64_t n, int threads) {
  int64_t rounds = (n + kTileIds * threads - 1) / (kTileIds * threads);
  if (threads > 1) rounds = std::max<int64_t>(rounds, 3);
  const int64_t tiles = std::max<int64_t>(1, rounds * threads);
  return std::max<int64_t>(threads > 1 ? 1024 : 256, (n + tiles - 1) / tiles);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WINDOWS_H_
