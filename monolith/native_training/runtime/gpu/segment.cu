// Sums of rows by segment: by sorted row numbers, or by row splits with the columns cut into
// slices.
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

template <typename Index>
struct SegmentTable {
  const Index* indices;
  const float* updates;
  float* out;
  int64_t count;
  int64_t rows;
  int64_t dim;
  int64_t first_tile;
  int64_t pack;
};

// Item = (row of updates, pack of columns). The first row of a segment adds up the segment.
template <typename Index>
struct SegmentTile {
  const SegmentTable<Index>* tables;
  int64_t n;
  int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Run(const SegmentTable<Index>& table, int64_t item) const {
    const int64_t packs = table.dim / kSize;
    if (item >= table.count * packs) return;
    int64_t i, pack;
    DivMod(item, packs, &i, &pack);
    const int64_t segment = static_cast<int64_t>(table.indices[i]);
    const int64_t before = i > 0 ? static_cast<int64_t>(table.indices[i - 1]) : -1;
    if (segment < before || segment < 0 || segment >= table.rows) {
      MarkBad(bad);
      return;
    }
    if (segment == before || table.out == nullptr) return;
    const float* value = table.updates + i * table.dim + pack * kSize;
    Pack<kSize> sum = Load<kSize>(value);
    for (++i; i < table.count && static_cast<int64_t>(table.indices[i]) == segment; ++i) {
      value += table.dim;
      AddTo(&sum, Load<kSize>(value));
    }
    Store<kSize>(sum, table.out + segment * table.dim + pack * kSize);
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const SegmentTable<Index> table = tables[FindPart(tables, n, tile)];
    const int64_t item = (tile - table.first_tile) * kLanes + lane;
    if (table.pack == 4) {
      Run<4>(table, item);
    } else {
      Run<1>(table, item);
    }
  }
};

template <typename Index>
int SegmentSum(Stream stream, int64_t n, const void* const* indices, const int64_t* counts,
               const float* const* updates, const int64_t* rows, const int64_t* dims, float* out,
               int64_t out_size, const int64_t* out_offsets, void* workspace,
               int64_t* workspace_bytes) {
  std::vector<SegmentTable<Index>> tables;
  int64_t tiles = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] == 0) continue;
    // Without columns there is nothing to add, but the indices are looked at.
    const int64_t dim = dims[i] > 0 ? dims[i] : 1;
    float* const to = dims[i] > 0 ? out + out_offsets[i] : nullptr;
    const int64_t pack = dim % 4 == 0 ? 4 : 1;
    tables.push_back({static_cast<const Index*>(indices[i]), updates[i], to, counts[i], rows[i],
                      dim, tiles, pack});
    tiles += CeilDiv(counts[i] * (dim / pack), kLanes);
  }
  Workspace space;
  const auto slot = space.Put(tables);
  if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
  MONO_GPU_TRY(space.Upload(stream));
  MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
  return ForTiles(
      stream, tiles,
      SegmentTile<Index>{space.At(slot), static_cast<int64_t>(tables.size()), space.bad()});
}

// One slice of the columns of a table.
struct Slice {
  const int32_t* splits;
  const float* from;
  float* to;
  int64_t rows;    // of the table
  int64_t width;   // of the table
  int64_t column;  // in the table
  int64_t dim;
  int64_t first_tile;
  int64_t pack;
};

// The row splits of every table, checked by the slices' own tiles as far as they use them, and here
// at both ends.
struct CheckEnds {
  const int32_t* splits;
  const int64_t* rows;
  int64_t batch;
  int32_t* bad;

  MONO_DEVICE void operator()(int64_t table) const {
    const int32_t* const own = splits + table * (batch + 1);
    if (own[0] != 0 || own[batch] != rows[table]) MarkBad(bad);
  }
};

MONO_DEVICE bool SegmentOf(const Slice& slice, int64_t b, int32_t* bad, int64_t* begin,
                           int64_t* end) {
  *begin = slice.splits[b];
  *end = slice.splits[b + 1];
  if (*begin >= 0 && *begin <= *end && *end <= slice.rows) return true;
  MarkBad(bad);
  return false;
}

// Item = (example, pack of columns).
struct ReduceTile {
  const Slice* slices;
  int64_t n;
  int64_t batch;
  int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Run(const Slice& slice, int64_t item) const {
    const int64_t packs = slice.dim / kSize;
    if (item >= batch * packs) return;
    int64_t b, pack, begin, end;
    DivMod(item, packs, &b, &pack);
    Pack<kSize> sum = Zeros<kSize>();
    if (SegmentOf(slice, b, bad, &begin, &end) && begin < end) {
      const float* value = slice.from + begin * slice.width + slice.column + pack * kSize;
      sum = Load<kSize>(value);
      for (int64_t row = begin + 1; row < end; ++row) {
        value += slice.width;
        AddTo(&sum, Load<kSize>(value));
      }
    }
    Store<kSize>(sum, slice.to + item * kSize);
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Slice slice = slices[FindPart(slices, n, tile)];
    const int64_t item = (tile - slice.first_tile) * kLanes + lane;
    if (slice.pack == 4) {
      Run<4>(slice, item);
    } else {
      Run<1>(slice, item);
    }
  }
};

// Checks that the splits of every table never decrease: item = (table, example).
struct CheckOrder {
  const int32_t* splits;
  int64_t batch;
  int32_t* bad;

  MONO_DEVICE void operator()(int64_t item) const {
    int64_t table, b;
    DivMod(item, batch, &table, &b);
    const int32_t* const own = splits + table * (batch + 1);
    if (own[b] > own[b + 1]) MarkBad(bad);
  }
};

// Item = (row of the table, pack of columns of the slice).
struct SpreadTile {
  const Slice* slices;
  int64_t n;
  int64_t batch;
  const int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Run(const Slice& slice, int64_t item) const {
    const int64_t packs = slice.dim / kSize;
    if (item >= slice.rows * packs) return;
    int64_t row, pack;
    DivMod(item, packs, &row, &pack);
    int64_t low = 0, high = batch;  // the last example that starts at or before the row
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (slice.splits[middle] <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t column = pack * kSize;
    Store<kSize>(Load<kSize>(slice.from + low * slice.dim + column),
                 slice.to + row * slice.width + slice.column + column);
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (*bad != 0) return;
    const Slice slice = slices[FindPart(slices, n, tile)];
    const int64_t item = (tile - slice.first_tile) * kLanes + lane;
    if (slice.pack == 4) {
      Run<4>(slice, item);
    } else {
      Run<1>(slice, item);
    }
  }
};

// point(table, slice number, &slice) sets what is read and written. by_rows: items are rows of the
// tables, not examples.
template <typename Point>
std::vector<Slice> CutSlices(int64_t tables, int64_t batch, const int32_t* splits,
                             const int64_t* rows, const int64_t* num_slices,
                             const int64_t* slice_dims, bool by_rows, const Point& point,
                             int64_t* tiles) {
  std::vector<Slice> slices;
  int64_t s = 0;
  *tiles = 0;
  for (int64_t i = 0; i < tables; ++i) {
    int64_t width = 0;
    for (int64_t k = 0; k < num_slices[i]; ++k) width += slice_dims[s + k];
    int64_t column = 0;
    for (int64_t k = 0; k < num_slices[i]; ++k, ++s) {
      const int64_t dim = slice_dims[s];
      const int64_t pack = dim % 4 == 0 ? 4 : 1;
      const int64_t items = (by_rows ? rows[i] : batch) * (dim / pack);
      Slice slice{
          splits + i * (batch + 1), nullptr, nullptr, rows[i], width, column, dim, *tiles, pack};
      point(i, s, &slice);
      column += dim;
      if (items == 0) continue;
      slices.push_back(slice);
      *tiles += CeilDiv(items, kLanes);
    }
  }
  return slices;
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_segment_sum(void* stream, int64_t n, int32_t index_bytes,
                            const void* const* indices, const int64_t* counts,
                            const float* const* updates, const int64_t* rows, const int64_t* dims,
                            float* out, int64_t out_size, const int64_t* out_offsets,
                            void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    const auto run = index_bytes == 8 ? SegmentSum<int64_t> : SegmentSum<int32_t>;
    return run(stream, n, indices, counts, updates, rows, dims, out, out_size, out_offsets,
               workspace, workspace_bytes);
  });
}

int mono_gpu_op_reduce_split(void* stream, int64_t tables, int64_t batch, const int32_t* splits,
                             const float* const* updates, const int64_t* rows,
                             const int64_t* num_slices, const int64_t* slice_dims,
                             float* const* slices, void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    int64_t tiles;
    const std::vector<Slice> parts = CutSlices(
        tables, batch, splits, rows, num_slices, slice_dims, /*by_rows=*/false,
        [&](int64_t table, int64_t s, Slice* slice) {
          slice->from = updates[table];
          slice->to = slices[s];
        },
        &tiles);
    Workspace space;
    const auto slot = space.Put(parts);
    const auto ends = space.Put(std::vector<int64_t>(rows, rows + tables));
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(ForEach(stream, tables, CheckEnds{splits, space.At(ends), batch, space.bad()}));
    return ForTiles(
        stream, tiles,
        ReduceTile{space.At(slot), static_cast<int64_t>(parts.size()), batch, space.bad()});
  });
}

int mono_gpu_op_reduce_split_grad(void* stream, int64_t tables, int64_t batch,
                                  const int32_t* splits, const float* const* slices,
                                  const int64_t* rows, const int64_t* num_slices,
                                  const int64_t* slice_dims, float* const* outputs, void* workspace,
                                  int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    int64_t tiles;
    const std::vector<Slice> parts = CutSlices(
        tables, batch, splits, rows, num_slices, slice_dims, /*by_rows=*/true,
        [&](int64_t table, int64_t s, Slice* slice) {
          slice->from = slices[s];
          slice->to = outputs[table];
        },
        &tiles);
    Workspace space;
    const auto slot = space.Put(parts);
    const auto ends = space.Put(std::vector<int64_t>(rows, rows + tables));
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(ForEach(stream, tables, CheckEnds{splits, space.At(ends), batch, space.bad()}));
    MONO_GPU_TRY(ForEach(stream, tables * batch, CheckOrder{splits, batch, space.bad()}));
    // Rows without an example are bad, so what remains has one.
    if (batch == 0) return MONO_GPU_OK;
    return ForTiles(
        stream, tiles,
        SpreadTile{space.At(slot), static_cast<int64_t>(parts.size()), batch, space.bad()});
  });
}
