#include "monolith/native_training/runtime/hash_table/write_plan.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace monolith {
namespace engine {
namespace {

// Batches below this run in the calling thread: handing them out costs more than it saves.
constexpr int64_t kMinParallelIds = 1024;
constexpr int64_t kMaxStreamedBytes = int64_t{512} << 10;
// Scratch above this many entries is given back after the batch.
constexpr size_t kMaxKeptEntries = size_t{4} << 20;

// One tile of one write, sorted.
struct SortedTile {
  const WriteTile* tile;
  BatchEntry* entries;
  uint64_t* hashes;
  ShardOffsets offsets;
};

struct PlanScratch {
  std::vector<uint64_t> hashes;
  std::vector<BatchEntry> entries;
  std::vector<SortedTile> tiles;
  std::vector<int64_t> first_tile;  // of each write, and the end
};

PlanScratch* ThreadPlanScratch() {
  thread_local PlanScratch scratch;
  return &scratch;
}

void RunTile(WriteJob* job, const SortedTile& sorted, int shard_begin, int shard_end) {
  WriteStages stages(job, *sorted.tile);
  RunWindows(sorted.entries, sorted.offsets, shard_begin, shard_end, &stages);
}

// Distinct ids of one shard with their summed values, in order of first occurrence.
class DedupScratch {
 public:
  void Collect(const SortedTile* begin, const SortedTile* end, int shard, int64_t dim) {
    int64_t total = 0;
    for (const SortedTile* tile = begin; tile != end; ++tile) {
      total += tile->offsets[shard + 1] - tile->offsets[shard];
    }
    size_t buckets = 16;
    while (buckets < static_cast<size_t>(2 * total)) buckets *= 2;
    buckets_.assign(buckets, 0);
    entries_.clear();
    counts_.clear();
    if (sums_.size() < static_cast<size_t>(total * dim)) sums_.resize(total * dim);
    for (const SortedTile* tile = begin; tile != end; ++tile) {
      for (uint32_t i = tile->offsets[shard]; i < tile->offsets[shard + 1]; ++i) {
        Add(tile->entries[i], tile->tile->values + tile->entries[i].position * dim, dim);
      }
    }
  }

  const std::vector<BatchEntry>& entries() const { return entries_; }
  const float* sums() const { return sums_.data(); }
  const uint32_t* counts() const { return counts_.data(); }

 private:
  void Add(const BatchEntry& entry, const float* __restrict value, int64_t dim) {
    size_t at = entry.hash & (buckets_.size() - 1);
    while (buckets_[at] != 0 && entries_[buckets_[at] - 1].key != entry.key) {
      at = (at + 1) & (buckets_.size() - 1);
    }
    if (buckets_[at] == 0) {
      const uint32_t index = static_cast<uint32_t>(entries_.size());
      std::memcpy(sums_.data() + index * dim, value, 4 * dim);
      entries_.push_back({entry.key, entry.hash, index});
      counts_.push_back(1);
      buckets_[at] = index + 1;
      return;
    }
    const uint32_t index = buckets_[at] - 1;
    ++counts_[index];
    float* __restrict sum = sums_.data() + index * dim;
    for (int64_t i = 0; i < dim; ++i) sum[i] += value[i];
  }

  std::vector<uint32_t> buckets_;  // 1 + index into entries_, 0: free
  std::vector<BatchEntry> entries_;
  std::vector<uint32_t> counts_;
  std::vector<float> sums_;
};

void RunShardDeduplicated(WriteJob* job, const SortedTile* begin, const SortedTile* end,
                          int shard) {
  thread_local DedupScratch scratch;
  scratch.Collect(begin, end, shard, job->table->dim());
  WriteTile tile;
  tile.n = static_cast<int64_t>(scratch.entries().size());
  tile.values = scratch.sums();
  tile.counts = scratch.counts();
  ShardOffsets offsets = {};
  std::fill(offsets + shard + 1, offsets + kNumShards + 1, static_cast<uint32_t>(tile.n));
  WriteStages stages(job, tile);
  RunWindows(scratch.entries().data(), offsets, shard, shard + 1, &stages);
}

void RunShards(const PlannedWrite& write, const SortedTile* begin, const SortedTile* end,
               int shard_begin, int shard_end) {
  if (write.dedup) {
    for (int shard = shard_begin; shard < shard_end; ++shard) {
      RunShardDeduplicated(write.job, begin, end, shard);
    }
    return;
  }
  for (const SortedTile* tile = begin; tile != end; ++tile) {
    RunTile(write.job, *tile, shard_begin, shard_end);
  }
}

// Brings the values of a tile into the second-level cache front to back, because they are then
// visited in shard order.
void StreamValues(const WriteTile& tile, int64_t dim) {
  if (tile.values == nullptr) return;
  const char* at = reinterpret_cast<const char*>(tile.values);
  const char* end = at + std::min<int64_t>(4 * dim * tile.n, kMaxStreamedBytes);
  for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

// One thread, no dedup: sort a tile and apply it while it is in the cache.
void RunTileByTile(const PlannedWrite& write) {
  thread_local TileScratch scratch;
  for (const WriteTile& tile : write.tiles) {
    StreamValues(tile, write.job->table->dim());
    scratch.Sort(tile.ids, tile.n);
    WriteStages stages(write.job, tile);
    RunWindows(scratch.entries.data(), scratch.offsets, 0, kNumShards, &stages);
  }
}

// The write rooms of all tables of a batch. A table that comes twice is entered twice, which is
// harmless.
class WriteRooms {
 public:
  explicit WriteRooms(const std::vector<PlannedWrite>& writes) : writes_(writes) {
    for (const PlannedWrite& write : writes_) TableInternals::Room(*write.job->table)->EnterWrite();
  }
  ~WriteRooms() {
    for (const PlannedWrite& write : writes_) TableInternals::Room(*write.job->table)->LeaveWrite();
  }

 private:
  const std::vector<PlannedWrite>& writes_;
};

void Plan(const std::vector<PlannedWrite>& writes, int64_t total, PlanScratch* plan) {
  if (static_cast<int64_t>(plan->entries.size()) < total) {
    plan->hashes.resize(total);
    plan->entries.resize(total);
  }
  plan->tiles.clear();
  plan->first_tile.clear();
  int64_t at = 0;
  for (const PlannedWrite& write : writes) {
    plan->first_tile.push_back(static_cast<int64_t>(plan->tiles.size()));
    for (const WriteTile& tile : write.tiles) {
      plan->tiles.push_back({&tile, plan->entries.data() + at, plan->hashes.data() + at, {}});
      at += tile.n;
    }
  }
  plan->first_tile.push_back(static_cast<int64_t>(plan->tiles.size()));
}

}  // namespace

void PlannedWrite::AddSpan(const int64_t* ids, int64_t n, const float* values, int threads) {
  const int64_t size = TileSize(n, threads);
  const int64_t dim = job->table->dim();
  for (int64_t begin = 0; begin < n; begin += size) {
    WriteTile tile;
    tile.ids = ids + begin;
    tile.n = std::min(size, n - begin);
    tile.values = values == nullptr ? nullptr : values + begin * dim;
    tiles.push_back(tile);
  }
}

int64_t PlannedWrite::NumIds() const {
  int64_t total = 0;
  for (const WriteTile& tile : tiles) total += tile.n;
  return total;
}

void RunWrites(const std::vector<PlannedWrite>& writes, ParallelRunner* runner) {
  int64_t total = 0, cost = 0;
  bool any_dedup = false;
  for (const PlannedWrite& write : writes) {
    total += write.NumIds();
    cost += 20 * write.NumIds() * write.job->table->dim();
    any_dedup |= write.dedup;
  }
  if (total == 0) return;
  const WriteRooms rooms(writes);
  if (total < kMinParallelIds) runner = nullptr;
  if (runner == nullptr && !any_dedup) {
    for (const PlannedWrite& write : writes) RunTileByTile(write);
    return;
  }

  PlanScratch* plan = ThreadPlanScratch();
  Plan(writes, total, plan);
  const int64_t num_tiles = static_cast<int64_t>(plan->tiles.size());
  RunParallel(runner, num_tiles, 10 * total / num_tiles, [plan](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      SortedTile* sorted = &plan->tiles[i];
      SortByShard(sorted->tile->ids, sorted->tile->n, sorted->hashes, sorted->entries,
                  sorted->offsets);
    }
  });
  const int64_t units = static_cast<int64_t>(writes.size()) * kNumShards;
  RunParallel(runner, units, cost / units + 1, [plan, &writes](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t w = begin / kNumShards;
      const int64_t stop = std::min(end, (w + 1) * kNumShards);
      const SortedTile* tiles = plan->tiles.data();
      RunShards(writes[w], tiles + plan->first_tile[w], tiles + plan->first_tile[w + 1],
                static_cast<int>(begin - w * kNumShards), static_cast<int>(stop - w * kNumShards));
      begin = stop;
    }
  });
  if (plan->entries.size() > kMaxKeptEntries) *plan = PlanScratch();
}

}  // namespace engine
}  // namespace monolith
