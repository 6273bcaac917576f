#include "monolith/native_training/runtime/hash_table/batch/write_plan.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "monolith/native_training/runtime/concurrency/spin_wait.h"
#include "monolith/native_training/runtime/distribution/sum_duplicates.h"
#include "monolith/native_training/runtime/hash_table/index/shard_groups.h"

namespace monolith {
namespace engine {
namespace {

// Batches below this run in the calling thread: handing them out costs more than it saves.
constexpr int64_t kMinParallelIds = 1024;
// Scratch above this many entries, or floats, is given back after the batch.
constexpr size_t kMaxKeptEntries = size_t{4} << 20;
constexpr int64_t kMaxKeptFloats = int64_t{8} << 20;

// For several writers of one table.
constexpr int64_t kGroupsOfOneThread = 8;
// Two threads take a group each: the fewer groups, the more of the values a group reads follow each
// other. More threads need more groups, because their number is rounded down to a power of two. Of
// many tables each thread takes whole ones.
constexpr int64_t kGroupsPerThread = 4;
// Fewer ids do not fill the pipeline of a group.
constexpr int64_t kMinGroupIds = 256;
// The fewest ids of a group that are written at a time: every block fills the pipeline anew.
constexpr int64_t kMinBlockIds = 1024;
// So that the sums of a group stay in the second-level cache.
constexpr int64_t kDedupGroupIds = 1024;

// One tile of one write, and the positions of its ids by group.
struct PlannedTile {
  const WriteTile* tile;
  int group_bits;
  uint8_t* groups;
  uint32_t* positions;  // null: all ids are one group, and taken as they come
  ShardOffsets offsets;
};

// Groups the ids of tiles as threads come to need them. All threads walk over the tiles in the same
// order, so a thread that finds a tile not ready prepares the next one that none has begun: there
// is no phase of its own for which threads would have to be woken a second time, and what was just
// grouped is still in the cache.
class TilePreparation {
 public:
  void Begin(PlannedTile* tiles, int64_t num_tiles) {
    tiles_ = tiles;
    num_tiles_ = num_tiles;
    next_.store(0, std::memory_order_relaxed);
    if (capacity_ < num_tiles) {
      ready_ = std::make_unique<std::atomic<bool>[]>(num_tiles);
      capacity_ = num_tiles;
    }
    for (int64_t i = 0; i < num_tiles; ++i) ready_[i].store(false, std::memory_order_relaxed);
  }

  // Returns when tile number i can be read.
  void Await(int64_t i) {
    const auto is_ready = [this, i] { return ready_[i].load(std::memory_order_acquire); };
    while (!is_ready()) {
      if (!PrepareNext()) SpinUntil(is_ready);
    }
  }

 private:
  // False: all tiles are ready, or in the hands of a thread that is at work on them.
  bool PrepareNext() {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= num_tiles_) return false;
    PlannedTile* const planned = tiles_ + i;
    if (planned->positions != nullptr) {
      GroupPositions(planned->tile->ids, planned->tile->n, planned->group_bits, planned->groups,
                     planned->positions, planned->offsets);
    }
    ready_[i].store(true, std::memory_order_release);
    return true;
  }

  PlannedTile* tiles_ = nullptr;
  int64_t num_tiles_ = 0;
  std::atomic<int64_t> next_{0};
  std::unique_ptr<std::atomic<bool>[]> ready_;
  int64_t capacity_ = 0;
};

// A group of a write, and the tiles that it still has before it.
struct PlannedGroup {
  const PlannedWrite* write;
  int group;
  int64_t next_tile;
  int64_t last_tile;
  int64_t block_tiles;  // to be applied at a time
};

// The groups that no thread works on, least advanced first. A thread takes one, applies a block of
// its tiles and puts it back. So two threads keep to a group each, and one that waits for the other
// to wake up has applied some of both until then.
class GroupQueue {
 public:
  void Clear() {
    groups_.clear();
    first_ = 0;
  }
  void Push(const PlannedGroup& group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(group);
  }
  bool Pop(PlannedGroup* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (first_ == groups_.size()) return false;
    *group = groups_[first_++];
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<PlannedGroup> groups_;
  size_t first_ = 0;  // those before it were taken
};

struct PlanScratch {
  std::vector<uint8_t> groups;
  std::vector<uint32_t> positions;
  std::vector<PlannedTile> tiles;
  TilePreparation preparation;
  GroupQueue queue;
};

std::unique_ptr<PlanScratch>& ThreadPlanScratch() {
  thread_local std::unique_ptr<PlanScratch> scratch = std::make_unique<PlanScratch>();
  return scratch;
}

int64_t EvenShare(int64_t n, int64_t parts) {
  return (n + parts - 1) / std::max<int64_t>(1, parts);
}

// 2^bits groups of shards for a write of n of `total` ids.
int GroupBits(int64_t n, int64_t total, int threads, bool dedup) {
  int64_t groups = threads == 1                 ? kGroupsOfOneThread
                   : threads == 2 && n == total ? 2
                                                : kGroupsPerThread * threads * n / total;
  if (dedup) groups = std::max(groups, n / kDedupGroupIds);
  groups = std::min(groups, n / kMinGroupIds);
  int bits = 0;
  while (bits < kShardBits && int64_t{2} << bits <= groups) ++bits;
  return bits;
}

// Sums the gradients of equal ids and applies them to shards that hold all of these. `add` adds at
// most `max_ids` ids to the sums.
template <typename Add>
void WriteSums(const PlannedWrite& write, int64_t max_ids, int shard_begin, int shard_end,
               const Add& add) {
  thread_local distribution::SumsById sums;
  const int64_t dim = write.job->table->dim();
  sums.Clear(max_ids, dim);
  add(&sums);
  WriteTile tile;
  tile.ids = sums.ids();
  tile.n = sums.size();
  tile.values = sums.sums();
  tile.counts = write.count_once ? nullptr : sums.counts();
  WriteStages(write.job, tile).RunAll(shard_begin, shard_end);
  if (max_ids * dim > kMaxKeptFloats) sums = distribution::SumsById();
}

// Applies the ids of one group in the tiles [begin, end) of the plan.
void RunGroup(const PlannedWrite& write, PlanScratch* plan, int64_t begin, int64_t end, int group) {
  const int group_bits = plan->tiles[begin].group_bits;
  const int shard_begin = FirstShard(group, group_bits);
  const int shard_end = FirstShard(group + 1, group_bits);
  if (plan->tiles[begin].positions == nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      WriteStages(write.job, *plan->tiles[i].tile).RunAll(shard_begin, shard_end);
    }
    return;
  }
  for (int64_t i = begin; i < end; ++i) plan->preparation.Await(i);
  if (!write.dedup) {
    for (int64_t i = begin; i < end; ++i) {
      const PlannedTile& tile = plan->tiles[i];
      const uint32_t from = tile.offsets[group];
      WriteStages(write.job, *tile.tile)
          .Run(tile.positions + from, tile.offsets[group + 1] - from, shard_begin, shard_end);
    }
    return;
  }
  int64_t total = 0;
  for (int64_t i = begin; i < end; ++i) {
    total += plan->tiles[i].offsets[group + 1] - plan->tiles[i].offsets[group];
  }
  WriteSums(write, total, shard_begin, shard_end, [&](distribution::SumsById* sums) {
    for (int64_t i = begin; i < end; ++i) {
      const PlannedTile& tile = plan->tiles[i];
      const uint32_t* const positions = tile.positions + tile.offsets[group];
      sums->Add(tile.tile->ids, tile.tile->values, tile.tile->stride,
                tile.offsets[group + 1] - tile.offsets[group],
                [positions](int64_t k) { return int64_t{positions[k]}; });
    }
  });
}

// Applies all ids in the order of the batch.
void RunInOrder(const PlannedWrite& write) {
  if (!write.dedup) {
    for (const WriteTile& tile : write.tiles) WriteStages(write.job, tile).RunAll(0, kNumShards);
    return;
  }
  WriteSums(write, write.NumIds(), 0, kNumShards, [&](distribution::SumsById* sums) {
    for (const WriteTile& tile : write.tiles) {
      sums->Add(tile.ids, tile.values, tile.stride, tile.n, [](int64_t k) { return k; });
    }
  });
}

// Applies the next block of some group. False: none is free, and threads that have one will go on
// with it.
bool RunNextBlock(PlanScratch* plan) {
  PlannedGroup next;
  if (!plan->queue.Pop(&next)) return false;
  const int64_t end = std::min(next.last_tile, next.next_tile + next.block_tiles);
  RunGroup(*next.write, plan, next.next_tile, end, next.group);
  next.next_tile = end;
  if (end < next.last_tile) plan->queue.Push(next);
  return true;
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
  WriteRooms(const WriteRooms&) = delete;
  WriteRooms& operator=(const WriteRooms&) = delete;

  bool HaveOthers() const {
    return std::any_of(writes_.begin(), writes_.end(), [](const PlannedWrite& write) {
      return TableInternals::Room(*write.job->table)->HasOtherWriters();
    });
  }

 private:
  const std::vector<PlannedWrite>& writes_;
};

// Returns the number of groups.
int64_t Plan(const std::vector<PlannedWrite>& writes, int64_t total, int threads,
             PlanScratch* plan) {
  if (static_cast<int64_t>(plan->positions.size()) < total) {
    plan->groups.resize(total);
    plan->positions.resize(total);
  }
  plan->tiles.clear();
  plan->queue.Clear();
  int64_t at = 0, num_groups = 0;
  for (const PlannedWrite& write : writes) {
    const int64_t n = write.NumIds();
    if (n == 0) continue;
    const int bits = GroupBits(n, total, threads, write.dedup);
    const bool in_order = bits == 0 && !write.dedup;
    const int groups = 1 << bits;
    const int64_t first_tile = static_cast<int64_t>(plan->tiles.size());
    for (const WriteTile& tile : write.tiles) {
      plan->tiles.push_back({&tile,
                             bits,
                             plan->groups.data() + at,
                             in_order ? nullptr : plan->positions.data() + at,
                             {}});
      at += tile.n;
    }
    const int64_t num_tiles = static_cast<int64_t>(write.tiles.size());
    const int64_t blocks =
        write.dedup ? 1 : std::clamp<int64_t>(n / (groups * kMinBlockIds), 1, num_tiles);
    const int64_t block_tiles = EvenShare(num_tiles, blocks);
    for (int g = 0; g < groups; ++g) {
      plan->queue.Push({&write, g, first_tile, first_tile + num_tiles, block_tiles});
    }
    num_groups += groups;
  }
  plan->preparation.Begin(plan->tiles.data(), static_cast<int64_t>(plan->tiles.size()));
  return num_groups;
}

// Ids per tile so that the tiles of a batch divide evenly among `threads`: at least three each, so
// that one that starts late delays no other.
int64_t TileSize(int64_t n, int threads) {
  if (threads == 1) return std::max<int64_t>(256, EvenShare(n, (n + kTileIds - 1) / kTileIds));
  const int64_t round_ids = threads * (kTileIds / 2);
  const int64_t rounds = std::max<int64_t>(3, (n + round_ids - 1) / round_ids);
  return std::max<int64_t>(1024, EvenShare(n, rounds * threads));
}

}  // namespace

void PlannedWrite::AddSpan(const int64_t* ids, int64_t n, const float* values, int threads,
                           int64_t stride) {
  const int64_t size = TileSize(n, threads);
  if (stride == 0) stride = job->table->dim();
  for (int64_t begin = 0; begin < n; begin += size) {
    WriteTile tile;
    tile.ids = ids + begin;
    tile.n = std::min(size, n - begin);
    tile.values = values == nullptr ? nullptr : values + begin * stride;
    tile.stride = stride;
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
  for (const PlannedWrite& write : writes) {
    total += write.NumIds();
    cost += 20 * write.NumIds() * write.job->table->dim();
  }
  if (total == 0) return;
  const WriteRooms rooms(writes);
  const int threads = runner == nullptr || total < kMinParallelIds ? 1 : runner->NumThreads();
  if (threads == 1 && !rooms.HaveOthers()) {
    // In the order of the batch, which is faster.
    for (const PlannedWrite& write : writes) RunInOrder(write);
    return;
  }

  PlanScratch* const plan = ThreadPlanScratch().get();
  const int64_t groups = Plan(writes, total, threads, plan);
  RunSteps(threads == 1 ? nullptr : runner, groups, cost, [plan] { return RunNextBlock(plan); });
  if (plan->positions.size() > kMaxKeptEntries) {
    ThreadPlanScratch() = std::make_unique<PlanScratch>();
  }
}

}  // namespace engine
}  // namespace monolith
