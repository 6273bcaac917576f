// Fused gather, segment sums and reduce-and-split of the GPU library.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

#include "tests/native_training/runtime/gpu/device_buffers.h"

namespace monolith {
namespace gpu {
namespace {

// Tables of one fused buffer: rows of `dim` floats from `start` on, looked up with duplicates.
struct Tables {
  std::vector<int64_t> dims, counts;
  std::vector<std::vector<int32_t>> offsets;
  std::vector<std::vector<float>> rows;  // values or gradients of what is looked up
  int64_t size = 0;
};

Tables MakeTables(const std::vector<int64_t>& dims, const std::vector<int64_t>& counts,
                  std::mt19937* random) {
  Tables tables{dims, counts, {}, {}, 0};
  for (size_t m = 0; m < dims.size(); ++m) {
    const int64_t rows = counts[m] / 2 + 1;
    std::uniform_int_distribution<int64_t> row(0, rows - 1);
    std::vector<int32_t> offsets;
    for (int64_t j = 0; j < counts[m]; ++j) {
      offsets.push_back(static_cast<int32_t>(tables.size + row(*random) * dims[m]));
    }
    tables.offsets.push_back(offsets);
    tables.rows.push_back(RandomFloats(counts[m] * dims[m], random));
    tables.size += rows * dims[m];
  }
  return tables;
}

class OnDevice {
 public:
  explicit OnDevice(const Tables& tables) : tables_(tables) {
    for (size_t m = 0; m < tables.dims.size(); ++m) {
      offsets_.emplace_back(tables.offsets[m]);
      rows_.emplace_back(tables.rows[m]);
      outputs_.emplace_back(static_cast<int64_t>(tables.rows[m].size()));
    }
  }

  bool Gather(const Buffer<float>& fused) {
    return RunAndCheck([&](void* workspace, int64_t* bytes) {
      return mono_gpu_op_gather(nullptr, Count(), fused.data(), fused.size(), Offsets().data(),
                                tables_.counts.data(), tables_.dims.data(),
                                Pointers(outputs_).data(), workspace, bytes);
    });
  }

  bool GatherGrad(float scale, const Buffer<float>& out) {
    const Buffer<float> by(std::vector<float>{scale});
    std::vector<const float*> grads;
    for (const auto& rows : rows_) grads.push_back(rows.data());
    return RunAndCheck([&](void* workspace, int64_t* bytes) {
      return mono_gpu_op_gather_grad(nullptr, Count(), grads.data(), Offsets().data(),
                                     tables_.counts.data(), tables_.dims.data(), by.data(),
                                     out.data(), out.size(), workspace, bytes);
    });
  }

  const std::vector<Buffer<float>>& outputs() const { return outputs_; }

 private:
  int64_t Count() const { return static_cast<int64_t>(tables_.dims.size()); }
  std::vector<const int32_t*> Offsets() const {
    std::vector<const int32_t*> pointers;
    for (const auto& offsets : offsets_) pointers.push_back(offsets.data());
    return pointers;
  }

  const Tables& tables_;
  std::vector<Buffer<int32_t>> offsets_;
  std::vector<Buffer<float>> rows_, outputs_;
};

std::vector<float> WantGrad(const Tables& tables, float scale) {
  std::vector<float> want(tables.size, 0.0f);
  for (size_t m = 0; m < tables.dims.size(); ++m) {
    for (int64_t j = 0; j < tables.counts[m]; ++j) {
      for (int64_t c = 0; c < tables.dims[m]; ++c) {
        want[tables.offsets[m][j] + c] += scale * tables.rows[m][j * tables.dims[m] + c];
      }
    }
  }
  return want;
}

TEST(GpuGatherTest, GathersRows) {
  std::mt19937 random(1);
  const Tables tables = MakeTables({1, 5, 13, 16, 64, 8}, {100, 33, 0, 3000, 7, 1}, &random);
  const std::vector<float> values = RandomFloats(tables.size, &random);
  OnDevice device(tables);

  EXPECT_FALSE(device.Gather(Buffer<float>(values)));

  for (size_t m = 0; m < tables.dims.size(); ++m) {
    std::vector<float> want;
    for (const int32_t offset : tables.offsets[m]) {
      want.insert(want.end(), values.begin() + offset, values.begin() + offset + tables.dims[m]);
    }
    EXPECT_EQ(device.outputs()[m].Read(), want);
  }
}

TEST(GpuGatherTest, AddsGradientsInOneOrder) {
  std::mt19937 random(2);
  for (const std::vector<int64_t>& dims :
       {std::vector<int64_t>{1, 5, 13}, {16, 64, 8}, {5, 7, 13}, {16, 16, 16}, {140, 8, 8}}) {
    const Tables tables = MakeTables(dims, {500, 33, 2000}, &random);
    OnDevice device(tables);
    const Buffer<float> out(std::vector<float>(tables.size, 7.0f));

    EXPECT_FALSE(device.GatherGrad(0.5f, out));

    ExpectNear(out.Read(), WantGrad(tables, 0.5f), 1e-6f);
    const std::vector<float> first = out.Read();
    device.GatherGrad(0.5f, out);
    EXPECT_EQ(out.Read(), first);
  }
}

TEST(GpuGatherTest, AddsManyRowsToFewPlaces) {
  std::mt19937 random(9);
  Tables tables = MakeTables({16, 16}, {700, 300}, &random);
  for (auto& offsets : tables.offsets) {
    for (int32_t& offset : offsets) {
      offset = random() % 5 == 0 ? offset : 32 + 16 * static_cast<int32_t>(random() % 2);
    }
  }
  OnDevice device(tables);
  const Buffer<float> out(tables.size);

  EXPECT_FALSE(device.GatherGrad(1.0f, out));

  EXPECT_EQ(out.Read(), WantGrad(tables, 1.0f)) << "rows are added in their order";
}

// All rows have one width: places without rows, places with many, and a rest behind the last.
TEST(GpuGatherTest, AddsRowsOfOneWidth) {
  std::mt19937 random(10);
  for (const int64_t dim : {1, 4, 13, 16, 64, 140, 300}) {
    Tables tables = MakeTables({dim, dim}, {3000, 40}, &random);
    for (int32_t& offset : tables.offsets[0]) {
      if (random() % 4 == 0) offset = static_cast<int32_t>(dim * (random() % 3));
    }
    tables.size += dim - 1;
    OnDevice device(tables);
    const Buffer<float> out(std::vector<float>(tables.size, 7.0f));

    EXPECT_FALSE(device.GatherGrad(1.0f, out));

    EXPECT_EQ(out.Read(), WantGrad(tables, 1.0f)) << "rows are added in their order, dim " << dim;
  }
}

// Buckets of one place and of many, more rows than a warp lists at once, so many that several warps
// share them, and more buckets than one pass makes. Sums of whole numbers are exact in any order.
TEST(GpuGatherTest, AddsRowsInBucketsOfAllSizes) {
  std::mt19937 random(12);
  struct Case {
    int64_t dim, places, rows, hot;
  };
  for (const Case& c : {Case{4, 900, 9000, 0}, Case{4, 20001, 70000, 6000}, Case{2, 5, 30000, 0},
                        Case{16, 3, 30000, 0}, Case{16, 700, 4097, 4097}, Case{3, 2, 20000, 20000},
                        Case{1, 2200000, 30000, 9000}, Case{1, 4300000, 20000, 5000}}) {
    std::vector<int32_t> offsets;
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t place = i % 3 == 0 && i / 3 < c.hot ? c.places - 2 : random() % c.places;
      offsets.push_back(static_cast<int32_t>(place * c.dim));
    }
    std::vector<float> rows;
    for (int64_t i = 0; i < c.rows * c.dim; ++i) {
      rows.push_back(static_cast<float>(random() % 201) - 100.0f);
    }
    const Tables tables{{c.dim}, {c.rows}, {offsets}, {rows}, c.places * c.dim};
    OnDevice device(tables);
    const Buffer<float> out(std::vector<float>(tables.size, 7.0f));

    EXPECT_FALSE(device.GatherGrad(1.0f, out));

    EXPECT_EQ(out.Read(), WantGrad(tables, 1.0f)) << c.places << " places";
  }
}

// A share of each table's rows at one place of it. Sums of whole numbers are exact in any order.
struct HotCase {
  std::vector<int64_t> dims, counts;
  int hot_percent;
};

void PrintTo(const HotCase& c, std::ostream* to) {
  *to << ::testing::PrintToString(c.dims) << ::testing::PrintToString(c.counts) << c.hot_percent;
}

class GpuHotGatherTest : public ::testing::TestWithParam<HotCase> {
 protected:
  GpuHotGatherTest() {
    const HotCase& c = GetParam();
    tables_ = MakeTables(c.dims, c.counts, &random_);
    for (size_t m = 0; m < c.dims.size(); ++m) {
      for (int32_t& offset : tables_.offsets[m]) {
        if (static_cast<int>(random_() % 100) < c.hot_percent) offset = tables_.offsets[m][0];
      }
      for (float& value : tables_.rows[m]) value = static_cast<float>(random_() % 201) - 100.0f;
    }
  }

  void ExpectExactSums() {
    OnDevice device(tables_);
    const Buffer<float> out(std::vector<float>(tables_.size, 7.0f));

    EXPECT_FALSE(device.GatherGrad(1.0f, out));

    EXPECT_EQ(out.Read(), WantGrad(tables_, 1.0f));
  }

  std::mt19937 random_{13};
  Tables tables_;
};

TEST_P(GpuHotGatherTest, AddsRowsApart) { ExpectExactSums(); }

// The hot places of all tables are one, or a few floats apart.
TEST_P(GpuHotGatherTest, AddsRowsThatOverlap) {
  const int64_t widest = *std::max_element(tables_.dims.begin(), tables_.dims.end());
  for (const int32_t apart : {0, 1, 3}) {
    tables_.size += 2 * widest + 16;
    const int64_t hot = tables_.size - widest - 16;
    for (size_t m = 0; m < tables_.dims.size(); ++m) {
      for (int32_t& offset : tables_.offsets[m]) {
        if (static_cast<int>(random_() % 100) >= GetParam().hot_percent) continue;
        offset = static_cast<int32_t>(hot) + apart * static_cast<int32_t>(random_() % 4);
      }
    }
    ExpectExactSums();
  }
}

TEST_P(GpuHotGatherTest, AddsRowsInTheSameOrderEveryTime) {
  for (auto& rows : tables_.rows) rows = RandomFloats(static_cast<int64_t>(rows.size()), &random_);
  OnDevice device(tables_);
  const Buffer<float> out(tables_.size);
  device.GatherGrad(0.5f, out);
  const std::vector<float> first = out.Read();

  EXPECT_FALSE(device.GatherGrad(0.5f, out));

  EXPECT_EQ(out.Read(), first);
  ExpectNear(first, WantGrad(tables_, 0.5f), 1e-4f);
}

INSTANTIATE_TEST_SUITE_P(
    Hot, GpuHotGatherTest,
    ::testing::Values(HotCase{{8, 16}, {4000, 5000}, 100}, HotCase{{8, 16}, {12000, 15000}, 10},
                      HotCase{{1, 64}, {3000, 3000}, 100}, HotCase{{1, 64}, {14000, 14000}, 10},
                      HotCase{{5, 7, 300}, {1400, 3200, 1200}, 90},
                      HotCase{{4, 12}, {1025, 0}, 100}, HotCase{{4, 12}, {1024, 1}, 100},
                      HotCase{{4, 12}, {2048, 2049}, 100},
                      HotCase{{12, 4, 8}, {2000, 2000, 2000}, 60}, HotCase{{4, 12}, {0, 0}, 100},
                      HotCase{{0, 12, 4}, {1200, 1200, 1200}, 100},
                      HotCase{{16, 16}, {5000, 6000}, 100}));

TEST(GpuGatherTest, AddsRowsOfOneWidthAtAnyPlace) {
  std::mt19937 random(11);
  Tables tables = MakeTables({8}, {300}, &random);
  tables.size += 11;
  for (int32_t& offset : tables.offsets[0]) offset += static_cast<int32_t>(random() % 11);
  OnDevice device(tables);
  const Buffer<float> out(std::vector<float>(tables.size, 7.0f));

  EXPECT_FALSE(device.GatherGrad(0.5f, out));

  ExpectNear(out.Read(), WantGrad(tables, 0.5f), 1e-5f);
}

TEST(GpuGatherTest, AddsRowsThatOverlap) {
  std::mt19937 random(3);
  Tables tables = MakeTables({4, 7}, {50, 60}, &random);
  tables.size = 40;
  for (size_t m = 0; m < 2; ++m) {
    std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(40 - tables.dims[m]));
    for (int32_t& offset : tables.offsets[m]) offset = any(random);
  }
  OnDevice device(tables);
  const Buffer<float> out(tables.size);

  EXPECT_FALSE(device.GatherGrad(2.0f, out));

  ExpectNear(out.Read(), WantGrad(tables, 2.0f), 1e-5f);
}

TEST(GpuGatherTest, FindsOffsetsOutOfBounds) {
  std::mt19937 random(4);
  for (const int32_t wrong : {-1, 1 << 30}) {
    Tables tables = MakeTables({16}, {10}, &random);
    tables.offsets[0][3] = wrong;
    OnDevice device(tables);
    const Buffer<float> buffer(tables.size);

    EXPECT_TRUE(device.Gather(buffer));
    EXPECT_TRUE(device.GatherGrad(1.0f, buffer));
  }
}

TEST(GpuGatherTest, FindsRowsOfWhichOnlyTheFirstHalfIsInside) {
  std::mt19937 random(5);
  Tables tables = MakeTables({16, 32}, {10, 10}, &random);
  tables.offsets[1][3] = static_cast<int32_t>(tables.size - 16);
  OnDevice device(tables);
  const Buffer<float> buffer(tables.size);

  EXPECT_TRUE(device.Gather(buffer));
  EXPECT_TRUE(device.GatherGrad(1.0f, buffer));
}

template <typename Index>
bool SegmentSums(const std::vector<std::vector<Index>>& indices,
                 const std::vector<std::vector<float>>& updates, const std::vector<int64_t>& rows,
                 const std::vector<int64_t>& dims, std::vector<float>* result) {
  std::vector<Buffer<Index>> index_buffers;
  std::vector<Buffer<float>> update_buffers;
  std::vector<const void*> index_pointers;
  std::vector<const float*> update_pointers;
  std::vector<int64_t> counts, offsets;
  int64_t size = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    index_buffers.emplace_back(indices[i]);
    update_buffers.emplace_back(updates[i]);
    index_pointers.push_back(index_buffers.back().data());
    update_pointers.push_back(update_buffers.back().data());
    counts.push_back(static_cast<int64_t>(indices[i].size()));
    offsets.push_back(size);
    size += rows[i] * dims[i];
  }
  const Buffer<float> out(std::vector<float>(size, 7.0f));
  const bool bad = RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_segment_sum(nullptr, static_cast<int64_t>(indices.size()), sizeof(Index),
                                   index_pointers.data(), counts.data(), update_pointers.data(),
                                   rows.data(), dims.data(), out.data(), offsets.data(), workspace,
                                   bytes);
  });
  *result = out.Read();
  return bad;
}

template <typename Index>
void TestSegmentSums() {
  std::mt19937 random(5);
  const std::vector<int64_t> dims = {1, 5, 13, 16, 64, 4, 4, 0};
  const std::vector<int64_t> rows = {10, 1, 300, 20, 5, 3, 0, 9};
  const std::vector<int64_t> counts = {100, 33, 1000, 2, 64, 0, 0, 5};
  std::vector<std::vector<Index>> indices;
  std::vector<std::vector<float>> updates;
  std::vector<float> want, got;
  for (size_t i = 0; i < dims.size(); ++i) {
    std::vector<Index> index(counts[i]);
    for (Index& value : index) value = static_cast<Index>(random() % rows[i]);
    std::sort(index.begin(), index.end());
    updates.push_back(RandomFloats(counts[i] * dims[i], &random));
    const size_t start = want.size();
    want.resize(start + rows[i] * dims[i], 0.0f);
    for (int64_t k = 0; k < counts[i]; ++k) {
      for (int64_t c = 0; c < dims[i]; ++c) {
        want[start + index[k] * dims[i] + c] += updates[i][k * dims[i] + c];
      }
    }
    indices.push_back(index);
  }

  EXPECT_FALSE(SegmentSums<Index>(indices, updates, rows, dims, &got));

  EXPECT_EQ(got, want);
}

TEST(GpuSegmentTest, SumsSegments) {
  TestSegmentSums<int32_t>();
  TestSegmentSums<int64_t>();
}

TEST(GpuSegmentTest, FindsBadIndices) {
  std::vector<float> unused;
  const std::vector<float> updates(3, 1.0f);
  EXPECT_FALSE((SegmentSums<int32_t>({{0, 1, 2}}, {updates}, {3}, {1}, &unused)));
  EXPECT_TRUE((SegmentSums<int32_t>({{0, 1, 3}}, {updates}, {3}, {1}, &unused)));
  EXPECT_TRUE((SegmentSums<int32_t>({{-1, 1, 2}}, {updates}, {3}, {1}, &unused)));
  EXPECT_TRUE((SegmentSums<int64_t>({{0, 2, 1}}, {updates}, {3}, {1}, &unused)));
  EXPECT_TRUE((SegmentSums<int64_t>({{0, 2, 7}}, {{}}, {3}, {0}, &unused)));
}

struct Reduce {
  int64_t batch;
  std::vector<int32_t> splits;
  std::vector<int64_t> rows, num_slices, slice_dims;
};

// Both directions; returns whether either found bad splits.
bool RunReduce(const Reduce& reduce, const std::vector<std::vector<float>>& updates,
               const std::vector<std::vector<float>>& slice_grads,
               std::vector<std::vector<float>>* slices, std::vector<std::vector<float>>* grads) {
  const int64_t tables = static_cast<int64_t>(reduce.rows.size());
  const Buffer<int32_t> splits(reduce.splits);
  std::vector<Buffer<float>> in, out, grad_in, grad_out;
  std::vector<const float*> in_pointers, grad_pointers;
  for (const auto& values : updates) {
    in.emplace_back(values);
    in_pointers.push_back(in.back().data());
    grad_out.emplace_back(static_cast<int64_t>(values.size()));
  }
  for (const auto& values : slice_grads) {
    grad_in.emplace_back(values);
    grad_pointers.push_back(grad_in.back().data());
    out.emplace_back(static_cast<int64_t>(values.size()));
  }
  const bool bad = RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_reduce_split(
        nullptr, tables, reduce.batch, splits.data(), in_pointers.data(), reduce.rows.data(),
        reduce.num_slices.data(), reduce.slice_dims.data(), Pointers(out).data(), workspace, bytes);
  });
  const bool bad_grad = RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_reduce_split_grad(nullptr, tables, reduce.batch, splits.data(),
                                         grad_pointers.data(), reduce.rows.data(),
                                         reduce.num_slices.data(), reduce.slice_dims.data(),
                                         Pointers(grad_out).data(), workspace, bytes);
  });
  EXPECT_EQ(bad, bad_grad);
  for (const auto& buffer : out) slices->push_back(buffer.Read());
  for (const auto& buffer : grad_out) grads->push_back(buffer.Read());
  return bad || bad_grad;
}

TEST(GpuSegmentTest, ReducesAndSplits) {
  std::mt19937 random(6);
  Reduce reduce{50, {}, {}, {2, 1, 3}, {16, 4, 13, 1, 8, 5}};
  const std::vector<int64_t> widths = {20, 13, 14};
  std::vector<std::vector<float>> updates, slice_grads, want_slices, want_grads;
  for (const int64_t width : widths) {
    int32_t row = 0;
    reduce.splits.push_back(0);
    for (int64_t b = 0; b < reduce.batch; ++b) {
      // Long segments, and long gaps between them.
      row += b % 25 < 12 ? 0 : static_cast<int32_t>(random() % 12);
      reduce.splits.push_back(row);
    }
    reduce.rows.push_back(row);
    updates.push_back(RandomFloats(row * width, &random));
    want_grads.emplace_back(row * width, 0.0f);
  }
  size_t s = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    int64_t column = 0;
    for (int64_t k = 0; k < reduce.num_slices[i]; ++k, ++s) {
      const int64_t dim = reduce.slice_dims[s];
      slice_grads.push_back(RandomFloats(reduce.batch * dim, &random));
      want_slices.emplace_back(reduce.batch * dim, 0.0f);
      for (int64_t b = 0; b < reduce.batch; ++b) {
        const int32_t* const splits = reduce.splits.data() + i * (reduce.batch + 1);
        for (int64_t row = splits[b]; row < splits[b + 1]; ++row) {
          for (int64_t c = 0; c < dim; ++c) {
            want_slices[s][b * dim + c] += updates[i][row * widths[i] + column + c];
            want_grads[i][row * widths[i] + column + c] = slice_grads[s][b * dim + c];
          }
        }
      }
      column += dim;
    }
  }
  std::vector<std::vector<float>> slices, grads;

  EXPECT_FALSE(RunReduce(reduce, updates, slice_grads, &slices, &grads));

  EXPECT_EQ(slices, want_slices);
  EXPECT_EQ(grads, want_grads);
}

TEST(GpuSegmentTest, FindsBadSplits) {
  const std::vector<std::vector<float>> updates = {std::vector<float>(3, 1.0f)};
  const std::vector<std::vector<float>> grads = {std::vector<float>(2, 1.0f)};
  for (const std::vector<int32_t>& splits :
       {std::vector<int32_t>{1, 2, 3}, {0, 1, 2}, {0, 4, 3}, {0, -1, 3}, {0, 1 << 30, 3}}) {
    std::vector<std::vector<float>> unused, unused_grads;
    EXPECT_TRUE(RunReduce({2, splits, {3}, {1}, {1}}, updates, grads, &unused, &unused_grads));
  }
}

}  // namespace
}  // namespace gpu
}  // namespace monolith
