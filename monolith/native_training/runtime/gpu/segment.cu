// Sums of rows by segment: by sorted row numbers, or by row splits with the columns cut into
// slices.
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/tuning.h"
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

// Item = (kSegmentRows rows of updates, pack of columns). It adds up the segments that begin in
// these rows, to their ends, so that every row is read once and every sum has the order of the
// rows.
template <typename Index>
struct SegmentTile {
  const SegmentTable<Index>* tables;
  int64_t n;
  int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Run(const SegmentTable<Index>& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.dim / kSize, &group, &pack);
    const int64_t first = group * kSegmentRows;
    if (first >= table.count) return;
    const int64_t count = table.count - first < kSegmentRows ? table.count - first : kSegmentRows;
    const int64_t before = first > 0 ? static_cast<int64_t>(table.indices[first - 1]) : -1;
    Index segments[kSegmentRows];
    for (int k = 0; k < kSegmentRows; ++k) {
      segments[k] = table.indices[first + (k < count ? k : count - 1)];
    }
    int64_t last = before;
    bool good = true;
    for (int k = 0; k < kSegmentRows; ++k) {
      const int64_t segment = static_cast<int64_t>(segments[k]);
      good = good && segment >= 0 && segment >= last && segment < table.rows;
      last = segment;
    }
    if (!good) {
      MarkBad(bad);
      return;
    }
    if (last == before || table.out == nullptr) return;
    const float* const from = table.updates + first * table.dim + pack * kSize;
    float* const to = table.out + pack * kSize;
    Pack<kSize> values[kSegmentRows];
    for (int k = 0; k < kSegmentRows; ++k) {
      if (k < count && static_cast<int64_t>(segments[k]) != before) {
        values[k] = LoadAligned<kSize>(from + k * table.dim);
      }
    }
    int64_t current = before;
    Pack<kSize> sum = Zeros<kSize>();
    for (int k = 0; k < kSegmentRows; ++k) {
      const int64_t segment = static_cast<int64_t>(segments[k]);
      if (k >= count || segment == before) continue;
      if (segment == current) {
        AddTo(&sum, values[k]);
        continue;
      }
      if (current != before) StoreAligned<kSize>(sum, to + current * table.dim);
      current = segment;
      sum = values[k];
    }
    AddRest<kSize>(table, first + kSegmentRows, pack, current, &sum);
    StoreAligned<kSize>(sum, to + current * table.dim);
  }

  // Adds the rows from `i` on that belong to `segment`.
  template <int kSize>
  MONO_DEVICE void AddRest(const SegmentTable<Index>& table, int64_t i, int64_t pack,
                           int64_t segment, Pack<kSize>* sum) const {
    constexpr int kAtOnce = 4;
    const float* from = table.updates + i * table.dim + pack * kSize;
    for (bool more = true; more; i += kAtOnce, from += kAtOnce * table.dim) {
      bool mine[kAtOnce];
      Pack<kSize> values[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) {
        mine[k] = i + k < table.count && static_cast<int64_t>(table.indices[i + k]) == segment;
      }
      for (int k = 0; k < kAtOnce; ++k) {
        if (mine[k]) values[k] = LoadAligned<kSize>(from + k * table.dim);
      }
      for (int k = 0; k < kAtOnce; ++k) {
        more = more && mine[k];
        if (more) AddTo(sum, values[k]);
      }
    }
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
    const int64_t pack = dim % 4 == 0 && IsAligned(updates[i]) && IsAligned(to) ? 4 : 1;
    tables.push_back({static_cast<const Index*>(indices[i]), updates[i], to, counts[i], rows[i],
                      dim, tiles, pack});
    tiles += CeilDiv(CeilDiv(counts[i], kSegmentRows) * (dim / pack), kLanes);
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

// Item = (example, pack of columns).
struct ReduceTile {
  const Table* tables;
  int64_t n;
  int64_t batch;

  template <int kSize>
  MONO_DEVICE void Run(const Table& table, int64_t item) const {
    const int64_t packs = table.width / kSize;
    if (item >= batch * packs) return;
    int64_t b, pack;
    DivMod(item, packs, &b, &pack);
    const int64_t begin = table.splits[b];
    int64_t end = table.splits[b + 1];
    // Bad splits are found elsewhere in this launch; here nothing outside the table is read.
    if (begin < 0 || end > table.rows) end = begin;
    const int64_t column = pack * kSize;
    const float* from = table.data + begin * table.width + column;
    Pack<kSize> sum = Zeros<kSize>();
    for (int64_t row = begin; row < end; row += kReduceRows, from += kReduceRows * table.width) {
      Pack<kSize> values[kReduceRows];
      for (int k = 0; k < kReduceRows; ++k) {
        if (row + k < end) values[k] = LoadAligned<kSize>(from + k * table.width);
      }
      for (int k = 0; k < kReduceRows; ++k) {
        if (row + k >= end) continue;
        if (row + k == begin) {
          sum = values[k];
        } else {
          AddTo(&sum, values[k]);
        }
      }
    }
    const Slice& slice = table.SliceOf(column);
    StoreAligned<kSize>(sum, slice.data + b * slice.dim + (column - slice.column));
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

// Item = (kSpreadRows rows of the table, pack of columns). There is at least one example. Where the
// splits are bad any of them is taken.
struct SpreadTile {
  const Table* tables;
  int64_t n;
  int64_t batch;

  // The example of `row`, which is `low` or a later one.
  MONO_DEVICE int64_t ExampleOf(const int32_t* splits, int64_t low, int64_t row) const {
    for (int step = 0; step < 4; ++step) {
      if (low + 1 >= batch || splits[low + 1] > row) return low;
      ++low;
    }
    return LastAtMost(splits, low, batch, row);
  }

  template <int kSize>
  MONO_DEVICE void Run(const Table& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.width / kSize, &group, &pack);
    const int64_t first = group * kSpreadRows;
    if (first >= table.rows) return;
    const int64_t column = pack * kSize;
    const Slice& slice = table.SliceOf(column);
    const float* const from = slice.data + (column - slice.column);
    float* const to = table.data + first * table.width + column;
    int64_t examples[kSpreadRows];
    examples[0] = LastAtMost(table.splits, 0, batch, first);
    for (int k = 1; k < kSpreadRows; ++k) {
      examples[k] = ExampleOf(table.splits, examples[k - 1], first + k);
    }
    Pack<kSize> values[kSpreadRows];
    for (int k = 0; k < kSpreadRows; ++k) {
      values[k] = LoadAligned<kSize>(from + examples[k] * slice.dim);
    }
    for (int k = 0; k < kSpreadRows; ++k) {
      if (first + k < table.rows) StoreAligned<kSize>(values[k], to + k * table.width);
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

// Runs Tile{tables, n, batch} over tables whose rows are cut into groups of `group_rows`; 0: over
// their examples.
template <typename Tile>
int RunOnTables(Stream stream, const ReduceArguments& in, int64_t group_rows, void* workspace,
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
    const int64_t groups = group_rows == 0 ? in.batch : CeilDiv(in.rows[i], group_rows);
    if (width == 0 || groups == 0 || in.batch == 0) continue;
    tables.push_back({in.splits + i * (in.batch + 1), nullptr, in.table_data[i],
                      static_cast<int64_t>(slices.size()) - first_slice, in.rows[i], width, tiles,
                      pack});
    first_slices.push_back(first_slice);
    tiles += CeilDiv(groups * (width / pack), kLanes);
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
                                   /*group_rows=*/0, workspace, workspace_bytes);
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
        kSpreadRows, workspace, workspace_bytes);
  });
}
