// Equal ids of batches: where they are, and the sums of their gradients. Batches of several tables
// go through the same launches, one after the other:
//
//   ids       7 3 7 7 3 9             of one table
//   firsts    0 1 0 0 1 5             claimed in a hash table of positions
//   sorted    0 0 0 1 1 5             a stable sort; order: 0 2 3 | 1 4 | 5
//   distinct  7 3 9   starts 0 3 5 6
//
// Gradients of an id that comes often are added by many lanes (table_sums.cu).
#include <algorithm>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/table_batches.h"
#include "monolith/native_training/runtime/gpu/table_duplicates.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"

namespace monolith {
namespace gpu {
namespace {

// Gives equal ids of a table one place in a hash table of positions, which keeps the first of them.
struct ClaimPlaces {
  JoinedBatches batches;
  engine::IdHash hash;
  uint32_t* places;
  uint32_t mask;
  uint32_t* place_of;

  MONO_DEVICE uint32_t Claim(const JoinedBatches::Part& part, int64_t id, uint32_t position,
                             uint32_t home) const {
    for (uint32_t place = home;; place = (place + 1) & mask) {
      uint32_t seen = places[place];
      if (seen == kNoPosition) {
        seen = CompareAndSwap(places + place, kNoPosition, position);
        if (seen == kNoPosition) return place;
      }
      if (seen < part.begin || seen >= part.end || part.ids[seen - part.begin] != id) continue;
      // The value there only becomes less, so an old one costs an atomic at most.
      if (position < seen) LowerTo(places + place, position);
      return place;
    }
  }

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const JoinedBatches::Part part = batches.PartOfWord(word);
    for (int k = 0; k < kIdsPerLane; ++k) {
      const uint32_t i = part.first + static_cast<uint32_t>(OwnId(lane, k));
      const bool wanted = i < part.end;
      const int64_t id = wanted ? part.ids[i - part.begin] : 0;
      // Other tables have other homes for it.
      const uint32_t home =
          (static_cast<uint32_t>(hash(id)) + static_cast<uint32_t>(part.job) * 0x9e3779b9u) & mask;
#if defined(__CUDACC__)
      // The first of equal ids in a warp claims for all of them. Those of one home are compared:
      // that is half the work, and others of that home are rare.
      const unsigned peers =
          __match_any_sync(kAllLanes, wanted ? home : 0x80000000u | static_cast<unsigned>(lane));
      const int leader = __ffs(peers) - 1;
      const bool follows = __shfl_sync(kAllLanes, id, leader) == id && leader != lane;
      uint32_t place = 0;
      if (wanted && !follows) place = Claim(part, id, i, home);
      const uint32_t of_leader = __shfl_sync(kAllLanes, place, leader);
      if (wanted) place_of[i] = follows ? of_leader : place;
#else
      if (wanted) place_of[i] = Claim(part, id, i, home);
#endif
    }
  }
};

// Numbers the positions of each table, each with the first one of its id.
struct TakeFirsts {
  JoinedBatches batches;
  const uint32_t* places;
  uint32_t* firsts;  // in: the place of every position
  uint32_t* numbers;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const JoinedBatches::Part part = batches.PartOfWord(word);
    for (int k = 0; k < kIdsPerLane; ++k) {
      const uint32_t i = part.first + static_cast<uint32_t>(OwnId(lane, k));
      if (i >= part.end) continue;
      firsts[i] = places[firsts[i]];
      numbers[i] = i - part.begin;
    }
  }
};

constexpr int kRowsOfLane = 8;
constexpr uint32_t kRoundRows = kLanes * kRowsOfLane;
constexpr int64_t kMostTiles = 1024;  // of one table: each tile adds up the counts of those before

// Counts the ids and chunks of a tile of sorted positions.
struct TileCounts {
  uint32_t heads;   // first positions of ids
  uint32_t chunks;  // beginnings of them
  uint32_t start;   // where the id of its first position starts
  uint32_t reserved;
};

// Tiles of sorted positions: first counts what they have, then numbers the ids and writes where
// they are, and what is to be added.
template <bool kWrites>
struct NumberIds {
  JoinedBatches batches;
  const uint32_t* firsts;  // sorted
  const uint32_t* order;
  uint32_t tile_rows;
  uint32_t fused;  // ids that come at most so often have no chunks
  TileCounts* counts;
  int64_t* distinct;
  uint32_t* starts;  // one more for each table
  uint32_t* sum_rows;
  uint32_t* totals;  // distinct ids of each table
  SumChunk* chunks;
  uint32_t* num_chunks;

  struct Shared {
    uint32_t heads[kLanes];
    uint32_t starts[kLanes];  // one more, 0: none
    uint32_t chunks[kLanes];
    uint32_t of_warps[kLanes / 32];
    uint32_t all_heads, all_starts, all_chunks;  // carried from round to round
    uint32_t low[2], high[2];
  };

  MONO_DEVICE bool IsHead(const JoinedBatches::Part& part, uint32_t i) const {
    return i == part.begin || firsts[i] != firsts[i - 1];
  }

  MONO_DEVICE bool BeginsChunk(const JoinedBatches::Part& part, uint32_t start, uint32_t i) const {
    if (i != start) return (i - start) % kSumChunk == 0 && fused != kNoPosition;
    const uint64_t last = uint64_t{i} + fused;
    return last < part.end && firsts[last] == firsts[i];
  }

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    Shared* const shared = block.At<Shared>(0);
    const JoinedBatches::Part part = batches.PartOfTile(block.number, tile_rows);
    const uint32_t last = part.end - part.first < tile_rows ? part.end : part.first + tile_rows;
    if (kWrites) {
      AddBefore(block, part, shared);
    } else {
      FindStart(block, part, shared);
    }
    for (uint32_t at = part.first; at < last; at += kRoundRows)
      Round(block, part, at, last, shared);
    block.Each([&](int lane) {
      if (lane != 0) return;
      if (!kWrites) {
        TileCounts* const count = counts + block.number;
        count->heads = shared->all_heads;
        count->chunks = shared->all_chunks;
        return;
      }
      if (last != part.end) return;
      starts[part.begin + part.job + shared->all_heads] = part.end - part.begin;
      totals[part.job] = shared->all_heads;
      if (part.job == batches.count - 1) *num_chunks = shared->all_chunks;
    });
  }

  // Adds the counts of the tiles before: ids are numbered in each table, chunks in all of them
  // together.
  MONO_DEVICE void AddBefore(const ThreadBlock& block, const JoinedBatches::Part& part,
                             Shared* shared) const {
    const int64_t first_of_table = batches.tiles[part.job];
    block.Each([&](int lane) {
      uint32_t heads = 0, own_chunks = 0;
      for (int64_t tile = lane; tile < block.number; tile += kLanes) {
        own_chunks += counts[tile].chunks;
        if (tile >= first_of_table) heads += counts[tile].heads;
      }
      shared->heads[lane] = heads;
      shared->chunks[lane] = own_chunks;
      if (lane == 0) {
        shared->all_heads = 0;
        shared->all_chunks = 0;
        shared->all_starts = counts[block.number].start + 1;
      }
    });
    const auto add = [](uint32_t a, uint32_t b) { return a + b; };
    ScanLanes(block, shared->heads, shared->of_warps, &shared->all_heads, add);
    ScanLanes(block, shared->chunks, shared->of_warps, &shared->all_chunks, add);
  }

  // Where the id of the first position starts: in earlier tiles, perhaps.
  MONO_DEVICE void FindStart(const ThreadBlock& block, const JoinedBatches::Part& part,
                             Shared* shared) const {
    const uint32_t key = firsts[part.first];
    block.Each([&](int lane) {
      if (lane != 0) return;
      shared->all_heads = 0;
      shared->all_chunks = 0;
      shared->low[0] = IsHead(part, part.first) ? part.first : part.begin;
      shared->high[0] = part.first;
    });
    int now = 0;
    while (shared->low[now] < shared->high[now]) {  // the start is one of [low, high]
      const uint32_t low = shared->low[now], high = shared->high[now];
      const uint32_t step = (high - low + kLanes - 1) / kLanes;
      const int next = 1 - now;
      block.Each([&](int lane) {
        const uint32_t i = low + static_cast<uint32_t>(lane) * step;
        if (i >= high) return;
        const bool is_in = firsts[i] == key;
        const bool before = lane > 0 && firsts[i - step] == key;
        if (is_in && !before) {
          shared->low[next] = lane > 0 ? i - step + 1 : i;
          shared->high[next] = i;
        } else if (!is_in && i + step >= high) {
          shared->low[next] = i + 1;
          shared->high[next] = high;
        }
      });
      now = next;
    }
    block.Each([&](int lane) {
      if (lane != 0) return;
      shared->all_starts = shared->low[now] + 1;
      counts[block.number].start = shared->low[now];
    });
  }

  MONO_DEVICE void Round(const ThreadBlock& block, const JoinedBatches::Part& part, uint32_t at,
                         uint32_t last, Shared* shared) const {
    block.Each([&](int lane) {
      uint32_t heads = 0, start = 0;
      const uint32_t first = at + static_cast<uint32_t>(lane) * kRowsOfLane;
      for (uint32_t i = first; i < first + kRowsOfLane && i < last; ++i) {
        if (!IsHead(part, i)) continue;
        ++heads;
        start = i + 1;
      }
      shared->heads[lane] = heads;
      shared->starts[lane] = start;
    });
    ScanLanes(block, shared->heads, shared->of_warps, &shared->all_heads,
              [](uint32_t a, uint32_t b) { return a + b; });
    ScanLanes(block, shared->starts, shared->of_warps, &shared->all_starts,
              [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    block.Each([&](int lane) {
      uint32_t begun = 0, start = shared->starts[lane] - 1;
      const uint32_t first = at + static_cast<uint32_t>(lane) * kRowsOfLane;
      for (uint32_t i = first; i < first + kRowsOfLane && i < last; ++i) {
        if (IsHead(part, i)) start = i;
        begun += BeginsChunk(part, start, i);
      }
      shared->chunks[lane] = begun;
    });
    ScanLanes(block, shared->chunks, shared->of_warps, &shared->all_chunks,
              [](uint32_t a, uint32_t b) { return a + b; });
    if (kWrites) block.Each([&](int lane) { WriteRows(part, at, last, lane, *shared); });
  }

  MONO_DEVICE void WriteRows(const JoinedBatches::Part& part, uint32_t at, uint32_t last, int lane,
                             const Shared& shared) const {
    uint32_t number = shared.heads[lane], start = shared.starts[lane] - 1;
    uint32_t chunk = shared.chunks[lane];
    const uint32_t first = at + static_cast<uint32_t>(lane) * kRowsOfLane;
    for (uint32_t i = first; i < first + kRowsOfLane && i < last; ++i) {
      const bool head = IsHead(part, i);
      if (head) {
        start = i;
        ++number;
      }
      const bool begins = BeginsChunk(part, start, i);
      if (head) {
        const bool once = i + 1 == part.end || firsts[i + 1] != firsts[i];
        const uint32_t to = part.begin + number - 1, own = i - part.begin;
        distinct[to] = part.ids[order[i]];
        starts[to + part.job] = own;
        if (fused != kNoPosition) sum_rows[to] = begins ? chunk : once ? order[i] : own;
      }
      if (begins) {
        chunks[chunk++] = {static_cast<uint32_t>(part.job), number - 1, (i - start) / kSumChunk, 0};
      }
    }
  }
};

constexpr int64_t kMostJoined = int64_t{1} << 30;

}  // namespace

// Batches that go through the same launches.
struct GpuTable::Alike {
  std::vector<GpuTable*> tables;
  std::vector<const Job*> jobs;
  std::vector<Batch*> batches;
  bool sum = false;
  uint32_t fused = kNoPosition;
  int64_t dim = 0;
  FloatType type = FloatType::kFloat32;
  bool packed = false;
  int64_t n = 0;

  Alike(GpuTable* table, const Job& job) {
    sum = job.duplicates == Duplicates::kSum;
    if (!sum) return;
    // Steps add a few gradients themselves, but those of 16 bits.
    const bool fuses = job.source.type == FloatType::kFloat32 &&
                       SumsGradients(job.plan, table->stride_, job.source);
    fused = fuses ? kFusedRows : 1;
    dim = table->layout_.dim;
    type = job.source.type;
    packed = dim % 4 == 0 && job.source.InFours();
  }

  bool Takes(const Alike& other, int64_t others) const {
    return sum == other.sum && fused == other.fused && dim == other.dim && type == other.type &&
           packed == other.packed && jobs.size() < kMostBatches && n + others <= kMostJoined;
  }

  // Hands what was found to the batches, and adds up gradients.
  int UseFound(Stream stream, const JoinedBatches& joined, const FoundDuplicates& found,
               int64_t most_chunks) const {
    const DeviceBuffer& added = tables[0]->sums_;
    for (int t = 0; t < joined.count; ++t) {
      Batch* const batch = batches[t];
      const uint32_t begin = joined.begins[t];
      batch->ids = found.distinct + begin;
      batch->count = found.totals + t;
      batch->starts = found.starts + begin + t;
      batch->order = found.order + begin;
      batch->sum = sum;
      batch->sum_rows = found.sum_rows + begin;
      batch->sums = added.As<float>();
      batch->fused = fused;
    }
    if (!sum) return MONO_GPU_OK;
    return LaunchSums(stream,
                      {joined, found.chunks, found.num_chunks, most_chunks, found.starts,
                       found.order, static_cast<int>(dim), found.arrived, added.As<float>()},
                      type, packed);
  }
};

// Finds the first position of every id, then sorts (first position, position): equal ids become
// neighbours, their positions stay in order, and ids in the order in which they first came. Sorting
// by the few bits of positions takes a third of what sorting by ids takes. Small batches are looked
// through by a block each: launches would take longer than their work.
int GpuTable::FindTogether(Stream stream, const Alike& alike) {
  const int64_t n = alike.n;
  int64_t largest = 0;
  for (const Job* const job : alike.jobs) largest = std::max(largest, job->n);
  const bool in_blocks = largest <= kBlockIds;
  JoinedBatches joined = {};
  joined.count = static_cast<int>(alike.jobs.size());
  const int64_t tile_rows = CeilDiv(n, kRoundRows * kMostTiles) * kRoundRows;
  int64_t at = 0, words = 0, tiles = 0;
  for (int t = 0; t < joined.count; ++t) {
    const Job& job = *alike.jobs[t];
    joined.Set(t, at, words, tiles, job.ids, job.source);
    at += job.n;
    words += CeilDiv(job.n, kWordIds);
    tiles += CeilDiv(job.n, tile_rows);
  }
  joined.Set(joined.count, at, words, tiles, nullptr, {});
  const int bits = BitsOf(static_cast<uint64_t>(n - 1));
  int64_t scratch = 0;
  if (!in_blocks) MONO_GPU_TRY(SortScratch<uint32_t>(n, bits, &scratch));
  const int64_t places = in_blocks ? 0 : int64_t{1} << (bits + 1);
  const int64_t chunk_room = MostChunks(largest, alike.fused);
  const int64_t most_chunks = in_blocks ? joined.count * chunk_room : MostChunks(n, alike.fused);
  int64_t bytes = 0;
  const auto part = [&bytes](int64_t size) {
    const int64_t begin = bytes;
    bytes += CeilDiv(std::max<int64_t>(size, 1), 256) * 256;
    return begin;
  };
  // The first two are filled together.
  const int64_t places_at = part(places * 4), arrived_at = part(most_chunks * 4), filled = bytes,
                distinct_at = part(n * 8), firsts_at = part(n * 4), numbers_at = part(n * 4),
                sorted_at = part(n * 4), order_at = part(n * 4),
                starts_at = part((n + joined.count) * 4), sum_rows_at = part(n * 4),
                counts_at = part(tiles * static_cast<int64_t>(sizeof(TileCounts))),
                totals_at = part(joined.count * 4), num_chunks_at = part(4),
                chunks_at = part(most_chunks * static_cast<int64_t>(sizeof(SumChunk))),
                scratch_at = part(scratch);
  DeviceBuffer& sorting = alike.tables[0]->sorting_;
  if (sorting.bytes() < bytes) {
    sorting.Free(stream);
    MONO_GPU_TRY(sorting.Allocate(stream, bytes, "finding the duplicates of a batch"));
  }
  DeviceBuffer& sums = alike.tables[0]->sums_;
  if (sums.bytes() < most_chunks * alike.dim * 4) {
    sums.Free(stream);
    MONO_GPU_TRY(sums.Allocate(stream, most_chunks * alike.dim * 4, "the gradients of a batch"));
  }
  char* const base = sorting.As<char>();
  const auto words_at = [base](int64_t offset) {
    return reinterpret_cast<uint32_t*>(base + offset);
  };
  const FoundDuplicates found = {reinterpret_cast<int64_t*>(base + distinct_at),
                                 words_at(order_at),
                                 words_at(starts_at),
                                 words_at(sum_rows_at),
                                 words_at(totals_at),
                                 reinterpret_cast<SumChunk*>(base + chunks_at),
                                 words_at(num_chunks_at),
                                 words_at(arrived_at)};
  if (in_blocks) {
    MONO_GPU_TRY(LaunchBlockDuplicates(stream, joined, alike.fused, chunk_room, found));
    return alike.UseFound(stream, joined, found, most_chunks);
  }
  uint32_t* const firsts = words_at(firsts_at);
  MONO_GPU_TRY(FillBytes(stream, base, 0xff, filled));
  MONO_GPU_TRY(ForWarps(stream, words, kAllBlocks,
                        ClaimPlaces{joined, engine::TableHash(), words_at(places_at),
                                    static_cast<uint32_t>(places - 1), firsts}));
  MONO_GPU_TRY(ForWarps(stream, words, kAllBlocks,
                        TakeFirsts{joined, words_at(places_at), firsts, words_at(numbers_at)}));
  MONO_GPU_TRY(SortPairs<uint32_t>(stream, base + scratch_at, scratch, firsts, words_at(sorted_at),
                                   words_at(numbers_at), words_at(order_at), n, bits));
  const auto number = [&](auto writes) {
    using Program = NumberIds<decltype(writes)::value>;
    return ForBlocks(
        stream, tiles, static_cast<int64_t>(sizeof(typename Program::Shared)),
        Program{joined, words_at(sorted_at), words_at(order_at), static_cast<uint32_t>(tile_rows),
                alike.fused, reinterpret_cast<TileCounts*>(base + counts_at), found.distinct,
                found.starts, found.sum_rows, found.totals, found.chunks, found.num_chunks});
  };
  MONO_GPU_TRY(number(std::false_type()));
  MONO_GPU_TRY(number(std::true_type()));
  return alike.UseFound(stream, joined, found, most_chunks);
}

int GpuTable::FindDuplicates(Stream stream, const std::vector<GpuTable*>& tables, const Job* jobs,
                             Batch* batches) {
  std::vector<Alike> all;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (jobs[i].duplicates == Duplicates::kNone) continue;
    Alike own(tables[i], jobs[i]);
    auto to = std::find_if(all.begin(), all.end(),
                           [&](const Alike& alike) { return alike.Takes(own, jobs[i].n); });
    if (to == all.end()) to = all.insert(all.end(), std::move(own));
    to->tables.push_back(tables[i]);
    to->jobs.push_back(jobs + i);
    to->batches.push_back(batches + i);
    to->n += jobs[i].n;
  }
  for (const Alike& alike : all) MONO_GPU_TRY(FindTogether(stream, alike));
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith
