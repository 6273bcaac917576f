// Finds the equal ids of small batches, each in the memory of one block: the same as
// table_duplicates.cu in one launch instead of a dozen. Where ids are few, a host that launches is
// what a step waits for.
#include "monolith/native_training/runtime/gpu/table_duplicates.h"

namespace monolith {
namespace gpu {
namespace {

constexpr uint32_t kIds = static_cast<uint32_t>(kBlockIds);
constexpr uint32_t kPlaces = 2 * kIds;
constexpr uint32_t kIdsOfLane = kIds / kLanes;
// Ids that come more often than that are ordered by a warp each, others by a lane.
constexpr uint32_t kFew = 16;

MONO_DEVICE uint32_t Count(uint32_t* to) {
#if defined(__CUDACC__)
  return atomicAdd(to, 1u);
#else
  return (*to)++;
#endif
}

struct FindInBlock {
  JoinedBatches batches;
  engine::IdHash hash;
  uint32_t fused;  // ids that come at most so often have no chunks
  uint32_t chunk_room;
  FoundDuplicates found;

  struct Shared {
    // First the places of a hash table, which keep the first position of an id; then how often the
    // id of each first position comes, and behind them where its occurrences go.
    uint32_t places[kPlaces];
    uint16_t firsts[kIds];  // of every position; before, its place
    uint16_t often[kIds / kFew];
    uint32_t heads[kLanes];
    uint32_t begins[kLanes];
    uint32_t chunks[kLanes];
    uint32_t of_warps[kLanes / 32];
    uint32_t all_heads, all_begins, all_chunks, num_often;

    MONO_DEVICE uint32_t* Counts() { return places; }
    MONO_DEVICE uint32_t* Cursors() { return places + kIds; }
  };
  static_assert(sizeof(Shared) <= 48 << 10);

  MONO_DEVICE uint32_t Claim(const int64_t* ids, uint32_t position, uint32_t* places) const {
    const int64_t id = ids[position];
    for (uint32_t place = static_cast<uint32_t>(hash(id)) % kPlaces;;
         place = (place + 1) % kPlaces) {
      // No plain read before: in shared memory that would race with others' exchanges.
      const uint32_t seen = CompareAndSwap(places + place, kNoPosition, position);
      if (seen == kNoPosition) return place;
      if (ids[seen] != id) continue;
      if (position < seen) LowerTo(places + place, position);
      return place;
    }
  }

  MONO_DEVICE uint32_t ChunksOf(uint32_t count) const {
    return fused == kNoPosition || count <= fused ? 0 : (count + kSumChunk - 1) / kSumChunk;
  }

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    Shared* const shared = block.At<Shared>(0);
    const uint32_t job = static_cast<uint32_t>(block.number);
    const uint32_t begin = batches.begins[job], n = batches.begins[job + 1] - begin;
    const int64_t* const ids = batches.ids[job];
    uint32_t* const order = found.order + begin;
    // Neighbours are read together.
    const auto each_position = [&](const auto& body) {
      block.Each([&](int lane) {
        for (uint32_t i = static_cast<uint32_t>(lane); i < n; i += kLanes) body(i);
      });
    };
    FindFirsts(block, each_position, ids, shared);
    uint32_t* const counts = shared->Counts();
    uint32_t* const cursors = shared->Cursors();
    NumberHeads(block, job, n, ids, shared);
    each_position([&](uint32_t i) {
      const uint32_t first = shared->firsts[i], count = counts[first];
      if (count == 1) {
        order[cursors[first]] = i;
      } else if (count <= kFew) {
        order[Count(cursors + first)] = i;
      }
    });
    OrderOften(block, n, order, shared);
    each_position([&](uint32_t i) {
      if (shared->firsts[i] != i || counts[i] == 1 || counts[i] > kFew) return;
      Sort(order + cursors[i] - counts[i], counts[i]);
    });
  }

  template <typename EachPosition>
  MONO_DEVICE void FindFirsts(const ThreadBlock& block, const EachPosition& each_position,
                              const int64_t* ids, Shared* shared) const {
    block.Each([&](int lane) {
      for (uint32_t i = static_cast<uint32_t>(lane); i < kPlaces; i += kLanes) {
        shared->places[i] = kNoPosition;
      }
      if (lane == 0) shared->num_often = 0;
    });
    each_position([&](uint32_t i) {
      shared->firsts[i] = static_cast<uint16_t>(Claim(ids, i, shared->places));
    });
    each_position([&](uint32_t i) {
      shared->firsts[i] = static_cast<uint16_t>(shared->places[shared->firsts[i]]);
    });
    block.Each([&](int lane) {
      for (uint32_t i = static_cast<uint32_t>(lane); i < kIds; i += kLanes) shared->Counts()[i] = 0;
    });
    each_position([&](uint32_t i) { Count(shared->Counts() + shared->firsts[i]); });
  }

  // Numbers the ids in the order of their first positions, each lane those of its own.
  MONO_DEVICE void NumberHeads(const ThreadBlock& block, uint32_t job, uint32_t n,
                               const int64_t* ids, Shared* shared) const {
    const uint32_t* const counts = shared->Counts();
    block.Each([&](int lane) {
      uint32_t heads = 0, begins = 0, chunks = 0;
      const uint32_t first = static_cast<uint32_t>(lane) * kIdsOfLane;
      for (uint32_t i = first; i < first + kIdsOfLane && i < n; ++i) {
        heads += counts[i] != 0;
        begins += counts[i];
        chunks += ChunksOf(counts[i]);
      }
      shared->heads[lane] = heads;
      shared->begins[lane] = begins;
      shared->chunks[lane] = chunks;
      if (lane == 0) shared->all_heads = shared->all_begins = shared->all_chunks = 0;
    });
    const auto add = [](uint32_t a, uint32_t b) { return a + b; };
    ScanLanes(block, shared->heads, shared->of_warps, &shared->all_heads, add);
    ScanLanes(block, shared->begins, shared->of_warps, &shared->all_begins, add);
    ScanLanes(block, shared->chunks, shared->of_warps, &shared->all_chunks, add);
    block.Each([&](int lane) { WriteHeads(job, n, ids, lane, shared); });
  }

  MONO_DEVICE void WriteHeads(uint32_t job, uint32_t n, const int64_t* ids, int lane,
                              Shared* shared) const {
    const uint32_t begin = batches.begins[job], room = job * chunk_room;
    uint32_t number = shared->heads[lane], start = shared->begins[lane];
    uint32_t chunk = room + shared->chunks[lane];
    const uint32_t first = static_cast<uint32_t>(lane) * kIdsOfLane;
    for (uint32_t i = first; i < first + kIdsOfLane && i < n; ++i) {
      const uint32_t count = shared->Counts()[i];
      if (count == 0) continue;
      found.distinct[begin + number] = ids[i];
      found.starts[begin + job + number] = start;
      const uint32_t own = ChunksOf(count);
      if (fused != kNoPosition) {
        found.sum_rows[begin + number] = own != 0 ? chunk : count == 1 ? i : start;
      }
      for (uint32_t k = 0; k < own; ++k) found.chunks[chunk++] = {job, number, k, 0};
      if (count > kFew) {
        shared->often[Count(&shared->num_often)] = static_cast<uint16_t>(i);
      }
      shared->Cursors()[i] = start;
      ++number;
      start += count;
    }
    const uint32_t used = fused == kNoPosition ? 0 : shared->all_chunks;
    for (uint32_t k = static_cast<uint32_t>(lane); k < chunk_room; k += kLanes) {
      found.arrived[room + k] = 0xffffffffu;
      if (k >= used) found.chunks[room + k].id = kNoChunk;
    }
    if (lane != 0) return;
    found.starts[begin + job + shared->all_heads] = n;
    found.totals[job] = shared->all_heads;
    // Counts the chunks of all tables; each block writes the same.
    *found.num_chunks = static_cast<uint32_t>(batches.count) * chunk_room;
  }

  // The positions of each id that comes often, in order.
  MONO_DEVICE void OrderOften(const ThreadBlock& block, uint32_t n, uint32_t* order,
                              Shared* shared) const {
    block.Each([&](int lane) {
#if defined(__CUDACC__)
      const uint32_t own = static_cast<uint32_t>(lane) % 32;
      for (uint32_t k = static_cast<uint32_t>(lane) / 32; k < shared->num_often; k += kLanes / 32) {
        const uint32_t first = shared->often[k];
        uint32_t to = shared->Cursors()[first];
        for (uint32_t i = own; i - own < n; i += 32) {
          const bool is_in = i < n && shared->firsts[i] == first;
          const unsigned lanes = __ballot_sync(0xffffffffu, is_in);
          if (is_in) order[to + __popc(lanes & ((1u << own) - 1))] = i;
          to += __popc(lanes);
        }
      }
#else
      if (lane != 0) return;
      for (uint32_t k = 0; k < shared->num_often; ++k) {
        const uint32_t first = shared->often[k];
        uint32_t to = shared->Cursors()[first];
        for (uint32_t i = 0; i < n; ++i) {
          if (shared->firsts[i] == first) order[to++] = i;
        }
      }
#endif
    });
  }

  MONO_DEVICE static void Sort(uint32_t* order, uint32_t count) {
    uint32_t sorted[kFew];
    for (uint32_t k = 0; k < count; ++k) {
      const uint32_t value = order[k];
      uint32_t at = k;
      for (; at > 0 && sorted[at - 1] > value; --at) sorted[at] = sorted[at - 1];
      sorted[at] = value;
    }
    for (uint32_t k = 0; k < count; ++k) order[k] = sorted[k];
  }
};

}  // namespace

int LaunchBlockDuplicates(Stream stream, const JoinedBatches& batches, uint32_t fused,
                          int64_t chunk_room, const FoundDuplicates& found) {
  return ForBlocks(
      stream, batches.count, static_cast<int64_t>(sizeof(FindInBlock::Shared)),
      FindInBlock{batches, engine::TableHash(), fused, static_cast<uint32_t>(chunk_room), found});
}

}  // namespace gpu
}  // namespace monolith
