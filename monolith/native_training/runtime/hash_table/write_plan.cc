#include "monolith/native_training/runtime/hash_table/write_plan.h"

#include <algorithm>
#include <atomic>
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

// For several writers of one table.
constexpr int64_t kGroupsOfOneThread = 8;
// Two threads take a group each: the fewer groups, the more of the values a group reads follow each
// other. More threads need more groups, so that one that starts late delays nobody, and because
// their number is rounded down to a power of two.
constexpr int64_t kGroupsPerThread = 4;
// Fewer ids do not fill the pipeline of a group.
constexpr int64_t kMinGroupIds = 256;
// So that the sums of a group stay in the second-level cache.
constexpr int64_t kDedupGroupIds = 1024;

// One tile of one write, sorted by groups of shards.
struct SortedTile {
  const WriteTile* tile;
  int group_bits;
  BatchEntry* entries;
  uint64_t* hashes;
  ShardOffsets offsets;  // of groups
};

struct PlanScratch {
  std::vector<uint64_t> hashes;
  std::vector<BatchEntry> entries;
  std::vector<SortedTile> tiles;
  std::vector<int64_t> first_tile;  // of each write, and the end
  std::vector<int64_t> first_unit;  // of each write, and the end
};

PlanScratch* ThreadPlanScratch() {
  thread_local PlanScratch scratch;
  return &scratch;
}

// 2^bits groups of shards for a write of n ids.
int GroupBits(int64_t n, int threads, bool dedup) {
  int64_t groups = threads == 1   ? kGroupsOfOneThread
                   : threads == 2 ? 2
                                  : kGroupsPerThread * threads;
  if (dedup) groups = std::max(groups, n / kDedupGroupIds);
  groups = std::min(groups, n / kMinGroupIds);
  int bits = 0;
  while (bits < kShardBits && int64_t{2} << bits <= groups) ++bits;
  return bits;
}

int FirstShard(int group, int group_bits) { return group << (kShardBits - group_bits); }

// Distinct ids of one group with their summed values, in order of first occurrence.
class DedupScratch {
 public:
  void Collect(const SortedTile* begin, const SortedTile* end, int group, int64_t dim) {
    int64_t total = 0;
    for (const SortedTile* tile = begin; tile != end; ++tile) {
      total += tile->offsets[group + 1] - tile->offsets[group];
    }
    size_t buckets = 16;
    while (buckets < static_cast<size_t>(2 * total)) buckets *= 2;
    buckets_.assign(buckets, 0);
    entries_.clear();
    counts_.clear();
    if (sums_.size() < static_cast<size_t>(total * dim)) sums_.resize(total * dim);
    for (const SortedTile* tile = begin; tile != end; ++tile) {
      for (uint32_t i = tile->offsets[group]; i < tile->offsets[group + 1]; ++i) {
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

void RunGroup(const PlannedWrite& write, const SortedTile* begin, const SortedTile* end, int group,
              int group_bits) {
  const int shard_begin = FirstShard(group, group_bits);
  const int shard_end = FirstShard(group + 1, group_bits);
  if (write.dedup) {
    thread_local DedupScratch scratch;
    scratch.Collect(begin, end, group, write.job->table->dim());
    WriteTile tile;
    tile.n = static_cast<int64_t>(scratch.entries().size());
    tile.values = scratch.sums();
    tile.counts = scratch.counts();
    WriteStages(write.job, tile).Run(scratch.entries().data(), tile.n, shard_begin, shard_end);
    return;
  }
  for (const SortedTile* tile = begin; tile != end; ++tile) {
    const uint32_t from = tile->offsets[group];
    WriteStages(write.job, *tile->tile)
        .Run(tile->entries + from, tile->offsets[group + 1] - from, shard_begin, shard_end);
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

// One thread, no dedup: in the order of the batch where nobody is in the way. Else a tile is
// sorted, and others wait for a group of shards only; threads begin at different ones.
void RunTileByTile(const PlannedWrite& write) {
  static std::atomic<int> num_threads{0};
  thread_local const int thread_number = num_threads.fetch_add(1, std::memory_order_relaxed);
  thread_local TileScratch scratch;
  const RowLayout& layout = write.job->table->layout();
  for (const WriteTile& tile : write.tiles) {
    const int64_t done = WriteStages(write.job, tile).TryRun();
    if (done == tile.n) continue;
    const WriteTile rest = tile.Rest(done, layout);
    StreamValues(rest, layout.dim);
    const int bits = GroupBits(rest.n, 1, false);
    const int groups = 1 << bits;
    scratch.Sort(rest.ids, rest.n, bits);
    WriteStages stages(write.job, rest);
    for (int i = 0; i < groups; ++i) {
      const int g = (i + 3 * thread_number) % groups;
      const uint32_t from = scratch.offsets[g];
      stages.Run(scratch.entries.data() + from, scratch.offsets[g + 1] - from, FirstShard(g, bits),
                 FirstShard(g + 1, bits));
    }
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

void Plan(const std::vector<PlannedWrite>& writes, int64_t total, int threads, PlanScratch* plan) {
  if (static_cast<int64_t>(plan->entries.size()) < total) {
    plan->hashes.resize(total);
    plan->entries.resize(total);
  }
  plan->tiles.clear();
  plan->first_tile.clear();
  plan->first_unit.clear();
  int64_t at = 0, units = 0;
  for (const PlannedWrite& write : writes) {
    plan->first_tile.push_back(static_cast<int64_t>(plan->tiles.size()));
    plan->first_unit.push_back(units);
    const int bits = GroupBits(write.NumIds(), threads, write.dedup);
    units += int64_t{1} << bits;
    for (const WriteTile& tile : write.tiles) {
      plan->tiles.push_back({&tile, bits, plan->entries.data() + at, plan->hashes.data() + at, {}});
      at += tile.n;
    }
  }
  plan->first_tile.push_back(static_cast<int64_t>(plan->tiles.size()));
  plan->first_unit.push_back(units);
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
  Plan(writes, total, runner == nullptr ? 1 : runner->NumThreads(), plan);
  const int64_t num_tiles = static_cast<int64_t>(plan->tiles.size());
  RunParallel(runner, num_tiles, 10 * total / num_tiles, [plan](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      SortedTile* sorted = &plan->tiles[i];
      SortByShards(sorted->tile->ids, sorted->tile->n, sorted->group_bits, sorted->hashes,
                   sorted->entries, sorted->offsets);
    }
  });
  const int64_t units = plan->first_unit.back();
  RunParallel(runner, units, cost / units + 1, [plan, &writes](int64_t begin, int64_t end) {
    const std::vector<int64_t>& first_unit = plan->first_unit;
    int64_t w = std::upper_bound(first_unit.begin(), first_unit.end(), begin) - first_unit.begin();
    for (int64_t unit = begin; unit < end; ++unit) {
      while (unit >= first_unit[w]) ++w;  // of the write behind
      const SortedTile* const first = plan->tiles.data() + plan->first_tile[w - 1];
      const SortedTile* const last = plan->tiles.data() + plan->first_tile[w];
      if (first == last) continue;
      RunGroup(writes[w - 1], first, last, static_cast<int>(unit - first_unit[w - 1]),
               first->group_bits);
    }
  });
  if (plan->entries.size() > kMaxKeptEntries) *plan = PlanScratch();
}

}  // namespace engine
}  // namespace monolith
