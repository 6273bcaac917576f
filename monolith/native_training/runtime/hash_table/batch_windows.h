// Tiles of a batch, and the pipeline of windows of lookups that need shard locks.
//
//   ids        | tile 0 (<= kTileIds)         | tile 1                    | ...
//   positions  | shard 0 | shard 1 | ... | 63 | shard 0 | ...               see shard_groups.h
//   windows    | w0 | w1 | w2 |                                   <= kWindow ids of one shard
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

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/hash_table/feature_id.h"
#include "monolith/native_training/runtime/hash_table/flat_index.h"
#include "monolith/native_training/runtime/hash_table/shard_groups.h"

namespace monolith {
namespace engine {

constexpr int kWindow = 32;
constexpr int64_t kTileIds = 8192;

struct Window {
  int shard;
  bool first;  // of its shard
  bool last;   // of its shard
  int count;
  const uint32_t* positions;
  int64_t keys[kWindow];
  uint32_t hashes[kWindow];
  const char* rows[kWindow];  // null: absent
  int pending[kWindow];       // ids that Probe left to Resolve, ascending
  int num_pending;
};

// Sends ids by shard, all 64 of them, through stages.Fetch, Probe, Resolve and Finish.
template <typename Stages>
void RunWindows(const int64_t* ids, const GroupedTile& tile, Stages* stages) {
  const ShardOffsets& offsets = tile.offsets;
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
        window->positions = tile.positions.data() + at;
        for (int j = 0; j < window->count; ++j) {
          window->keys[j] = ids[window->positions[j]];
          window->hashes[j] = static_cast<uint32_t>(MixId(window->keys[j]));
        }
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

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WINDOWS_H_
