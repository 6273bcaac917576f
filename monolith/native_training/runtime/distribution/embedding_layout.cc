#include "monolith/native_training/runtime/distribution/embedding_layout.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <type_traits>
#include <utility>

#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/distribution/columns.h"

namespace monolith {
namespace distribution {
namespace {

constexpr uint32_t kSharedBit = 0x80000000u;
constexpr int64_t kIdsAhead = 32;   // ids whose embeddings are fetched ahead
constexpr int64_t kRowsAhead = 8;   // batch rows whose gradients are fetched ahead
constexpr int64_t kRowBlock = 256;  // batch rows handled per feature, so that outputs stay in cache
constexpr int64_t kCacheLine = 16;  // floats

std::string Text(int64_t value) { return std::to_string(value); }

// The ids of the rows of one feature: row b has [Begin(b), Begin(b + 1)).
struct FeatureRows {
  const int32_t* rows;
  int64_t num_rows;  // behind them, an end entry may be missing
  int64_t num_ids;

  int64_t Begin(int64_t b) const { return b < num_rows ? rows[b] : num_ids; }
};

// Where the embeddings of the ids are. Passed by value: nothing that is written can alias it.
// Positions that count floats, as in most op versions, save a multiplication per id.
template <typename Float, bool kUnitStride>
struct Embeddings {
  const uint64_t* ids;
  Float* const* data;      // per block
  const int64_t* strides;  // per block

  // First column of the embedding of the id at position i.
  Float* At(int64_t i) const {
    const uint64_t block = ids[i] >> 32;
    const int64_t position = static_cast<int64_t>(ids[i] & 0xffffffffu);
    return data[block] + (kUnitStride ? position : position * strides[block]);
  }

  // Fetches `width` columns of what follows the ids [begin, end) by kIdsAhead, up to `limit`. Has
  // to be inlined: GCC drops calls of a function that does nothing but prefetch.
  __attribute__((always_inline)) void PrefetchAfter(int64_t begin, int64_t end, int64_t limit,
                                                    int64_t column, int64_t width) const {
    end = std::min(end + kIdsAhead, limit);
    for (int64_t i = begin + kIdsAhead; i < end; ++i) {
      for (int64_t c = column; c < column + width; c += kCacheLine) {
        if constexpr (std::is_const_v<Float>) {
          engine::PrefetchForRead(At(i) + c);
        } else {
          engine::PrefetchForWrite(At(i) + c);
        }
      }
    }
  }
};

void AddTo(float* to, const float* from, int64_t n) {
  ForColumnBlocks(n, [&](auto columns, int64_t c) {
    using Block = Columns<decltype(columns)::value>;
    Block sum = Block::Load(to + c);
    sum.Add(Block::Load(from + c));
    sum.Store(to + c);
  });
}

// Holds the parts of a slice that are pooled or scattered over a range of batch rows.
template <typename Float, bool kUnitStride>
struct SliceRows {
  Embeddings<Float, kUnitStride> embeddings;
  FeatureRows rows;
  int64_t begin, end;  // batch rows
  int64_t ids_limit;   // no id at or behind it belongs to the feature
  bool mean;
  int64_t row_size;  // floats from one batch row of the output to the next
};

// Sum or mean of the columns [column, column + kColumns) over the ids of each row, written to or
// added to `out` of the first row and what follows it row by row.
template <int64_t kColumns, bool kAdd, bool kUnitStride>
void PoolColumns(const SliceRows<const float, kUnitStride> slice, int64_t column, float* out) {
  const auto embeddings = slice.embeddings;
  int64_t i = slice.rows.Begin(slice.begin);
  for (int64_t b = slice.begin; b < slice.end; ++b, out += slice.row_size) {
    const int64_t first = i, end = slice.rows.Begin(b + 1);
    embeddings.PrefetchAfter(first, end, slice.ids_limit, column, kColumns);
    if (first == end) {
      if (!kAdd) std::fill_n(out, kColumns, 0.0f);
      continue;
    }
    auto sum = Columns<kColumns>::Load(embeddings.At(i) + column);
    for (++i; i < end; ++i) sum.Add(Columns<kColumns>::Load(embeddings.At(i) + column));
    if (slice.mean) sum.Divide(static_cast<float>(end - first));
    if (kAdd) sum.Add(Columns<kColumns>::Load(out));
    sum.Store(out);
  }
}

template <bool kUnitStride>
void PoolRows(const SliceRows<const float, kUnitStride>& slice, const LayoutPlan::Target& target,
              bool add, float* out) {
  ForColumnBlocks(target.width, [&](auto columns, int64_t c) {
    constexpr int64_t kColumns = decltype(columns)::value;
    if (add) {
      PoolColumns<kColumns, true>(slice, target.start + c, out + c);
    } else {
      PoolColumns<kColumns, false>(slice, target.start + c, out + c);
    }
  });
}

// Copies the embeddings of the first `positions` ids of each row, `step` floats apart.
template <bool kUnitStride>
void CopyFirstN(const SliceRows<const float, kUnitStride>& slice, const LayoutPlan::Target& target,
                int64_t positions, int64_t step, float* out) {
  for (int64_t b = slice.begin; b < slice.end; ++b, out += slice.row_size) {
    const int64_t begin = slice.rows.Begin(b), end = slice.rows.Begin(b + 1);
    slice.embeddings.PrefetchAfter(begin, end, slice.ids_limit, target.start, target.width);
    const int64_t present = std::min(end - begin, positions);
    for (int64_t p = 0; p < present; ++p) {
      std::copy_n(slice.embeddings.At(begin + p) + target.start, target.width, out + p * step);
    }
    for (int64_t p = present; p < positions; ++p) std::fill_n(out + p * step, target.width, 0.0f);
  }
}

// Adds the gradient of kColumns pooled columns of each row to the ids they came from. A mean is
// divided once per row, then added: each column sees the same rounding.
template <int64_t kColumns, bool kUnitStride>
void ScatterColumns(const SliceRows<float, kUnitStride> slice, int64_t column, const float* grad) {
  const auto embeddings = slice.embeddings;
  const int64_t last = slice.end - 1;
  int64_t i = slice.rows.Begin(slice.begin);
  for (int64_t b = slice.begin; b < slice.end; ++b, grad += slice.row_size) {
    const int64_t first = i, end = slice.rows.Begin(b + 1);
    embeddings.PrefetchAfter(first, end, slice.ids_limit, column, kColumns);
    engine::PrefetchForRead(grad + std::min(kRowsAhead, last - b) * slice.row_size);
    auto term = Columns<kColumns>::Load(grad);
    if (slice.mean && end - first > 1) term.Divide(static_cast<float>(end - first));
    for (; i < end; ++i) {
      float* embedding = embeddings.At(i) + column;
      auto sum = Columns<kColumns>::Load(embedding);
      sum.Add(term);
      sum.Store(embedding);
    }
  }
}

template <bool kUnitStride>
void ScatterRows(const SliceRows<float, kUnitStride>& slice, const LayoutPlan::Target& target,
                 const float* grad) {
  ForColumnBlocks(target.width, [&](auto columns, int64_t c) {
    ScatterColumns<decltype(columns)::value>(slice, target.start + c, grad + c);
  });
}

// Writes or adds the slice of a shared feature, `positions` vectors, to every one of `n` rows.
void WriteToRows(const float* shared, const LayoutPlan::Feature& feature,
                 const LayoutPlan::Target& target, int64_t row_size, int64_t n, float* out) {
  for (int64_t b = 0; b < n; ++b, out += row_size) {
    if (target.add) {
      AddTo(out, shared, target.width);
      continue;
    }
    for (int64_t p = 0; p < feature.positions; ++p) {
      std::copy_n(shared + p * target.width, target.width, out + p * target.step);
    }
  }
}

// The way back of CopyFirstN.
template <bool kUnitStride>
void ScatterFirstN(const SliceRows<float, kUnitStride>& slice, const LayoutPlan::Target& target,
                   int64_t positions, int64_t step, const float* grad) {
  for (int64_t b = slice.begin; b < slice.end; ++b, grad += slice.row_size) {
    const int64_t begin = slice.rows.Begin(b), end = slice.rows.Begin(b + 1);
    slice.embeddings.PrefetchAfter(begin, end, slice.ids_limit, target.start, target.width);
    const int64_t present = std::min(end - begin, positions);
    for (int64_t p = 0; p < present; ++p) {
      AddTo(slice.embeddings.At(begin + p) + target.start, grad + p * step, target.width);
    }
  }
}

}  // namespace

std::string LayoutBatch::Build(const engine::ParallelRunner& parallel, const LayoutPlan& plan,
                               const LayoutRequest& request) {
  plan_ = &plan;
  request_ = &request;
  std::string error = ResolveRows();
  if (!error.empty()) return error;

  strides_.clear();
  unit_stride_ = true;
  for (const LayoutBlock& block : request.blocks) {
    strides_.push_back(block.stride);
    unit_stride_ = unit_stride_ && block.stride == 1;
  }

  const int64_t num_features = static_cast<int64_t>(plan.features().size());
  const size_t num_blocks = request.blocks.size();
  std::vector<std::vector<int64_t>> low(num_features), high(num_features);
  std::vector<std::string> errors(num_features);
  parallel.For(num_features, 3 * request.num_ids / std::max<int64_t>(1, num_features) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t f = begin; f < end; ++f) {
                   if (plan.features()[f].targets.empty()) continue;
                   low[f].assign(num_blocks, std::numeric_limits<int64_t>::max());
                   high[f].assign(num_blocks, 0);
                   errors[f] = CheckIds(f, &low[f], &high[f]);
                 }
               });
  for (const std::string& e : errors) {
    if (!e.empty()) return e;
  }
  disjoint_ = FeaturesDisjoint(low, high);
  for (const auto& feature : plan.features()) {
    for (const auto& target : feature.targets) {
      max_scratch_ = std::max(max_scratch_, target.width * feature.positions);
    }
  }
  return "";
}

std::string LayoutBatch::ResolveRows() {
  const LayoutRequest& request = *request_;
  const int64_t num_features = static_cast<int64_t>(plan_->features().size());
  if (request.batch_size < 0) return "batch_size is " + Text(request.batch_size) + ", want >= 0";
  if (request.num_starts != num_features && request.num_starts != num_features + 1) {
    return "nfl_offset has " + Text(request.num_starts) + " entries, want " + Text(num_features) +
           " features, with or without an end entry";
  }
  for (int64_t r = RowsInOrder() ? request.num_rows : 0; r < request.num_rows; ++r) {
    if (request.rows[r] < (r == 0 ? 0 : request.rows[r - 1]) || request.rows[r] > request.num_ids) {
      return "feature_offset[" + Text(r) + "] is " + Text(request.rows[r]) + ", want " +
             (r == 0 ? Text(0) : Text(request.rows[r - 1])) + " (the entry before) to " +
             Text(request.num_ids) + " (length of fid_offset)";
    }
  }

  rows_.assign(num_features, Rows{0, 0, 0, false});
  int64_t before = 0;
  for (int64_t i = 0; i < request.num_starts; ++i) {
    const int64_t start = request.starts[i] & ~kSharedBit;
    if (start < before || start > request.num_rows) {
      return "nfl_offset[" + Text(i) + "] is " + Text(start) + ", want " + Text(before) +
             " (the entry before) to " + Text(request.num_rows) + " (length of feature_offset)";
    }
    before = start;
  }
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t first = request.starts[f] & ~kSharedBit;
    const int64_t end =
        f + 1 < request.num_starts ? request.starts[f + 1] & ~kSharedBit : request.num_rows;
    const bool shared = (request.starts[f] & kSharedBit) != 0;
    int64_t count = end - first;
    if (shared) {
      count = std::min<int64_t>(count, 1);
    } else if (end < request.num_rows - 1 ? count != 0 && count != request.batch_size
                                          : count > request.batch_size + 1) {
      // Only behind the last feature may rows be missing, or the end entry be counted as one.
      return "feature '" + plan_->features()[f].name + "' has " + Text(count) +
             " rows, want batch_size = " + Text(request.batch_size);
    }
    count = std::min(count, request.batch_size);
    rows_[f] = {first, count, RowBegin(first + count), shared};
  }
  return "";
}

bool LayoutBatch::RowsInOrder() const {
  const int32_t* rows = request_->rows;
  const int64_t n = request_->num_rows;
  if (n == 0) return true;
  int32_t falls = 0;  // without a branch, so that the loop becomes vector instructions
  for (int64_t r = 1; r < n; ++r) falls |= rows[r] < rows[r - 1];
  return falls == 0 && rows[0] >= 0 && rows[n - 1] <= request_->num_ids;
}

std::string LayoutBatch::CheckIds(int64_t feature, std::vector<int64_t>* low,
                                  std::vector<int64_t>* high) const {
  const std::vector<LayoutBlock>& blocks = request_->blocks;
  const uint64_t* ids = request_->ids;
  const int64_t width = plan_->features()[feature].width;
  const Rows& rows = rows_[feature];
  // Number of positions of each block at which the feature's embedding fits.
  std::vector<int64_t> positions(blocks.size(), 0);
  for (size_t b = 0; b < blocks.size(); ++b) {
    const bool usable = (blocks[b].feature < 0 || blocks[b].feature == feature) &&
                        width <= blocks[b].max_width && width <= blocks[b].size;
    if (usable) positions[b] = (blocks[b].size - width) / blocks[b].stride + 1;
  }
  const int64_t begin = RowBegin(rows.first), end = rows.ids_end;
  const auto note = [&](int64_t block, int64_t first, int64_t last) {
    (*low)[block] = std::min((*low)[block], first * blocks[block].stride);
    (*high)[block] = std::max((*high)[block], last * blocks[block].stride + width);
  };
  if (begin >= end) return "";
  // Often all are in one block: then the smallest and the largest tell all there is to know.
  uint64_t smallest = ids[begin], largest = ids[begin];
  for (int64_t i = begin; i < end; ++i) {
    smallest = std::min(smallest, ids[i]);
    largest = std::max(largest, ids[i]);
  }
  const uint64_t block = largest >> 32;
  const int64_t last = static_cast<int64_t>(largest & 0xffffffffu);
  if (block == smallest >> 32 && block < blocks.size() && last < positions[block]) {
    note(static_cast<int64_t>(block), static_cast<int64_t>(smallest & 0xffffffffu), last);
    return "";
  }
  std::vector<int64_t> first_seen(blocks.size(), std::numeric_limits<int64_t>::max());
  std::vector<int64_t> last_seen(blocks.size(), -1);
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t index = ids[i] >> 32;
    const int64_t position = static_cast<int64_t>(ids[i] & 0xffffffffu);
    if (index >= blocks.size() || position >= positions[index]) return DescribeBadId(feature, i);
    first_seen[index] = std::min(first_seen[index], position);
    last_seen[index] = std::max(last_seen[index], position);
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (last_seen[b] >= 0) note(static_cast<int64_t>(b), first_seen[b], last_seen[b]);
  }
  return "";
}

std::string LayoutBatch::DescribeBadId(int64_t feature, int64_t i) const {
  const int64_t num_blocks = static_cast<int64_t>(request_->blocks.size());
  const int64_t index = static_cast<int64_t>(request_->ids[i] >> 32);
  const int64_t position = static_cast<int64_t>(request_->ids[i] & 0xffffffffu);
  const int64_t width = plan_->features()[feature].width;
  const std::string what = "fid_offset[" + Text(i) + "] = (" + Text(index) + ", " + Text(position) +
                           ") of feature '" + plan_->features()[feature].name + "' ";
  if (index >= num_blocks) return what + "is in a block beyond the last of " + Text(num_blocks);
  const LayoutBlock& block = request_->blocks[index];
  if (block.feature >= 0 && block.feature != feature) {
    return what + "points into the block of feature '" + plan_->features()[block.feature].name +
           "'";
  }
  if (width > block.max_width) {
    return what + "has width " + Text(width) + ", but the block has rows of " +
           Text(block.max_width);
  }
  return what + "needs floats " + Text(position * block.stride) + " to " +
         Text(position * block.stride + width) + " of a block of " + Text(block.size) + " floats";
}

bool LayoutBatch::FeaturesDisjoint(const std::vector<std::vector<int64_t>>& low,
                                   const std::vector<std::vector<int64_t>>& high) const {
  std::vector<std::pair<int64_t, int64_t>> intervals;
  for (size_t block = 0; block < request_->blocks.size(); ++block) {
    intervals.clear();
    for (size_t f = 0; f < low.size(); ++f) {
      if (!low[f].empty() && low[f][block] < high[f][block]) {
        intervals.emplace_back(low[f][block], high[f][block]);
      }
    }
    std::sort(intervals.begin(), intervals.end());
    for (size_t i = 1; i < intervals.size(); ++i) {
      if (intervals[i].first < intervals[i - 1].second) return false;
    }
  }
  return true;
}

void LayoutBatch::Forward(const engine::ParallelRunner& parallel,
                          const std::vector<const float*>& data, int64_t first_row,
                          const std::vector<float*>& outputs) const {
  const int64_t batch = request_->batch_size;
  int64_t row_floats = 0;
  for (const auto& output : plan_->outputs()) row_floats += output.row_size;
  const int64_t ids_per_row = request_->num_ids / std::max<int64_t>(1, batch);
  parallel.For(batch, row_floats + 20 * ids_per_row + 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b += kRowBlock) {
      const int64_t block_end = std::min(end, b + kRowBlock);
      if (unit_stride_) {
        ForwardRows<true>(data, b, block_end, first_row, outputs);
      } else {
        ForwardRows<false>(data, b, block_end, first_row, outputs);
      }
    }
  });
}

template <bool kUnitStride>
void LayoutBatch::ForwardRows(const std::vector<const float*>& data, int64_t begin, int64_t end,
                              int64_t first_row, const std::vector<float*>& outputs) const {
  const auto& specs = plan_->outputs();
  for (size_t o = 0; o < specs.size(); ++o) {
    if (!specs[o].add) continue;
    std::fill_n(outputs[o] + (first_row + begin) * specs[o].row_size,
                (end - begin) * specs[o].row_size, 0.0f);
  }
  std::vector<float> shared(max_scratch_);
  for (size_t f = 0; f < rows_.size(); ++f) {
    const LayoutPlan::Feature& feature = plan_->features()[f];
    const Rows& rows = rows_[f];
    const bool first_n = feature.pooling == Pooling::kFirstN;
    SliceRows<const float, kUnitStride> slice{
        {request_->ids, data.data(), strides_.data()},
        {request_->rows + rows.first, request_->num_rows - rows.first, request_->num_ids},
        begin,
        std::max(begin, std::min(end, rows.count)),
        rows.ids_end,
        feature.pooling == Pooling::kMean,
        0};
    for (const LayoutPlan::Target& target : feature.targets) {
      const int64_t row_size = specs[target.output].row_size;
      slice.row_size = row_size;
      float* out = outputs[target.output] + (first_row + begin) * row_size + target.column;
      if (rows.shared && rows.count > 0) {
        // Pooled once, then written to every row.
        SliceRows<const float, kUnitStride> only = slice;
        only.begin = 0;
        only.end = 1;
        if (first_n) {
          CopyFirstN(only, target, feature.positions, target.width, shared.data());
        } else {
          PoolRows(only, target, /*add=*/false, shared.data());
        }
        WriteToRows(shared.data(), feature, target, row_size, end - begin, out);
        continue;
      }
      if (first_n) {
        CopyFirstN(slice, target, feature.positions, target.step, out);
      } else {
        PoolRows(slice, target, target.add, out);
      }
      if (target.add) continue;
      // Rows that the feature does not have.
      out += (slice.end - begin) * row_size;
      for (int64_t b = slice.end; b < end; ++b, out += row_size) {
        for (int64_t p = 0; p < feature.positions; ++p) {
          std::fill_n(out + p * target.step, target.width, 0.0f);
        }
      }
    }
  }
}

void LayoutBatch::Backward(const engine::ParallelRunner& parallel,
                           const std::vector<const float*>& output_grads, int64_t first_row,
                           const std::vector<float*>& data) const {
  std::vector<int64_t> work(rows_.size(), 0);
  for (size_t f = 0; f < rows_.size(); ++f) {
    const LayoutPlan::Feature& feature = plan_->features()[f];
    const Rows& rows = rows_[f];
    const int64_t ids = rows.ids_end - RowBegin(rows.first);
    for (const auto& target : feature.targets) {
      work[f] += (ids + request_->batch_size) * (target.width + 10);
    }
  }
  const int64_t total = std::accumulate(work.begin(), work.end(), int64_t{0});
  const int64_t tasks = disjoint_ ? parallel.TasksFor(total) : 1;

  // Largest first, each thread takes the next one: the features differ a lot in size.
  std::vector<int64_t> order(rows_.size());
  std::iota(order.begin(), order.end(), 0);
  if (tasks > 1) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  }
  std::atomic<size_t> next{0};
  parallel.RunTasks(tasks, [&](int64_t) {
    for (size_t i = next++; i < order.size(); i = next++) {
      if (unit_stride_) {
        BackwardFeature<true>(order[i], output_grads, first_row, data);
      } else {
        BackwardFeature<false>(order[i], output_grads, first_row, data);
      }
    }
  });
}

template <bool kUnitStride>
void LayoutBatch::BackwardFeature(int64_t f, const std::vector<const float*>& output_grads,
                                  int64_t first_row, const std::vector<float*>& data) const {
  const LayoutPlan::Feature& feature = plan_->features()[f];
  const Rows& rows = rows_[f];
  if (rows.count == 0) return;
  const bool first_n = feature.pooling == Pooling::kFirstN;
  SliceRows<float, kUnitStride> slice{
      {request_->ids, data.data(), strides_.data()},
      {request_->rows + rows.first, request_->num_rows - rows.first, request_->num_ids},
      0,
      rows.count,
      rows.ids_end,
      feature.pooling == Pooling::kMean,
      0};
  std::vector<float> sum;
  for (const LayoutPlan::Target& target : feature.targets) {
    slice.row_size = plan_->outputs()[target.output].row_size;
    const float* grad = output_grads[target.output] + first_row * slice.row_size + target.column;
    int64_t step = target.step;
    if (rows.shared) {
      // One row got the gradient of all.
      sum.assign(target.width * feature.positions, 0.0f);
      for (int64_t b = 0; b < request_->batch_size; ++b, grad += slice.row_size) {
        for (int64_t p = 0; p < feature.positions; ++p) {
          AddTo(sum.data() + p * target.width, grad + p * target.step, target.width);
        }
      }
      grad = sum.data();
      step = target.width;
    }
    if (first_n) {
      ScatterFirstN(slice, target, feature.positions, step, grad);
    } else {
      ScatterRows(slice, target, grad);
    }
  }
}

}  // namespace distribution
}  // namespace monolith
