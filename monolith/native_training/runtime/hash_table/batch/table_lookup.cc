// Reading batches: Lookup, LookupHashed, LookupMany, LookupEntries, Contains.
#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_table/batch/batch_tiles.h"
#include "monolith/native_training/runtime/hash_table/batch/read_pipeline.h"
#include "monolith/native_training/runtime/hash_table/batch/shard_locks.h"
#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/rows/row_hash.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {
namespace {

// Small enough that threads finish together, large enough to repay entering the read room.
constexpr int64_t kMinUnitIds = 1024;
constexpr int64_t kUnitsPerThread = 4;

// Ids that are read under shard locks at once: writers wait for some ten microseconds.
constexpr int64_t kLockedIds = 2048;

// Floats from one row of the output to the next.
int64_t StrideOf(const LookupRequest& request) {
  return request.stride == 0 ? request.table->dim() : request.stride;
}

// Stages of a read, for ReadPipeline.

// Copies raw float rows. kDim > 0: a dimension known to the compiler.
template <int kDim>
class CopyStages {
 public:
  static constexpr bool kCopiesRowZero = true;
  static constexpr int kKnownDim = kDim;

  explicit CopyStages(const LookupRequest& request)
      : dim_(request.table->dim()), stride_(StrideOf(request)), out_(request.out) {}

  void PrefetchRow(const char* row) const { PrefetchBytes<0>(row, 4 * dim()); }

  void FinishRow(int64_t position, const char* row) const {
    std::memcpy(out_ + position * stride_, row, 4 * dim());
  }
  void FinishAbsent(int64_t position) const {
    std::memset(out_ + position * stride_, 0, 4 * dim());
  }

 private:
  int64_t dim() const { return kDim > 0 ? kDim : dim_; }

  const int64_t dim_;
  const int64_t stride_;
  float* const out_;
};

// Any other row: retrievers of TRAINING rows, codes of SERVING rows.
class RetrieveStages {
 public:
  static constexpr bool kCopiesRowZero = false;
  static constexpr int kKnownDim = 0;

  explicit RetrieveStages(const LookupRequest& request)
      : layout_(request.table->layout()),
        read_bytes_(layout_.serving() ? layout_.row_bytes : 4 * layout_.dim),
        stride_(StrideOf(request)),
        out_(request.out) {
    const int64_t step = TableInternals::LastGlobalStep(*request.table);
    for (const Segment& segment : layout_.segments) {
      scales_.push_back(segment.retriever == RetrieverKind::kHashNet
                            ? HashNetScale(segment.compressor, step)
                            : 0.0f);
    }
  }

  void PrefetchRow(const char* row) const { PrefetchBytes<0>(row, read_bytes_); }

  void FinishRow(int64_t position, const char* row) const {
    float* to = out_ + position * stride_;
    for (size_t k = 0; k < layout_.segments.size(); ++k) {
      if (layout_.serving()) {
        DecodeSegment(layout_.segments[k], row, to);
      } else {
        RetrieveSegment(layout_.segments[k], reinterpret_cast<const float*>(row), scales_[k], to);
      }
    }
  }
  void FinishAbsent(int64_t position) const {
    std::memset(out_ + position * stride_, 0, 4 * layout_.dim);
  }

 private:
  const RowLayout& layout_;
  const int64_t read_bytes_;
  const int64_t stride_;
  float* const out_;
  std::vector<float> scales_;
};

class ContainsStages {
 public:
  static constexpr bool kCopiesRowZero = false;

  explicit ContainsStages(const LookupRequest& request) : found_(request.found) {}
  void PrefetchRow(const char*) const {}
  void FinishRow(int64_t position, const char*) const { found_[position] = 1; }
  void FinishAbsent(int64_t position) const { found_[position] = 0; }

 private:
  uint8_t* const found_;
};

// Says of each id whether it is there, too.
template <typename Stages>
class FoundStages : public Stages {
 public:
  static constexpr bool kCopiesRowZero = false;

  explicit FoundStages(const LookupRequest& request) : Stages(request), contains_(request) {}
  void FinishRow(int64_t position, const char* row) const {
    Stages::FinishRow(position, row);
    contains_.FinishRow(position, row);
  }
  void FinishAbsent(int64_t position) const {
    Stages::FinishAbsent(position);
    contains_.FinishAbsent(position);
  }

 private:
  const ContainsStages contains_;
};

// Hashes each row, too, while others are fetched.
template <typename Stages>
class HashStages : public Stages {
 public:
  static constexpr bool kCopiesRowZero = false;

  explicit HashStages(const LookupRequest& request)
      : Stages(request),
        dim_(Stages::kKnownDim > 0 ? Stages::kKnownDim : request.table->dim()),
        stride_(StrideOf(request)),
        ids_(request.ids),
        out_(request.out),
        hashes_(request.hashes) {}
  void FinishRow(int64_t position, const char* row) const {
    Stages::FinishRow(position, row);
    const int64_t dim = Stages::kKnownDim > 0 ? Stages::kKnownDim : dim_;
    hashes_[position] = RowHash(ids_[position], out_ + position * stride_, dim);
  }
  void FinishAbsent(int64_t position) const {
    Stages::FinishAbsent(position);
    hashes_[position] = 0;
  }

 private:
  const int64_t dim_;
  const int64_t stride_;
  const int64_t* const ids_;
  const float* const out_;
  uint64_t* const hashes_;
};

// Prefetches what a read of `table` looks at first. Inlined by force: GCC drops calls of functions
// that only prefetch.
__attribute__((always_inline)) inline void PrefetchTable(const EmbeddingTable& table) {
  __builtin_prefetch(TableInternals::Room(table), 1);
  const char* homes = static_cast<const char*>(TableInternals::Directory(table).first_entries());
  for (size_t i = 0; i < kNumShards * sizeof(FlatIndex::Home); i += 64) {
    __builtin_prefetch(homes + i, 0);
  }
}

template <typename Stages>
using OpenTiles = std::vector<typename ReadPipeline<Stages>::Tile>;

// Adds the ids of `request`, whose shards do not change meanwhile.
template <typename Stages>
void AddTile(const LookupRequest& request, OpenTiles<Stages>* tiles) {
  const RowArena::View rows = TableInternals::Arena(*request.table).view();
  const Stages stages(request);
  if (rows.Address(0) == nullptr) {  // an arena without any memory
    for (int64_t i = 0; i < request.n; ++i) stages.FinishAbsent(i);
    return;
  }
  tiles->push_back(
      {TableInternals::Directory(*request.table).view(), rows, request.ids, request.n, stages});
}

// Reads a tile of a table that others write to: as much as they can wait for at a time.
template <typename Stages>
void ReadLocked(const LookupRequest& request) {
  OpenTiles<Stages> tile;
  for (int64_t begin = 0; begin < request.n; begin += kLockedIds) {
    const LookupRequest part = request.Part(begin, std::min(kLockedIds, request.n - begin));
    const uint64_t shards = part.n >= 4 * kNumShards
                                ? ShardRange(0, kNumShards)
                                : ShardsOfIds(part.n, [&](int64_t i) { return part.ids[i]; });
    const SharedShardLocks locks(TableInternals::Shards(*request.table), shards);
    tile.clear();
    AddTile<Stages>(part, &tile);
    ReadPipeline<Stages>::Run(tile);
  }
}

// Reads tiles, of kTileIds ids in all at most: in the read rooms of the tables that no thread
// writes to, under shard locks in the others.
template <typename Stages>
void ReadTiles(const LookupRequest* tiles, int64_t num_tiles) {
  OpenTiles<Stages> open;
  std::vector<const LookupRequest*> busy;
  open.reserve(num_tiles);
  for (int64_t i = 0; i < num_tiles; ++i) PrefetchTable(*tiles[i].table);
  // Before any room is entered: those inside never wait.
  for (int64_t i = 0; i < num_tiles; ++i) TableInternals::Room(*tiles[i].table)->AwaitDecision();
  {
    ReadRooms rooms(num_tiles);
    for (const LookupRequest* tile = tiles; tile < tiles + num_tiles; ++tile) {
      if (rooms.TryEnter(TableInternals::Room(*tile->table))) {
        AddTile<Stages>(*tile, &open);
      } else {
        busy.push_back(tile);
      }
    }
    ReadPipeline<Stages>::Run(open);
  }
  for (const LookupRequest* tile : busy) ReadLocked<Stages>(*tile);
}

using ReadFunction = void (*)(const LookupRequest* tiles, int64_t num_tiles);

template <typename Stages>
using PlainStages = Stages;

// The lookup that is compiled for the rows of a table. `Told` is what becomes of the stages.
template <template <typename> class Told>
ReadFunction ReadFunctionOf(const EmbeddingTable& table) {
  if (!CopiesRows(table.layout())) return ReadTiles<Told<RetrieveStages>>;
  switch (table.dim()) {
    case 1:
      return ReadTiles<Told<CopyStages<1>>>;
    case 4:
      return ReadTiles<Told<CopyStages<4>>>;
    case 8:
      return ReadTiles<Told<CopyStages<8>>>;
    case 16:
      return ReadTiles<Told<CopyStages<16>>>;
    case 32:
      return ReadTiles<Told<CopyStages<32>>>;
    case 64:
      return ReadTiles<Told<CopyStages<64>>>;
    default:
      return ReadTiles<Told<CopyStages<0>>>;
  }
}

ReadFunction ReadFunctionOf(const LookupRequest& request) {
  if (request.hashes != nullptr) return ReadFunctionOf<HashStages>(*request.table);
  return request.found != nullptr ? ReadFunctionOf<FoundStages>(*request.table)
                                  : ReadFunctionOf<PlainStages>(*request.table);
}

// Neighbours of one kind go through one pipeline.
void LookupTiles(const LookupRequest* tiles, int64_t num_tiles) {
  for (int64_t begin = 0, end = 0; begin < num_tiles; begin = end) {
    const ReadFunction read = ReadFunctionOf(tiles[begin]);
    while (end < num_tiles && ReadFunctionOf(tiles[end]) == read) ++end;
    read(tiles + begin, end - begin);
  }
}

}  // namespace

LookupRequest LookupRequest::Part(int64_t begin, int64_t size) const {
  return {table,
          ids + begin,
          size,
          out == nullptr ? nullptr : out + begin * (stride == 0 ? table->dim() : stride),
          found == nullptr ? nullptr : found + begin,
          hashes == nullptr ? nullptr : hashes + begin,
          stride};
}

void EmbeddingTable::Lookup(const int64_t* ids, int64_t n, float* out,
                            ParallelRunner* runner) const {
  const LookupRequest request{this, ids, n, out};
  LookupMany(&request, 1, runner);
}

void EmbeddingTable::Lookup(const int64_t* ids, int64_t n, float* out, uint8_t* found,
                            ParallelRunner* runner) const {
  const LookupRequest request{this, ids, n, out, found};
  LookupMany(&request, 1, runner);
}

void EmbeddingTable::LookupHashed(const int64_t* ids, int64_t n, float* out,
                                  uint64_t* hashes) const {
  const LookupRequest request{this, ids, n, out, nullptr, hashes};
  LookupMany(&request, 1, nullptr);
}

void EmbeddingTable::LookupMany(const LookupRequest* requests, int64_t num_requests,
                                ParallelRunner* runner) {
  struct Scratch {
    std::vector<LookupRequest> tiles;
    std::vector<int64_t> units;  // index of their first tile
  };
  thread_local Scratch thread_scratch;
  Scratch& scratch = thread_scratch;  // workers use the caller's
  scratch.tiles.clear();
  scratch.units.clear();
  const int threads = runner == nullptr ? 1 : runner->NumThreads();
  int64_t remaining = 0, unit_room = 0, cost = 0;
  for (int64_t r = 0; r < num_requests; ++r) remaining += requests[r].n;
  for (int64_t r = 0; r < num_requests; ++r) {
    const LookupRequest& request = requests[r];
    const int64_t dim = request.table->dim();
    for (int64_t begin = 0; begin < request.n;) {
      if (unit_room == 0) {
        // Threads that take whole tables are faster than threads that share each of them, so units
        // are large at first; threads should finish together, so they are small in the end.
        const int64_t share = remaining / (threads == 1 ? 1 : kUnitsPerThread * threads);
        unit_room = std::clamp(share, kMinUnitIds, kTileIds);
        scratch.units.push_back(static_cast<int64_t>(scratch.tiles.size()));
      }
      const int64_t size = std::min(request.n - begin, unit_room);
      scratch.tiles.push_back(request.Part(begin, size));
      begin += size;
      remaining -= size;
      unit_room -= size;
    }
    cost += (200 + 4 * dim) * request.n;  // two cache misses, and the copy
  }
  const int64_t num_units = static_cast<int64_t>(scratch.units.size());
  scratch.units.push_back(static_cast<int64_t>(scratch.tiles.size()));
  RunParallel(runner, num_units, cost / std::max<int64_t>(1, num_units) + 1,
              [&scratch](int64_t begin, int64_t end) {
                for (int64_t u = begin; u < end; ++u) {
                  const int64_t first = scratch.units[u];
                  LookupTiles(&scratch.tiles[first], scratch.units[u + 1] - first);
                }
              });
}

void EmbeddingTable::Contains(const int64_t* ids, int64_t n, uint8_t* found) const {
  for (int64_t begin = 0; begin < n; begin += kTileIds) {
    const LookupRequest tile{this, ids + begin, std::min(kTileIds, n - begin), nullptr,
                             found + begin};
    ReadTiles<ContainsStages>(&tile, 1);
  }
}

Status EmbeddingTable::LookupEntries(const int64_t* ids, int64_t n,
                                     std::vector<std::string>* entries) const {
  if (layout_.serving()) {
    return Status::Unimplemented("ServingEntryAccessor doesn't support lookup of entries.");
  }
  entries->assign(n, std::string());
  std::string record(codec_.max_record_bytes(), '\0');
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashId(ids[i]);
    const Shard& shard = *shards_[ShardOf(hash)];
    std::shared_lock<FairSharedMutex> lock(shard.mutex);
    const FlatIndex::Slot* slot = shard.index.Find(hash, ids[i]);
    if (slot == nullptr) continue;
    const int64_t size =
        codec_.Encode(ids[i], shard.rows.Address(slot->row), slot->ts, false, &record[0]);
    (*entries)[i].assign(record.data(), size);
  }
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
