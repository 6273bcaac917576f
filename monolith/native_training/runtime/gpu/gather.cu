// Embeddings of several tables gathered from one flat buffer by float offset, and back.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/bucket_sum.h"
#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int kPacks = 4;  // for each lane of a tile
constexpr int64_t kTilePacks = int64_t{kLanes} * kPacks;

struct Table {
  const int32_t* offsets;
  float* out;
  int64_t count;
  int64_t dim;
  int64_t first_tile;
  int64_t pack;  // floats that a lane copies at once
};

struct GatherTile {
  const Table* tables;
  int64_t n;
  const float* fused;
  int64_t fused_size;
  int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Copy(const Table& table, int64_t first, int lane) const {
    const int64_t packs = table.dim / kSize;
    const int64_t end = table.count * packs;
    // All loads before the first store: that many are in flight at a time.
    Pack<kSize> values[kPacks];
    for (int p = 0; p < kPacks; ++p) {
      const int64_t item = first + p * kLanes + lane;
      values[p] = Zeros<kSize>();
      if (item >= end) continue;
      int64_t row, pack;
      DivMod(item, packs, &row, &pack);
      const int64_t offset = table.offsets[row];
      if (offset < 0 || offset > fused_size - table.dim) {
        MarkBad(bad);
        continue;
      }
      values[p] = Load<kSize>(fused + offset + pack * kSize);
    }
    for (int p = 0; p < kPacks; ++p) {
      const int64_t item = first + p * kLanes + lane;
      if (item < end) Store<kSize>(values[p], table.out + item * kSize);
    }
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Table table = tables[FindPart(tables, n, tile)];
    const int64_t first = (tile - table.first_tile) * kTilePacks;
    if (table.pack == 4) {
      Copy<4>(table, first, lane);
    } else {
      Copy<1>(table, first, lane);
    }
  }
};

// Where rows have several widths, they are cut into pieces of one (bucket_sum.h): a table of
// dimension 48 and pieces of 16 has three times as many rows, one after the other in memory.
struct GradTable {
  const float* grads;
  const int32_t* offsets;
  int64_t dim;         // of a piece
  int64_t first_tile;  // number of its first piece
  int64_t pieces;      // of a row

  // Where the row lies that piece `number` is of.
  MONO_DEVICE int64_t OffsetOf(int64_t number) const {
    return offsets[pieces == 1 ? number - first_tile : (number - first_tile) / pieces];
  }
  MONO_DEVICE int64_t PieceOf(int64_t number) const {
    return pieces == 1 ? 0 : (number - first_tile) % pieces;
  }
};

// Row numbers with their keys, kPacks of them for each lane.
struct ListRows {
  struct alignas(16) Four {
    uint32_t values[kPacks];
  };

  const GradTable* tables;
  int64_t n;
  GradTable first;  // if it is the only one
  int64_t num_rows;
  int64_t out_size;
  Keys of;
  uint32_t* keys;
  uint32_t* rows;
  int32_t* bad;
  int32_t* unaligned;

  MONO_DEVICE GradTable TableOf(int64_t row) const {
    return n == 1 ? first : tables[FindPart(tables, n, row)];
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const int64_t begin = (tile * kLanes + lane) * kPacks;
    int64_t offsets[kPacks];
    Four keys_of, rows_of;
    MONO_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      offsets[p] = begin + p < num_rows ? TableOf(begin + p).OffsetOf(begin + p) : 0;
    }
    MONO_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      rows_of.values[p] = static_cast<uint32_t>(begin + p);
      keys_of.values[p] = begin + p < num_rows ? KeyOf(begin + p, offsets[p]) : kNothing;
    }
    if (begin + kPacks <= num_rows) {
      *reinterpret_cast<Four*>(keys + begin) = keys_of;
      *reinterpret_cast<Four*>(rows + begin) = rows_of;
      return;
    }
    for (int p = 0; begin + p < num_rows; ++p) {
      keys[begin + p] = keys_of.values[p];
      rows[begin + p] = rows_of.values[p];
    }
  }

  MONO_DEVICE uint32_t KeyOf(int64_t row, int64_t offset) const {
    const GradTable table = TableOf(row);
    if (offset < 0 || offset > out_size - table.dim * table.pieces) {
      MarkBad(bad);
      return kNothing;
    }
    if (table.dim == 0) return kNothing;
    return of.Of(offset + table.PieceOf(row) * table.dim, unaligned);
  }
};

// Rows of gradients, as scatter_sum.h wants them.
struct GradRows {
  const GradTable* tables;
  int64_t n;
  GradTable first;  // the only one, often: then nothing has to be looked up
  const float* scale;
  int64_t min_width;
  bool one_width;
  const int32_t* unaligned;  // not 0: some place is no multiple of min_width
  // Known to what Ready returns.
  float by;
  bool aligned;

  MONO_DEVICE GradRows Ready() const {
    GradRows ready = *this;
    ready.by = ReadOnly(scale);
    ready.aligned = ReadOnly(unaligned) == 0;
    return ready;
  }

  MONO_DEVICE GradTable TableOf(uint32_t row) const {
    return n == 1 ? first : tables[FindPart(tables, n, row)];
  }

  MONO_DEVICE bool CannotOverlap() const { return one_width && aligned; }

  MONO_DEVICE int64_t Place(uint32_t key, uint32_t row) const {
    if (aligned) return static_cast<int64_t>(key) * min_width;
    const GradTable table = TableOf(row);
    return table.OffsetOf(row) + table.PieceOf(row) * table.dim;
  }

  MONO_DEVICE int64_t Width(uint32_t row) const { return one_width ? min_width : TableOf(row).dim; }

  MONO_DEVICE uint32_t Locate(uint32_t row) const { return row; }

  MONO_DEVICE const float* Address(uint32_t row, int64_t column) const {
    const GradTable table = TableOf(row);
    if (column >= table.dim) return nullptr;
    return table.grads + (static_cast<int64_t>(row) - table.first_tile) * table.dim + column;
  }

  static constexpr bool kWithLocations = false;

  MONO_DEVICE const float* Row(uint32_t row) const { return Address(row, 0); }

  template <int kSize>
  MONO_DEVICE void Finish(uint32_t, Pack<kSize>* term) const {
    for (int k = 0; k < kSize; ++k) term->values[k] = by * term->values[k];
  }

  template <int kSize>
  MONO_DEVICE void AddOne(uint32_t row, int64_t column, Pack<kSize>* sum) const {
    Pack<kSize> term = Load<kSize>(Address(row, column));
    Finish<kSize>(row, &term);
    AddTo(sum, term);
  }
};

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_gather(void* stream, int64_t tables, const float* fused, int64_t fused_size,
                       const int32_t* const* offsets, const int64_t* counts, const int64_t* dims,
                       float* const* outputs, void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    std::vector<Table> parts;
    int64_t tiles = 0;
    for (int64_t m = 0; m < tables; ++m) {
      if (counts[m] == 0) continue;
      const int64_t pack = dims[m] % 4 == 0 ? 4 : 1;
      parts.push_back({offsets[m], outputs[m], counts[m], dims[m], tiles, pack});
      tiles += CeilDiv(counts[m] * (dims[m] / pack), kTilePacks);
    }
    Workspace space;
    const auto slot = space.Put(parts);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    return ForTiles(stream, tiles,
                    GatherTile{space.At(slot), static_cast<int64_t>(parts.size()), fused,
                               fused_size, space.bad()});
  });
}

int mono_gpu_op_gather_grad(void* stream, int64_t tables, const float* const* grads,
                            const int32_t* const* offsets, const int64_t* counts,
                            const int64_t* dims, const float* scale, float* out, int64_t out_size,
                            void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    int64_t num_offsets = 0, floats = 0, min_dim = INT64_MAX, max_dim = 1, divisor = 0;
    bool packed = true;
    for (int64_t m = 0; m < tables; ++m) {
      // Tables without rows count, too: where theirs would lie, those of others do not.
      if (dims[m] > 0) min_dim = std::min(min_dim, dims[m]);
      max_dim = std::max(max_dim, dims[m]);
      divisor = std::gcd(divisor, dims[m]);
      packed = packed && dims[m] % 4 == 0;
      num_offsets += counts[m];
      floats += counts[m] * dims[m];
    }
    min_dim = std::min(min_dim, max_dim);
    if (num_offsets > INT32_MAX) {
      return Fail(MONO_GPU_INVALID_ARGUMENT, "embedding_offsets have " +
                                                 std::to_string(num_offsets) +
                                                 " elements together, want less than 2^31");
    }
    const bool cut = divisor > 0 && PiecesArePaid(num_offsets, floats / divisor);
    if (cut) min_dim = max_dim = divisor;
    std::vector<GradTable> parts;
    int64_t rows = 0;
    for (int64_t m = 0; m < tables; ++m) {
      if (counts[m] == 0) continue;
      const int64_t pieces = cut && dims[m] > 0 ? dims[m] / divisor : 1;
      parts.push_back({grads[m], offsets[m], dims[m] / pieces, rows, pieces});
      rows += counts[m] * pieces;
    }
    Keys of;
    MONO_GPU_TRY(MakeKeys(out_size, min_dim, &of));
    const bool one_width = min_dim == max_dim;
    if (one_width) ChooseBuckets(rows, max_dim, packed ? 4 : 1, &of);
    int64_t sort_bytes = 0;
    MONO_GPU_TRY(SortScratch<uint32_t>(rows, of.bits, &sort_bytes, of.shift));
    Workspace space;
    const auto slot = space.Put(parts);
    const auto overlap = space.Put(std::vector<int32_t>{0});
    const auto unaligned = space.Put(std::vector<int32_t>{0});
    const auto any_long = space.Put(std::vector<int32_t>{0});
    const auto keys = space.Scratch<uint32_t>(rows);
    const auto sorted_keys = space.Scratch<uint32_t>(rows);
    const auto numbers = space.Scratch<uint32_t>(rows);
    const auto sorted_numbers = space.Scratch<uint32_t>(rows);
    const auto sort_scratch = space.Scratch<char>(sort_bytes);
    const auto spans = space.Scratch<Span>(one_width ? NumBuckets(of) : 0);
    const auto partials = space.Scratch<float>(one_width ? BucketPartials(rows, max_dim, of)
                                                         : RunPartials(rows, of, max_dim));
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    const int64_t n = static_cast<int64_t>(parts.size());
    const GradTable first = rows > 0 ? parts[0] : GradTable{};
    MONO_GPU_TRY(ForTiles(stream, CeilDiv(rows, kTilePacks),
                          ListRows{space.At(slot), n, first, rows, out_size, of, space.At(keys),
                                   space.At(numbers), space.bad(), space.At(unaligned)}));
    MONO_GPU_TRY(SortPairs(stream, space.At(sort_scratch), sort_bytes, space.At(keys),
                           space.At(sorted_keys), space.At(numbers), space.At(sorted_numbers), rows,
                           of.bits, of.shift));
    const Runs runs{space.At(sorted_keys), space.At(sorted_numbers), rows, of};
    const GradRows source{space.At(slot),      n,    first, scale, min_dim, one_width,
                          space.At(unaligned), 0.0f, false};
    if (one_width) {
      const auto add = packed ? SumBuckets<4, GradRows> : SumBuckets<1, GradRows>;
      return add(stream, runs, source, max_dim, space.bad(), space.At(unaligned), space.At(spans),
                 space.At(partials), space.At(any_long), out, out_size);
    }
    const auto scatter = packed ? ScatterSum<4, true, GradRows> : ScatterSum<1, true, GradRows>;
    return scatter(stream, runs, source, max_dim, space.bad(), space.At(overlap),
                   space.At(partials), space.At(any_long), out, out_size);
  });
}
