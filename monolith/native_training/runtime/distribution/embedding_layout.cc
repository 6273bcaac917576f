#include "monolith/native_training/runtime/distribution/embedding_layout.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

namespace monolith {
namespace distribution {
namespace {

constexpr uint32_t kSharedBit = 0x80000000u;
constexpr int64_t kLookahead = 8;   // ids whose embeddings are fetched ahead
constexpr int64_t kRowBlock = 256;  // batch rows handled per feature, so that outputs stay in cache

std::string Text(int64_t value) { return std::to_string(value); }

// Where the embeddings of the ids are. A copy on the stack: nothing that is written can alias it.
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

  // Fetches what follows the ids [begin, end) by kLookahead, up to `limit`.
  void PrefetchAfter(int64_t begin, int64_t end, int64_t limit) const {
    end = std::min(end + kLookahead, limit);
    for (int64_t i = begin + kLookahead; i < end; ++i) __builtin_prefetch(At(i));
  }
};

// Columns are handled in blocks of constant size, which the compiler turns into vector registers.
template <int64_t kColumns>
inline void AddColumns(float* __restrict__ to, const float* __restrict__ from) {
  for (int64_t j = 0; j < kColumns; ++j) to[j] += from[j];
}

inline void AddTo(float* to, const float* from, int64_t n) {
  int64_t c = 0;
  for (; c + 16 <= n; c += 16) AddColumns<16>(to + c, from + c);
  for (; c + 4 <= n; c += 4) AddColumns<4>(to + c, from + c);
  for (; c < n; ++c) to[c] += from[c];
}

// Sum or mean of the columns [column, column + kColumns) over the ids [begin, end), at least one.
template <int64_t kColumns, bool kUnitStride>
inline void PoolColumns(const Embeddings<const float, kUnitStride>& embeddings, int64_t column,
                        int64_t begin, int64_t end, bool mean, float* __restrict__ out) {
  float sum[kColumns];
  const float* first = embeddings.At(begin) + column;
  for (int64_t j = 0; j < kColumns; ++j) sum[j] = first[j];
  for (int64_t i = begin + 1; i < end; ++i) {
    const float* embedding = embeddings.At(i) + column;
    for (int64_t j = 0; j < kColumns; ++j) sum[j] += embedding[j];
  }
  if (mean) {
    const float count = static_cast<float>(end - begin);
    for (int64_t j = 0; j < kColumns; ++j) sum[j] /= count;
  }
  for (int64_t j = 0; j < kColumns; ++j) out[j] = sum[j];
}

// Writes the pooled slice of the ids [begin, end) to out: `positions` vectors, `step` apart.
template <bool kUnitStride>
void Pool(const Embeddings<const float, kUnitStride>& embeddings,
          const LayoutPlan::Feature& feature, const LayoutPlan::Target& target, int64_t begin,
          int64_t end, int64_t step, float* out) {
  const int64_t width = target.width;
  if (feature.pooling == Pooling::kFirstN) {
    const int64_t present = std::min(end - begin, feature.positions);
    for (int64_t p = 0; p < present; ++p) {
      std::copy_n(embeddings.At(begin + p) + target.start, width, out + p * step);
    }
    for (int64_t p = present; p < feature.positions; ++p) {
      std::fill_n(out + p * step, width, 0.0f);
    }
    return;
  }
  if (begin == end) {
    std::fill_n(out, width, 0.0f);
    return;
  }
  const bool mean = feature.pooling == Pooling::kMean;
  const int64_t start = target.start;
  int64_t c = 0;
  for (; c + 16 <= width; c += 16) {
    PoolColumns<16>(embeddings, start + c, begin, end, mean, out + c);
  }
  for (; c + 4 <= width; c += 4) {
    PoolColumns<4>(embeddings, start + c, begin, end, mean, out + c);
  }
  for (; c < width; ++c) PoolColumns<1>(embeddings, start + c, begin, end, mean, out + c);
}

// Adds the gradient of one pooled slice, `positions` vectors `step` apart, to the ids [begin, end)
// it came from. `scratch` has room for the slice.
template <bool kUnitStride>
void Scatter(const Embeddings<float, kUnitStride>& embeddings, const LayoutPlan::Feature& feature,
             const LayoutPlan::Target& target, int64_t begin, int64_t end, const float* grad,
             int64_t step, float* scratch) {
  const int64_t width = target.width;
  if (feature.pooling == Pooling::kFirstN) {
    const int64_t present = std::min(end - begin, feature.positions);
    for (int64_t p = 0; p < present; ++p) {
      AddTo(embeddings.At(begin + p) + target.start, grad + p * step, width);
    }
    return;
  }
  if (feature.pooling == Pooling::kMean && end - begin > 1) {
    // Divided once, then added: each column sees the same rounding.
    const float count = static_cast<float>(end - begin);
    for (int64_t c = 0; c < width; ++c) scratch[c] = grad[c] / count;
    grad = scratch;
  }
  for (int64_t i = begin; i < end; ++i) AddTo(embeddings.At(i) + target.start, grad, width);
}

}  // namespace

std::string LayoutBatch::Build(const Parallel& parallel, const LayoutPlan& plan,
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
  for (int64_t r = 0; r < request.num_rows; ++r) {
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
  // Smallest and largest position in the block of the ids before this one.
  int64_t block = -1, first = 0, last = 0;
  const auto note = [&] {
    if (block < 0) return;
    (*low)[block] = std::min((*low)[block], first * blocks[block].stride);
    (*high)[block] = std::max((*high)[block], last * blocks[block].stride + width);
  };
  for (int64_t i = RowBegin(rows.first); i < rows.ids_end; ++i) {
    const uint64_t index = ids[i] >> 32;
    const int64_t position = static_cast<int64_t>(ids[i] & 0xffffffffu);
    if (index >= blocks.size() || position >= positions[index]) return DescribeBadId(feature, i);
    if (static_cast<int64_t>(index) != block) {
      note();
      block = static_cast<int64_t>(index);
      first = last = position;
    }
    first = std::min(first, position);
    last = std::max(last, position);
  }
  note();
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

void LayoutBatch::Forward(const Parallel& parallel, const std::vector<const float*>& data,
                          int64_t first_row, const std::vector<float*>& outputs) const {
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
  const Embeddings<const float, kUnitStride> embeddings{request_->ids, data.data(),
                                                        strides_.data()};
  std::vector<float> scratch(max_scratch_);
  for (int64_t f = 0; f < static_cast<int64_t>(rows_.size()); ++f) {
    const LayoutPlan::Feature& feature = plan_->features()[f];
    const Rows& rows = rows_[f];
    for (const LayoutPlan::Target& target : feature.targets) {
      const int64_t row_size = specs[target.output].row_size;
      float* out = outputs[target.output] + (first_row + begin) * row_size + target.column;
      if (rows.shared) {
        // Pooled once, then written to every row.
        const int64_t ids_begin = rows.count > 0 ? RowBegin(rows.first) : 0;
        const int64_t ids_end = rows.count > 0 ? RowBegin(rows.first + 1) : 0;
        Pool(embeddings, feature, target, ids_begin, ids_end, target.width, scratch.data());
        for (int64_t b = begin; b < end; ++b, out += row_size) {
          if (target.add) {
            AddTo(out, scratch.data(), target.width);
            continue;
          }
          for (int64_t p = 0; p < feature.positions; ++p) {
            std::copy_n(scratch.data() + p * target.width, target.width, out + p * target.step);
          }
        }
        continue;
      }
      for (int64_t b = begin; b < end; ++b, out += row_size) {
        const bool present = b < rows.count;
        const int64_t ids_begin = present ? RowBegin(rows.first + b) : 0;
        const int64_t ids_end = present ? RowBegin(rows.first + b + 1) : 0;
        embeddings.PrefetchAfter(ids_begin, ids_end, rows.ids_end);
        if (!target.add) {
          Pool(embeddings, feature, target, ids_begin, ids_end, target.step, out);
        } else if (ids_begin < ids_end) {
          Pool(embeddings, feature, target, ids_begin, ids_end, target.width, scratch.data());
          AddTo(out, scratch.data(), target.width);
        }
      }
    }
  }
}

void LayoutBatch::Backward(const Parallel& parallel, const std::vector<const float*>& output_grads,
                           int64_t first_row, const std::vector<float*>& data) const {
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
  const Embeddings<float, kUnitStride> embeddings{request_->ids, data.data(), strides_.data()};
  std::vector<float> scratch(max_scratch_);
  for (const LayoutPlan::Target& target : feature.targets) {
    const int64_t row_size = plan_->outputs()[target.output].row_size;
    const float* grad = output_grads[target.output] + first_row * row_size + target.column;
    if (rows.shared) {
      const int64_t begin = RowBegin(rows.first);
      const int64_t end = RowBegin(rows.first + 1);
      if (begin == end) continue;
      std::vector<float> sum(target.width * feature.positions, 0.0f);
      for (int64_t b = 0; b < request_->batch_size; ++b, grad += row_size) {
        for (int64_t p = 0; p < feature.positions; ++p) {
          AddTo(sum.data() + p * target.width, grad + p * target.step, target.width);
        }
      }
      Scatter(embeddings, feature, target, begin, end, sum.data(), target.width, scratch.data());
      continue;
    }
    int64_t begin = RowBegin(rows.first);
    for (int64_t b = 0; b < rows.count; ++b, grad += row_size) {
      const int64_t end = RowBegin(rows.first + b + 1);
      embeddings.PrefetchAfter(begin, end, rows.ids_end);
      Scatter(embeddings, feature, target, begin, end, grad, target.step, scratch.data());
      begin = end;
    }
  }
}

}  // namespace distribution
}  // namespace monolith
