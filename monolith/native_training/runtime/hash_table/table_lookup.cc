// Reading batches: Lookup, LookupMany, LookupEntries, Contains.
#include <cstring>
#include <shared_mutex>

#include "monolith/native_training/runtime/hash_table/batch_windows.h"
#include "monolith/native_training/runtime/hash_table/compressors.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/retrievers.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {
namespace {

// Fewer ids do not fill the pipeline of UnsortedRead.
constexpr int64_t kMinUnsortedIds = 16;

// Small enough that threads finish together, large enough to repay entering the read room.
constexpr int64_t kParallelTileIds = 1024;
constexpr int64_t kTilesPerThread = 4;

TileScratch* ThreadTileScratch() {
  thread_local TileScratch scratch;
  return &scratch;
}

// Locking and probing shared by all readers. `Derived` prefetches in PrefetchRow(row) what it will
// need and copies it in FinishRow(position, row), where row is null for absent ids.
template <typename Derived>
class ReadStages {
 public:
  explicit ReadStages(const EmbeddingTable* table) : shards_(TableInternals::Shards(*table)) {}

  void Fetch(Window* window) {
    const TableInternals::Shard& shard = *shards_[window->shard];
    if (window->first) shard.mutex.lock_shared();
    if (shard.index.num_lines() == 0) return;
    for (int j = 0; j < window->count; ++j) {
      __builtin_prefetch(shard.index.LineAt(shard.index.HomeLine(window->entries[j].hash)), 0);
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
      const BatchEntry& entry = window->entries[j];
      const FlatIndex::Line* line = shard.index.LineAt(shard.index.HomeLine(entry.hash));
      const uint32_t row = FlatIndex::RowInLine(line, entry.key);
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
      const BatchEntry& entry = window->entries[j];
      const FlatIndex::Slot* slot = shard.index.Find(entry.hash, entry.key);
      if (slot == nullptr) continue;
      window->rows[j] = shard.rows.Address(slot->row);
      derived()->PrefetchRow(window->rows[j]);
    }
  }

  void Finish(Window* window) {
    for (int j = 0; j < window->count; ++j) {
      derived()->FinishRow(window->entries[j].position, window->rows[j]);
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
  CopyStages(const EmbeddingTable* table, float* out)
      : ReadStages<CopyStages<kDim>>(table), dim_(table->dim()), out_(out) {}

  void PrefetchRow(const char* row) const { PrefetchBytes<0>(row, 4 * (kDim > 0 ? kDim : dim_)); }

  void FinishRow(int64_t position, const char* row) {
    const int64_t dim = kDim > 0 ? kDim : dim_;
    float* to = out_ + position * dim;
    if (row != nullptr) {
      std::memcpy(to, row, 4 * dim);
    } else {
      std::memset(to, 0, 4 * dim);
    }
  }

 private:
  const int64_t dim_;
  float* const out_;
};

// Any other row: retrievers of TRAINING rows, codes of SERVING rows.
class RetrieveStages : public ReadStages<RetrieveStages> {
 public:
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

  void FinishRow(int64_t position, const char* row) {
    float* to = out_ + position * layout_.dim;
    if (row == nullptr) {
      std::memset(to, 0, 4 * layout_.dim);
      return;
    }
    for (size_t k = 0; k < layout_.segments.size(); ++k) {
      if (layout_.serving()) {
        DecodeSegment(layout_.segments[k], row, to);
      } else {
        RetrieveSegment(layout_.segments[k], reinterpret_cast<const float*>(row), scales_[k], to);
      }
    }
  }

 private:
  const RowLayout& layout_;
  const int64_t read_bytes_;
  float* const out_;
  std::vector<float> scales_;
};

class ContainsStages : public ReadStages<ContainsStages> {
 public:
  ContainsStages(const EmbeddingTable* table, uint8_t* found)
      : ReadStages<ContainsStages>(table), found_(found) {}
  void PrefetchRow(const char*) const {}
  void FinishRow(int64_t position, const char* row) { found_[position] = row != nullptr ? 1 : 0; }

 private:
  uint8_t* const found_;
};

// Reads ids in batch order, in the table's read room. Windows of ids go through the same four steps
// as in RunWindows. The window is small and its loops have constant bounds: a blocked prefetch
// stalls the core as soon as its reorder buffer is full, so every instruction between two
// prefetches costs time. (Measured: 8 beats 4, 16 and 32.)
template <typename Stages>
class UnsortedRead {
 public:
  UnsortedRead(const EmbeddingTable& table, Stages* stages)
      : views_(TableInternals::Views(table)),
        rows_(TableInternals::Arena(table).view()),
        stages_(stages) {}

  // At least one window. The last one overlaps the one before where n is not a multiple of it:
  // rows are copied twice, which costs less than to wait for every row of a rest.
  void Run(const int64_t* ids, int64_t n) {
    const int64_t windows = (n + kIds - 1) / kIds;
    const auto first = [n](int64_t window) { return std::min(window * kIds, n - kIds); };
    for (int64_t step = 0; step < windows + 3; ++step) {
      if (step < windows) Fetch(ids + first(step), &ring_[step % 4]);
      if (step >= 1 && step - 1 < windows) Probe(ids + first(step - 1), &ring_[(step - 1) % 4]);
      if (step >= 2 && step - 2 < windows) Resolve(ids + first(step - 2), &ring_[(step - 2) % 4]);
      if (step >= 3) Finish(first(step - 3), ring_[(step - 3) % 4]);
    }
  }

 private:
  static constexpr int kIds = 8;
  struct Ahead {
    const FlatIndex::Line* lines[kIds];
    const char* rows[kIds];
    int pending[kIds];
    int num_pending;
  };

  void Fetch(const int64_t* ids, Ahead* ahead) const {
    for (int j = 0; j < kIds; ++j) {
      const uint64_t hash = MixId(ids[j]);
      ahead->lines[j] = views_[ShardOf(hash)].HomeLine(hash);
      __builtin_prefetch(ahead->lines[j], 0);
    }
  }

  void Probe(const int64_t* ids, Ahead* ahead) const {
    const RowArena::View rows = rows_;
    int num_pending = 0;
    for (int j = 0; j < kIds; ++j) {
      const uint32_t row = FlatIndex::RowInLine(ahead->lines[j], ids[j]);
      const char* address = rows.Address(row);
      ahead->rows[j] = address;
      stages_->PrefetchRow(address);
      ahead->pending[num_pending] = j;
      num_pending += row == 0;
    }
    ahead->num_pending = num_pending;
    for (int k = 0; k < num_pending; ++k) PrefetchOverflow(ahead->lines[ahead->pending[k]]);
  }

  // Ids that are absent, or in a later line.
  void Resolve(const int64_t* ids, Ahead* ahead) const {
    for (int k = 0; k < ahead->num_pending; ++k) {
      const int j = ahead->pending[k];
      ahead->rows[j] = FlatIndex::HasEmpty(ahead->lines[j]) ? nullptr : FindRow(ids[j]);
      if (ahead->rows[j] != nullptr) stages_->PrefetchRow(ahead->rows[j]);
    }
  }

  void Finish(int64_t first, const Ahead& ahead) {
    for (int j = 0; j < kIds; ++j) stages_->FinishRow(first + j, ahead.rows[j]);
  }

  const char* FindRow(int64_t id) const {
    const uint64_t hash = MixId(id);
    const uint32_t row = views_[ShardOf(hash)].FindRow(hash, id);
    return row == 0 ? nullptr : rows_.Address(row);
  }

  const FlatIndex::View* const views_;
  const RowArena::View rows_;
  Stages* const stages_;
  Ahead ring_[4];
};

template <typename Stages>
void RunTile(const EmbeddingTable* table, const int64_t* ids, int64_t n, Stages stages) {
  if (n >= kMinUnsortedIds) {
    const TryReadRoom room(TableInternals::Room(*table));
    if (room.entered()) return UnsortedRead<Stages>(*table, &stages).Run(ids, n);
  }
  TileScratch* scratch = ThreadTileScratch();
  scratch->Sort(ids, n);
  RunWindows(scratch->entries.data(), scratch->offsets, 0, kNumShards, &stages);
}

void LookupTile(const EmbeddingTable* table, const int64_t* ids, int64_t n, float* out) {
  if (!table->layout().all_raw) return RunTile(table, ids, n, RetrieveStages(table, out));
  switch (table->dim()) {
    case 1:
      return RunTile(table, ids, n, CopyStages<1>(table, out));
    case 4:
      return RunTile(table, ids, n, CopyStages<4>(table, out));
    case 8:
      return RunTile(table, ids, n, CopyStages<8>(table, out));
    case 16:
      return RunTile(table, ids, n, CopyStages<16>(table, out));
    case 32:
      return RunTile(table, ids, n, CopyStages<32>(table, out));
    case 64:
      return RunTile(table, ids, n, CopyStages<64>(table, out));
    default:
      return RunTile(table, ids, n, CopyStages<0>(table, out));
  }
}

// What a read of `table` looks at first. Inlined by force: GCC drops calls of functions that only
// prefetch.
__attribute__((always_inline)) inline void PrefetchTable(const EmbeddingTable& table) {
  __builtin_prefetch(TableInternals::Room(table), 1);
  __builtin_prefetch(&TableInternals::Arena(table), 0);
  const char* views = reinterpret_cast<const char*>(TableInternals::Views(table));
  for (size_t i = 0; i < kNumShards * sizeof(FlatIndex::View); i += 64) {
    __builtin_prefetch(views + i, 0);
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
  const int threads = runner == nullptr ? 1 : runner->NumThreads();
  thread_local std::vector<LookupRequest> tile_scratch;
  std::vector<LookupRequest>& tiles = tile_scratch;  // workers use the caller's list
  tiles.clear();
  int64_t remaining = 0, cost = 0;
  for (int64_t r = 0; r < num_requests; ++r) remaining += requests[r].n;
  for (int64_t r = 0; r < num_requests; ++r) {
    const LookupRequest& request = requests[r];
    const int64_t dim = request.table->dim();
    for (int64_t begin = 0; begin < request.n;) {
      // Threads that take whole tables are faster than threads that share each of them, so tiles
      // are large at first; threads should finish together, so they are small in the end.
      const int64_t share = remaining / (threads == 1 ? 1 : kTilesPerThread * threads);
      const int64_t size =
          std::min(request.n - begin, std::clamp(share, kParallelTileIds, kTileIds));
      tiles.push_back({request.table, request.ids + begin, size, request.out + begin * dim});
      begin += size;
      remaining -= size;
    }
    cost += (200 + 4 * dim) * request.n;  // two cache misses, and the copy
  }
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  RunParallel(runner, num_tiles, cost / std::max<int64_t>(1, num_tiles) + 1,
              [&tiles, num_tiles](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  if (i + 1 < num_tiles && tiles[i + 1].table != tiles[i].table) {
                    PrefetchTable(*tiles[i + 1].table);
                  }
                  LookupTile(tiles[i].table, tiles[i].ids, tiles[i].n, tiles[i].out);
                }
              });
}

void EmbeddingTable::Contains(const int64_t* ids, int64_t n, uint8_t* found) const {
  for (int64_t begin = 0; begin < n; begin += kTileIds) {
    RunTile(this, ids + begin, std::min(kTileIds, n - begin), ContainsStages(this, found + begin));
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
