// Sums of rows by segment: by sorted row numbers, or by row splits with the columns cut into
// slices.
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/tuning.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

// Adds up kExamples groups of rows that follow one another, whatever group they belong to, kRows of
// them at a time: rows [row, ends[0]) are the first group's, and so on to ends[count - 1]. A group
// that ends before it begins has no rows.
template <int kSize, int kRows, int kExamples>
struct GroupSums {
  const float* from;  // a column of `row`
  int64_t width;      // from row to row
  float* to;
  int64_t step;  // from group to group

  MONO_DEVICE void Run(int64_t row, int64_t last, const int32_t (&ends)[kExamples], int64_t count) {
    int e = 0;
    Pack<kSize> sum = Zeros<kSize>();
    bool any = false;
    for (; row < last; row += kRows) {
      Pack<kSize> values[kRows];
      MONO_UNROLL
      for (int k = 0; k < kRows; ++k) {
        if (row + k < last) values[k] = LoadAligned<kSize>(from);
        from += width;
      }
      MONO_UNROLL
      for (int k = 0; k < kRows; ++k) {
        if (row + k >= last) continue;
        // Groups that ended before this row, some of them empty.
        while (e + 1 < kExamples && row + k >= EndOf(ends, e)) {
          StoreAligned<kSize>(sum, to);
          to += step;
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
    for (; e < kExamples && e < count; ++e) {
      StoreAligned<kSize>(sum, to);
      to += step;
      sum = Zeros<kSize>();
    }
  }

  // ends[e], without an array that is indexed in memory.
  MONO_DEVICE static int32_t EndOf(const int32_t (&ends)[kExamples], int e) {
    int32_t end = ends[0];
    MONO_UNROLL
    for (int k = 1; k < kExamples; ++k) end = k == e ? ends[k] : end;
    return end;
  }
};

template <typename Index>
struct SegmentIndices {
  const Index* indices;
  int64_t first_span;  // -1: there are no columns to add, but indices to check
  int64_t count;
  int64_t rows;  // of the output
  int64_t first_tile;
};

struct SegmentTable {
  const float* updates;
  int64_t first_span;
  float* out;
  int64_t rows;
  int64_t dim;
  int64_t first_tile;
  int64_t pack;
};

constexpr int kIndicesOfLane = 4;

// Checks the indices and notes where each segment begins and ends. That is a twentieth of what the
// sums read; in return those know what to read before they read it, and no output is zeroed first.
template <typename Index>
struct MarkSegments {
  const SegmentIndices<Index>* tables;
  int64_t n;
  Span* spans;
  int32_t* bad;

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const SegmentIndices<Index> table = tables[FindPart(tables, n, tile)];
    const int64_t first = (tile - table.first_tile) * (kLanes * kIndicesOfLane) + lane;
    int64_t segments[kIndicesOfLane], before[kIndicesOfLane];
    MONO_UNROLL
    for (int k = 0; k < kIndicesOfLane; ++k) {
      const int64_t i = first + k * kLanes;
      segments[k] = i < table.count ? static_cast<int64_t>(table.indices[i]) : 0;
      before[k] = i < table.count && i > 0 ? static_cast<int64_t>(table.indices[i - 1]) : -1;
    }
    MONO_UNROLL
    for (int k = 0; k < kIndicesOfLane; ++k) {
      if (first + k * kLanes < table.count) Mark(table, first + k * kLanes, segments[k], before[k]);
    }
  }

  MONO_DEVICE void Mark(const SegmentIndices<Index>& table, int64_t i, int64_t segment,
                        int64_t before) const {
    if (segment < 0 || segment >= table.rows || before >= table.rows || segment < before) {
      MarkBad(bad);
      return;
    }
    if (table.first_span < 0) return;
    Span* const own = spans + table.first_span;
    if (segment != before) {
      own[segment].begin = static_cast<int32_t>(i);
      if (before >= 0) own[before].end = static_cast<int32_t>(i);
    }
    if (i + 1 == table.count) own[segment].end = static_cast<int32_t>(table.count);
  }
};

// Item = (kSegmentExamples rows of the output, pack of columns).
struct SegmentTile {
  const SegmentTable* tables;
  int64_t n;
  const Span* spans;
  const int32_t* bad;

  template <int kSize>
  MONO_DEVICE void Run(const SegmentTable& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.dim / kSize, &group, &pack);
    const int64_t first = group * kSegmentExamples;
    if (first >= table.rows || *bad != 0) return;
    int32_t ends[kSegmentExamples];
    int32_t row = 0, last = 0;
    MONO_UNROLL
    for (int e = 0; e < kSegmentExamples; ++e) {
      const Span span = first + e < table.rows ? spans[table.first_span + first + e] : Span{0, 0};
      ends[e] = span.end;
      if (span.end == 0) continue;
      if (last == 0) row = span.begin;
      last = span.end;
    }
    GroupSums<kSize, kSegmentRows, kSegmentExamples>{
        table.updates + row * table.dim + pack * kSize, table.dim,
        table.out + first * table.dim + pack * kSize, table.dim}
        .Run(row, last, ends, table.rows - first);
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const SegmentTable table = tables[FindPart(tables, n, tile)];
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
               const int64_t* out_offsets, void* workspace, int64_t* workspace_bytes) {
  std::vector<SegmentIndices<Index>> lists;
  std::vector<SegmentTable> tables;
  int64_t mark_tiles = 0, tiles = 0, first_span = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] > INT32_MAX) {
      return Fail(MONO_GPU_INVALID_ARGUMENT, "indices[" + std::to_string(i) + "] has " +
                                                 std::to_string(counts[i]) +
                                                 " elements, want less than 2^31");
    }
    const bool any = rows[i] > 0 && dims[i] > 0;
    if (counts[i] > 0) {
      lists.push_back({static_cast<const Index*>(indices[i]), any ? first_span : -1, counts[i],
                       rows[i], mark_tiles});
      mark_tiles += CeilDiv(counts[i], kLanes * kIndicesOfLane);
    }
    if (!any) continue;
    float* const to = out + out_offsets[i];
    const int64_t pack = dims[i] % 4 == 0 && AreAligned({updates[i], to}) ? 4 : 1;
    tables.push_back({updates[i], first_span, to, rows[i], dims[i], tiles, pack});
    tiles += CeilDiv(CeilDiv(rows[i], kSegmentExamples) * (dims[i] / pack), kLanes);
    first_span += rows[i];
  }
  Workspace space;
  const auto list_slot = space.Put(lists);
  const auto table_slot = space.Put(tables);
  const auto spans = space.Scratch<Span>(first_span);
  if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
  MONO_GPU_TRY(space.Upload(stream));
  MONO_GPU_TRY(
      FillBytes(stream, space.At(spans), 0, first_span * static_cast<int64_t>(sizeof(Span))));
  MONO_GPU_TRY(ForTiles(stream, mark_tiles,
                        MarkSegments<Index>{space.At(list_slot), static_cast<int64_t>(lists.size()),
                                            space.At(spans), space.bad()}));
  return ForTiles(stream, tiles,
                  SegmentTile{space.At(table_slot), static_cast<int64_t>(tables.size()),
                              space.At(spans), space.bad()});
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

// The part of a lane: examples [first, end) and columns of a slice, where these lie in the slice,
// and the first of their rows.
struct ExamplesOfLane {
  int64_t first;
  int64_t end;  // of the batch
  float* slice;
  int64_t slice_dim;
  int64_t column;  // in the table
  int64_t row;
};

// Item = (Body::kExamples examples, pack of columns). Bad splits are found elsewhere in this
// launch; here nothing outside the tables is touched.
template <typename Body>
struct TableTile {
  const Table* tables;
  int64_t n;
  int64_t batch;

  template <int kSize>
  MONO_DEVICE void Run(const Table& table, int64_t item) const {
    int64_t group, pack;
    DivMod(item, table.width / kSize, &group, &pack);
    const int64_t first = group * Body::kExamples;
    if (first >= batch) return;
    const int64_t column = pack * kSize;
    const Slice slice = table.SliceOf(column);
    const int64_t row = table.splits[first];
    Body::template Run<kSize>(
        table, {first, batch, slice.data + first * slice.dim + (column - slice.column), slice.dim,
                column, row < 0 ? table.rows : row});
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

// Adds up rows. Those of several examples follow one another, so kReduceRows of them are read at a
// time, whatever examples they belong to.
struct ReduceExamples {
  static constexpr int kExamples = kReduceExamples;

  template <int kSize>
  MONO_DEVICE static void Run(const Table& table, const ExamplesOfLane& own) {
    // Ends of the examples, and that none of them lies before its begin.
    int32_t ends[kExamples];
    MONO_UNROLL
    for (int e = 0; e < kExamples; ++e) {
      ends[e] = own.first + e < own.end ? table.splits[own.first + e + 1] : 0;
    }
    const float* const from = table.data + own.row * table.width + own.column;
    int64_t last = own.row;  // behind the last row of all
    MONO_UNROLL
    for (int k = 0; k < kExamples; ++k) last = ends[k] > last ? ends[k] : last;
    if (last > table.rows) last = own.row;
    GroupSums<kSize, kReduceRows, kExamples>{from, table.width, own.slice, own.slice_dim}.Run(
        own.row, last, ends, own.end - own.first);
  }
};

// Writes the gradients of examples to all of their rows.
struct SpreadExamples {
  static constexpr int kExamples = kSpreadExamples;

  template <int kSize>
  MONO_DEVICE static void Run(const Table& table, const ExamplesOfLane& own) {
    int32_t ends[kExamples];
    Pack<kSize> values[kExamples];
    MONO_UNROLL
    for (int e = 0; e < kExamples; ++e) {
      const bool inside = own.first + e < own.end;
      ends[e] = inside ? table.splits[own.first + e + 1] : 0;
      if (inside) values[e] = LoadAligned<kSize>(own.slice + e * own.slice_dim);
    }
    int64_t row = own.row;
    float* to = table.data + row * table.width + own.column;
    MONO_UNROLL
    for (int e = 0; e < kExamples; ++e) {
      // Where the splits are bad, nothing outside the table is written.
      const int64_t end = ends[e] < table.rows ? ends[e] : table.rows;
      for (; row < end; ++row, to += table.width) StoreAligned<kSize>(values[e], to);
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

template <typename Body>
int RunOnTables(Stream stream, const ReduceArguments& in, void* workspace,
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
    tiles += CeilDiv(CeilDiv(in.batch, Body::kExamples) * (width / pack), kLanes);
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
      stream, tiles,
      TableTile<Body>{space.At(table_slot), static_cast<int64_t>(tables.size()), in.batch},
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
                            float* out, const int64_t* out_offsets, void* workspace,
                            int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    const auto run = index_bytes == 8 ? SegmentSum<int64_t> : SegmentSum<int32_t>;
    return run(stream, n, indices, counts, updates, rows, dims, out, out_offsets, workspace,
               workspace_bytes);
  });
}

int mono_gpu_op_reduce_split(void* stream, int64_t tables, int64_t batch, const int32_t* splits,
                             const float* const* updates, const int64_t* rows,
                             const int64_t* num_slices, const int64_t* slice_dims,
                             float* const* slices, void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    // Tables are only read here, slices in the gradient.
    return RunOnTables<ReduceExamples>(stream,
                                       {tables, batch, splits, const_cast<float* const*>(updates),
                                        slices, rows, num_slices, slice_dims},
                                       workspace, workspace_bytes);
  });
}

int mono_gpu_op_reduce_split_grad(void* stream, int64_t tables, int64_t batch,
                                  const int32_t* splits, const float* const* slices,
                                  const int64_t* rows, const int64_t* num_slices,
                                  const int64_t* slice_dims, float* const* outputs, void* workspace,
                                  int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    return RunOnTables<SpreadExamples>(
        stream,
        {tables, batch, splits, outputs, const_cast<float* const*>(slices), rows, num_slices,
         slice_dims},
        workspace, workspace_bytes);
  });
}
