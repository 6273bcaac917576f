// Sums of rows by segment: by sorted row numbers, or by row splits with the columns cut into
// slices.
#include <cstdint>
#include <numeric>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/tuning.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int64_t kManyRows = 1 << 20;

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

// Item = (rows_of_item rows of updates, pack of columns). It adds up the segments that begin in
// these rows, to their ends, so that every row is added once and every sum has the order of the
// rows. Indices and values are read together, kSegmentRows at a time: to wait for an index before
// its value is asked for would take twice as long, and the few rows of a segment that began before
// cost little.
template <typename Index>
struct SegmentTile {
  const SegmentTable<Index>* tables;
  int64_t n;
  int64_t rows_of_item;
  int32_t* bad;

  static constexpr int kMinBlocks = 3;

  template <int kSize>
  MONO_DEVICE void Run(const SegmentTable<Index>& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.dim / kSize, &group, &pack);
    const int64_t first = group * rows_of_item;
    if (first >= table.count) return;
    const int64_t end = table.count - first < rows_of_item ? table.count : first + rows_of_item;
    const int64_t before = first > 0 ? static_cast<int64_t>(table.indices[first - 1]) : INT64_MIN;
    if (first > 0 && static_cast<int64_t>(table.indices[end - 1]) == before) {
      // All of one segment, unless they are out of order.
      for (int64_t i = first; i < end; ++i) {
        if (static_cast<int64_t>(table.indices[i]) != before) MarkBad(bad);
      }
      return;
    }
    const bool add = table.out != nullptr;
    const float* from = table.updates + first * table.dim + pack * kSize;
    float* const to = table.out + pack * kSize;
    int64_t current = before;
    Pack<kSize> sum = Zeros<kSize>();
    for (int64_t i = first; i < table.count; i += kSegmentRows) {
      Index segments[kSegmentRows];
      Pack<kSize> values[kSegmentRows];
      MONO_UNROLL
      for (int k = 0; k < kSegmentRows; ++k) {
        const bool inside = i + k < table.count;
        segments[k] = inside ? table.indices[i + k] : Index{-1};
        values[k] = inside && add ? LoadAligned<kSize>(from) : Zeros<kSize>();
        if (inside) from += table.dim;
      }
      MONO_UNROLL
      for (int k = 0; k < kSegmentRows; ++k) {
        const int64_t segment = static_cast<int64_t>(segments[k]);
        if (i + k >= table.count) continue;
        if (segment == current) {
          AddTo(&sum, values[k]);
          continue;
        }
        if (current != before && add) StoreAligned<kSize>(sum, to + current * table.dim);
        if (i + k >= end) return;
        if (segment < current || segment < 0 || segment >= table.rows) {
          MarkBad(bad);
          return;
        }
        current = segment;
        sum = values[k];
      }
    }
    if (current != before && add) StoreAligned<kSize>(sum, to + current * table.dim);
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
  // Long items where there are enough of them to fill a card.
  const int64_t all = std::accumulate(counts, counts + n, int64_t{0});
  const int64_t rows_of_item = kSegmentRows * (all >= kManyRows ? 4 : 1);
  std::vector<SegmentTable<Index>> tables;
  int64_t tiles = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] == 0) continue;
    // Without columns there is nothing to add, but the indices are looked at.
    const int64_t dim = dims[i] > 0 ? dims[i] : 1;
    float* const to = dims[i] > 0 ? out + out_offsets[i] : nullptr;
    const int64_t pack = dim % 4 == 0 && IsAligned(updates[i]) && IsAligned(to) ? 4 : 1;
    tables.push_back({static_cast<const Index*>(indices[i]), updates[i], to, counts[i], rows[i],
                      dim, tiles, pack});
    tiles += CeilDiv(CeilDiv(counts[i], rows_of_item) * (dim / pack), kLanes);
  }
  Workspace space;
  const auto slot = space.Put(tables);
  if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
  MONO_GPU_TRY(space.Upload(stream));
  MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
  return ForTiles(stream, tiles,
                  SegmentTile<Index>{space.At(slot), static_cast<int64_t>(tables.size()),
                                     rows_of_item, space.bad()});
}

// Columns of a table: those of one slice.
struct Slice {
  float* data;
  int64_t column;  // in the table
  int64_t dim;
};

struct Table {
  const int32_t* splits;
  const Slice* slices;
  float* data;
  int64_t num_slices;
  int64_t rows;
  int64_t width;
  int64_t first_tile;
  int64_t pack;

  // The slice that has a column.
  MONO_DEVICE const Slice& SliceOf(int64_t column) const {
    int64_t low = 0, high = num_slices;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (slices[middle].column <= column) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return slices[low];
  }
};

// Checks the row splits of every table: item = (table, split).
struct CheckSplits {
  const int32_t* splits;
  const int64_t* rows;
  int64_t batch;
  int32_t* bad;

  MONO_DEVICE void operator()(int64_t item) const {
    int64_t table, b;
    DivMod(item, batch + 1, &table, &b);
    const int64_t split = splits[item];
    if (b == 0 ? split != 0 : split < splits[item - 1]) MarkBad(bad);
    if (b == batch && split != rows[table]) MarkBad(bad);
  }
};

// Item = (kReduceExamples examples, pack of columns). Their rows follow one another, so kReduceRows
// of them are read at a time, whatever examples they belong to. Bad splits are found elsewhere in
// this launch; here nothing outside the table is read.
struct ReduceTile {
  const Table* tables;
  int64_t n;
  int64_t batch;

  template <int kSize>
  MONO_DEVICE void Run(const Table& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.width / kSize, &group, &pack);
    const int64_t first = group * kReduceExamples;
    if (first >= batch) return;
    const int64_t column = pack * kSize;
    const Slice slice = table.SliceOf(column);
    float* to = slice.data + first * slice.dim + (column - slice.column);
    // Ends of the examples, and that none of them lies before its begin.
    int32_t ends[kReduceExamples];
    MONO_UNROLL
    for (int e = 0; e < kReduceExamples; ++e) {
      ends[e] = first + e < batch ? table.splits[first + e + 1] : 0;
    }
    int64_t row = table.splits[first];
    if (row < 0) row = table.rows;
    const float* from = table.data + row * table.width + column;
    int e = 0;
    Pack<kSize> sum = Zeros<kSize>();
    bool any = false;
    int64_t last = row;  // behind the last row of all
    MONO_UNROLL
    for (int k = 0; k < kReduceExamples; ++k) last = ends[k] > last ? ends[k] : last;
    if (last > table.rows) last = row;
    for (; row < last; row += kReduceRows) {
      Pack<kSize> values[kReduceRows];
      MONO_UNROLL
      for (int k = 0; k < kReduceRows; ++k) {
        if (row + k < last) values[k] = LoadAligned<kSize>(from);
        from += table.width;
      }
      MONO_UNROLL
      for (int k = 0; k < kReduceRows; ++k) {
        if (row + k >= last) continue;
        // Examples that ended before this row, some of them empty.
        while (e + 1 < kReduceExamples && row + k >= EndOf(ends, e)) {
          StoreAligned<kSize>(sum, to);
          to += slice.dim;
          sum = Zeros<kSize>();
          any = false;
          ++e;
        }
        if (any) {
          AddTo(&sum, values[k]);
        } else {
          sum = values[k];
        }
        any = true;
      }
    }
    for (; e < kReduceExamples && first + e < batch; ++e) {
      StoreAligned<kSize>(sum, to);
      to += slice.dim;
      sum = Zeros<kSize>();
    }
  }

  // ends[e], without an array that is indexed in memory.
  MONO_DEVICE static int32_t EndOf(const int32_t* ends, int e) {
    int32_t end = ends[0];
    MONO_UNROLL
    for (int k = 1; k < kReduceExamples; ++k) end = k == e ? ends[k] : end;
    return end;
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Table table = tables[FindPart(tables, n, tile)];
    const int64_t item = (tile - table.first_tile) * kLanes + lane;
    if (table.pack == 4) {
      Run<4>(table, item);
    } else {
      Run<1>(table, item);
    }
  }
};

// Item = (kSpreadExamples examples, pack of columns): writes their gradients to all of their rows.
struct SpreadTile {
  const Table* tables;
  int64_t n;
  int64_t batch;

  template <int kSize>
  MONO_DEVICE void Run(const Table& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.width / kSize, &group, &pack);
    const int64_t first = group * kSpreadExamples;
    if (first >= batch) return;
    const int64_t column = pack * kSize;
    const Slice slice = table.SliceOf(column);
    const float* const from = slice.data + first * slice.dim + (column - slice.column);
    int32_t ends[kSpreadExamples];
    Pack<kSize> values[kSpreadExamples];
    MONO_UNROLL
    for (int e = 0; e < kSpreadExamples; ++e) {
      const bool inside = first + e < batch;
      ends[e] = inside ? table.splits[first + e + 1] : 0;
      if (inside) values[e] = LoadAligned<kSize>(from + e * slice.dim);
    }
    int64_t row = table.splits[first];
    if (row < 0) row = table.rows;
    float* to = table.data + row * table.width + column;
    MONO_UNROLL
    for (int e = 0; e < kSpreadExamples; ++e) {
      // Where the splits are bad, nothing outside the table is written.
      const int64_t end = ends[e] < table.rows ? ends[e] : table.rows;
      for (; row < end; ++row, to += table.width) StoreAligned<kSize>(values[e], to);
    }
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Table table = tables[FindPart(tables, n, tile)];
    const int64_t item = (tile - table.first_tile) * kLanes + lane;
    if (table.pack == 4) {
      Run<4>(table, item);
    } else {
      Run<1>(table, item);
    }
  }
};

// The arguments of reduce-and-split and its gradient, which differ in what they read and write.
struct ReduceArguments {
  int64_t tables;
  int64_t batch;
  const int32_t* splits;
  float* const* table_data;
  float* const* slice_data;
  const int64_t* rows;
  const int64_t* num_slices;
  const int64_t* slice_dims;
};

// Runs Tile{tables, n, batch}, each of whose items has so many examples.
template <typename Tile>
int RunOnTables(Stream stream, const ReduceArguments& in, int64_t examples, void* workspace,
                int64_t* workspace_bytes) {
  std::vector<Slice> slices;
  std::vector<Table> tables;
  std::vector<int64_t> first_slices;
  int64_t s = 0, tiles = 0;
  for (int64_t i = 0; i < in.tables; ++i) {
    int64_t width = 0, pack = IsAligned(in.table_data[i]) ? 4 : 1;
    const int64_t first_slice = static_cast<int64_t>(slices.size());
    for (int64_t k = 0; k < in.num_slices[i]; ++k, ++s) {
      const int64_t dim = in.slice_dims[s];
      if (dim == 0) continue;  // it would share its column with the next
      slices.push_back({in.slice_data[s], width, dim});
      width += dim;
      if (dim % 4 != 0 || !IsAligned(in.slice_data[s])) pack = 1;
    }
    if (width == 0 || in.batch == 0) continue;
    tables.push_back({in.splits + i * (in.batch + 1), nullptr, in.table_data[i],
                      static_cast<int64_t>(slices.size()) - first_slice, in.rows[i], width, tiles,
                      pack});
    first_slices.push_back(first_slice);
    tiles += CeilDiv(CeilDiv(in.batch, examples) * (width / pack), kLanes);
  }
  Workspace space;
  const auto slice_slot = space.Put(slices);
  if (workspace != nullptr) {
    (void)space.Measure(workspace, workspace_bytes);
    for (size_t i = 0; i < tables.size(); ++i) {
      tables[i].slices = space.At(slice_slot) + first_slices[i];
    }
  }
  const auto table_slot = space.Put(tables);
  const auto rows_slot = space.Put(std::vector<int64_t>(in.rows, in.rows + in.tables));
  if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
  MONO_GPU_TRY(space.Upload(stream));
  const int64_t checks = in.tables * (in.batch + 1);
  return ForTiles(
      stream, tiles, Tile{space.At(table_slot), static_cast<int64_t>(tables.size()), in.batch},
      CeilDiv(checks, kLanes),
      EachItem<CheckSplits>{checks, {in.splits, space.At(rows_slot), in.batch, space.bad()}});
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
    // Tables are only read here, slices in the gradient.
    return RunOnTables<ReduceTile>(stream,
                                   {tables, batch, splits, const_cast<float* const*>(updates),
                                    slices, rows, num_slices, slice_dims},
                                   kReduceExamples, workspace, workspace_bytes);
  });
}

int mono_gpu_op_reduce_split_grad(void* stream, int64_t tables, int64_t batch,
                                  const int32_t* splits, const float* const* slices,
                                  const int64_t* rows, const int64_t* num_slices,
                                  const int64_t* slice_dims, float* const* outputs, void* workspace,
                                  int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    return RunOnTables<SpreadTile>(
        stream,
        {tables, batch, splits, outputs, const_cast<float* const*>(slices), rows, num_slices,
         slice_dims},
        kSpreadExamples, workspace, workspace_bytes);
  });
}
