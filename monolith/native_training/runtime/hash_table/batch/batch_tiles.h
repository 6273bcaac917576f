// How batches are cut, and what their pipelines prefetch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_BATCH_TILES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_BATCH_TILES_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/hash_table/index/flat_index.h"

namespace monolith {
namespace engine {

// Ids of a tile at most: its output or gradient rows stay in the second-level cache although groups
// of shards visit them in another order.
constexpr int64_t kTileIds = 8192;

// A search that goes on behind `line` rarely needs more than two lines for an id that is there; one
// for a new id ends only at an empty slot, and often needs four. Reaching over the end of the index
// is harmless.
__attribute__((always_inline)) inline void PrefetchOverflow(const FlatIndex::Line* line,
                                                            bool for_new_id) {
  PrefetchForRead(line + 1);
  PrefetchForRead(line + 2);
  if (!for_new_id) return;
  PrefetchForRead(line + 3);
  PrefetchForRead(line + 4);
}

// Prefetches the cache lines of [begin, begin + bytes), at most the first eight: wide rows are left
// to the hardware prefetcher, which follows them once they are read. The last line is often
// prefetched twice, which is cheaper than to find out.
template <int kForWrite>
__attribute__((always_inline)) inline void PrefetchBytes(const void* begin, int64_t bytes) {
  const char* const first = static_cast<const char*>(begin);
  bytes = std::min<int64_t>(bytes, 512);
  for (int64_t at = 0; at < bytes; at += 64) {
    kForWrite ? PrefetchForWrite(first + at) : PrefetchForRead(first + at);
  }
  const char* const last = first + bytes - 1;
  kForWrite ? PrefetchForWrite(last) : PrefetchForRead(last);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_BATCH_TILES_H_
