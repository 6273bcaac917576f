// Reading batches: Lookup, LookupMany, LookupEntries, Contains.
#include <cstring>
#include <shared_mutex>

#include "monolith/native_training/runtime/hash_table/batch_windows.h"
#include "monolith/native_training/runtime/hash_table/compressors.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/retrievers.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"
#include "monolith/native_training/runtime/hash_table/unsorted_read.h"

namespace monolith {
namespace engine {
namespace {

// Small enough that threads finish together, large enough to repay entering the read room.
constexpr int64_t kMinUnitIds = 1024;
constexpr int64_t kUnitsPerThread = 4;

// Locking and probing shared by all readers. `Derived` prefetches in PrefetchRow(row) what it will
// need, and writes the result of an id in FinishRow(position, row) or FinishAbsent(position).
template <typename Derived>
class ReadStages {
 public:
  explicit ReadStages(const EmbeddingTable* table) : shards_(TableInternals::Shards(*table)) {}

  void Fetch(Window* window) {
    const TableInternals::Shard& shard = *shards_[window->shard];
    if (window->first) shard.mutex.lock_shared();
    if (shard.index.num_lines() == 0) return;
    for (int j = 0; j < window->count; ++j) {
      concurrency::PrefetchForRead(shard.index.LineAt(shard.index.HomeLine(window->hashes[j])));
    }
  }

  void Probe(Window* window) {
    const TableInternals::Shard& shard = *shards_[window->shard];
    window->num_pending = 0;
    if (shard.index.num_lines() == 0) {
      std::fill(window->rows, window->rows + window->count, nullptr);
      return;
    }
    const RowArena::View rows = shard.rows.view();
    for (int j = 0; j < window->count; ++j) {
      const FlatIndex::Line* line = shard.index.LineAt(shard.index.HomeLine(window->hashes[j]));
      const uint32_t row = FlatIndex::RowInLine(line, window->keys[j]);
      if (row != 0) {
        window->rows[j] = rows.Address(row);
        derived()->PrefetchRow(window->rows[j]);
        continue;
      }
      window->rows[j] = nullptr;
      if (FlatIndex::HasEmpty(line)) continue;
      PrefetchOverflow(line);
      window->pending[window->num_pending++] = j;
    }
  }

  void Resolve(Window* window) {
    const TableInternals::Shard& shard = *shards_[window->shard];
    for (int k = 0; k < window->num_pending; ++k) {
      const int j = window->pending[k];
      const FlatIndex::Slot* slot = shard.index.Find(window->hashes[j], window->keys[j]);
      if (slot == nullptr) continue;
      window->rows[j] = shard.rows.Address(slot->row);
      derived()->PrefetchRow(window->rows[j]);
    }
  }

  void Finish(Window* window) {
    for (int j = 0; j < window->count; ++j) {
      const int64_t position = window->positions[j];
      if (window->rows[j] != nullptr) {
        derived()->FinishRow(position, window->rows[j]);
      } else {
        derived()->FinishAbsent(position);
      }
    }
    if (window->last) shards_[window->shard]->mutex.unlock_shared();
  }

 private:
  Derived* derived() { return static_cast<Derived*>(this); }

  const std::vector<std::unique_ptr<TableInternals::Shard>>& shards_;
};

// Copies raw float rows. kDim > 0: a dimension known to the compiler.
template <int kDim>
class CopyStages : public ReadStages<CopyStages<kDim>> {
 public:
  static constexpr bool kCopiesRowZero = true;

  CopyStages(const EmbeddingTable* table, float* out)
      : ReadStages<CopyStages<kDim>>(table), dim_(table->dim()), out_(out) {}

  void PrefetchRow(const char* row) const { PrefetchBytes<0>(row, 4 * dim()); }

  void FinishRow(int64_t position, const char* row) const {
    std::memcpy(out_ + position * dim(), row, 4 * dim());
  }
  void FinishAbsent(int64_t position) const { std::memset(out_ + position * dim(), 0, 4 * dim()); }

 private:
  int64_t dim() const { return kDim > 0 ? kDim : dim_; }

  const int64_t dim_;
  float* const out_;
};

// Any other row: retrievers of TRAINING rows, codes of SERVING rows.
class RetrieveStages : public ReadStages<RetrieveStages> {
 public:
  static constexpr bool kCopiesRowZero = false;

  RetrieveStages(const EmbeddingTable* table, float* out)
      : ReadStages<RetrieveStages>(table),
        layout_(table->layout()),
        read_bytes_(layout_.serving() ? layout_.row_bytes : 4 * layout_.dim),
        out_(out) {
    const int64_t step = TableInternals::LastGlobalStep(*table);
    for (const Segment& segment : layout_.segments) {
      scales_.push_back(segment.retriever == RetrieverKind::kHashNet
                            ? HashNetScale(segment.compressor, step)
                            : 0.0f);
    }
  }

  void PrefetchRow(const char* row) const { PrefetchBytes<0>(row, read_bytes_); }

  void FinishRow(int64_t position, const char* row) const {
    float* to = out_ + position * layout_.dim;
    for (size_t k = 0; k < layout_.segments.size(); ++k) {
      if (layout_.serving()) {
        DecodeSegment(layout_.segments[k], row, to);
      } else {
        RetrieveSegment(layout_.segments[k], reinterpret_cast<const float*>(row), scales_[k], to);
      }
    }
  }
  void FinishAbsent(int64_t position) const {
    std::memset(out_ + position * layout_.dim, 0, 4 * layout_.dim);
  }

 private:
  const RowLayout& layout_;
  const int64_t read_bytes_;
  float* const out_;
  std::vector<float> scales_;
};

class ContainsStages : public ReadStages<ContainsStages> {
 public:
  static constexpr bool kCopiesRowZero = false;

  ContainsStages(const EmbeddingTable* table, uint8_t* found)
      : ReadStages<ContainsStages>(table), found_(found) {}
  void PrefetchRow(const char*) const {}
  void FinishRow(int64_t position, const char*) const { found_[position] = 1; }
  void FinishAbsent(int64_t position) const { found_[position] = 0; }

 private:
  uint8_t* const found_;
};

// What a read of `table` looks at first. Inlined by force: GCC drops calls of functions that only
// prefetch.
__attribute__((always_inline)) inline void PrefetchTable(const EmbeddingTable& table) {
  __builtin_prefetch(TableInternals::Room(table), 1);
  const char* views = reinterpret_cast<const char*>(TableInternals::Views(table));
  for (size_t i = 0; i < kNumShards * sizeof(FlatIndex::View); i += 64) {
    __builtin_prefetch(views + i, 0);
  }
}

template <typename Stages>
void ReadSorted(const int64_t* ids, int64_t n, Stages stages) {
  thread_local GroupedTile by_shard;
  by_shard.Group(ids, n, kShardBits);
  RunWindows(ids, by_shard, &stages);
}

// Reads tiles, of kTileIds ids in all at most: in the read rooms of the tables that nobody writes
// to, shard by shard in the others.
template <typename Stages, typename Request>
void ReadTiles(const Request* tiles, int64_t num_tiles) {
  using Read = UnsortedRead<Stages>;
  std::vector<typename Read::Tile> open;
  std::vector<const Request*> busy;
  open.reserve(num_tiles);
  for (int64_t i = 0; i < num_tiles; ++i) PrefetchTable(*tiles[i].table);
  {
    ReadRooms rooms(num_tiles);
    for (const Request* tile = tiles; tile < tiles + num_tiles; ++tile) {
      const EmbeddingTable& table = *tile->table;
      const bool entered = rooms.TryEnter(TableInternals::Room(table));
      const RowArena::View rows = entered ? TableInternals::Arena(table).view() : RowArena::View{};
      if (rows.base == nullptr) {  // not entered, or an arena that got no memory
        busy.push_back(tile);
        continue;
      }
      open.push_back(
          {TableInternals::Views(table), rows, tile->ids, tile->n, Stages(tile->table, tile->out)});
    }
    Read::Run(open);
  }
  for (const Request* tile : busy) {
    ReadSorted(tile->ids, tile->n, Stages(tile->table, tile->out));
  }
}

using ReadFunction = void (*)(const LookupRequest* tiles, int64_t num_tiles);

// The lookup that is compiled for the rows of `table`.
ReadFunction ReadFunctionOf(const EmbeddingTable& table) {
  if (!table.layout().all_raw) return ReadTiles<RetrieveStages>;
  switch (table.dim()) {
    case 1:
      return ReadTiles<CopyStages<1>>;
    case 4:
      return ReadTiles<CopyStages<4>>;
    case 8:
      return ReadTiles<CopyStages<8>>;
    case 16:
      return ReadTiles<CopyStages<16>>;
    case 32:
      return ReadTiles<CopyStages<32>>;
    case 64:
      return ReadTiles<CopyStages<64>>;
    default:
      return ReadTiles<CopyStages<0>>;
  }
}

// Neighbours of one kind go through one pipeline.
void LookupTiles(const LookupRequest* tiles, int64_t num_tiles) {
  for (int64_t begin = 0, end = 0; begin < num_tiles; begin = end) {
    const ReadFunction read = ReadFunctionOf(*tiles[begin].table);
    while (end < num_tiles && ReadFunctionOf(*tiles[end].table) == read) ++end;
    read(tiles + begin, end - begin);
  }
}

}  // namespace

void EmbeddingTable::Lookup(const int64_t* ids, int64_t n, float* out,
                            ParallelRunner* runner) const {
  const LookupRequest request{this, ids, n, out};
  LookupMany(&request, 1, runner);
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
      scratch.tiles.push_back(
          {request.table, request.ids + begin, size, request.out + begin * dim});
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
  struct Request {
    const EmbeddingTable* table;
    const int64_t* ids;
    int64_t n;
    uint8_t* out;
  };
  for (int64_t begin = 0; begin < n; begin += kTileIds) {
    const Request tile{this, ids + begin, std::min(kTileIds, n - begin), found + begin};
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
    const uint64_t hash = MixId(ids[i]);
    const Shard& shard = *shards_[ShardOf(hash)];
    std::shared_lock<std::shared_mutex> lock(shard.mutex);
    const FlatIndex::Slot* slot = shard.index.Find(static_cast<uint32_t>(hash), ids[i]);
    if (slot == nullptr) continue;
    const int64_t size =
        codec_.Encode(ids[i], shard.rows.Address(slot->row), slot->ts, false, &record[0]);
    (*entries)[i].assign(record.data(), size);
  }
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
