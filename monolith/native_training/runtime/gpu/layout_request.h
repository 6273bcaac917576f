// Shared by the fused layout and its gradient: the plan and the requests in the form that kernels
// read, and the check of a request's offsets. The terms are those of
// distribution/embedding_layout.h.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_REQUEST_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_REQUEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {
namespace layout {

constexpr uint32_t kSharedBit = 0x80000000u;
constexpr int kIdsAtOnce = 4;  // that a lane reads

struct Feature {
  int64_t first_tile;  // its first source (layout_ids.h)
  int64_t width;
  int64_t positions;
  int64_t first_target;
  int64_t num_targets;
  bool mean;
  bool first_n;
};

struct Target {
  int64_t feature;
  int64_t output;
  int64_t column;
  int64_t step;
  int64_t start;
  int64_t width;
  int64_t row_size;
  int64_t sum_offset;  // of a shared feature's summed gradient
};

struct Block {
  const float* data;
  int64_t offset;  // in the buffer of all gradients
  int64_t size;
};

struct Request {
  MonoGpuLayoutRequest in;
  const Block* blocks;
  int64_t num_blocks;
  int64_t first_row;   // in the outputs
  int64_t first_tile;  // its first item of the check
};

// The rows of feature_offset that a feature has: `first` on, `count` of them.
struct FeatureRows {
  int64_t first;
  int64_t count;
  bool shared;
};

MONO_DEVICE int64_t StartOf(const MonoGpuLayoutRequest& request, int64_t i) {
  return request.starts[i] & ~kSharedBit;
}

MONO_DEVICE int64_t EndRow(const MonoGpuLayoutRequest& request, int64_t feature) {
  return feature + 1 < request.num_starts ? StartOf(request, feature + 1) : request.num_rows;
}

MONO_DEVICE FeatureRows RowsOf(const MonoGpuLayoutRequest& request, int64_t feature) {
  FeatureRows rows;
  rows.first = StartOf(request, feature);
  rows.shared = (request.starts[feature] & kSharedBit) != 0;
  rows.count = EndRow(request, feature) - rows.first;
  if (rows.shared && rows.count > 1) rows.count = 1;
  if (rows.count > request.batch_size) rows.count = request.batch_size;
  return rows;
}

MONO_DEVICE int64_t RowBegin(const MonoGpuLayoutRequest& request, int64_t row) {
  return row < request.num_rows ? request.rows[row] : request.num_ids;
}

// Rows that go back and forth have many times more ids than there are: a request that was found to
// be bad is not followed to its end. Looks at it after every 1,024 ids.
MONO_DEVICE bool IsGivenUp(int64_t ids, const int32_t* bad) {
  return ids > 0 && ids % 1024 == 0 && *static_cast<const volatile int32_t*>(bad) != 0;
}

// Follows all offsets. Items of a request: its rows, its starts, then (feature, batch row).
struct CheckRequest {
  const Request* requests;
  int64_t num_requests;
  Request first;  // the only one, often: then nothing has to be looked up
  const Feature* features;
  int64_t num_features;
  int32_t* bad;

  MONO_DEVICE bool StartIsGood(const MonoGpuLayoutRequest& in, int64_t i) const {
    const int64_t start = StartOf(in, i);
    if (start < (i > 0 ? StartOf(in, i - 1) : 0) || start > in.num_rows) return false;
    if (i >= num_features || (in.starts[i] & kSharedBit) != 0) return true;
    const int64_t end = EndRow(in, i), count = end - start;
    // Only behind the last feature may rows be missing, or the end entry be counted as one.
    return end < in.num_rows - 1 ? count == 0 || count == in.batch_size
                                 : count <= in.batch_size + 1;
  }

  MONO_DEVICE bool RowIsGood(const MonoGpuLayoutRequest& in, int64_t r) const {
    return in.rows[r] >= (r > 0 ? in.rows[r - 1] : 0) && in.rows[r] <= in.num_ids;
  }

  // The ids of one feature in one batch row: those that are pooled are checked then, but FIRSTN
  // leaves ids out.
  MONO_DEVICE bool IdsAreGood(const Request& request, int64_t f, int64_t b) const {
    const MonoGpuLayoutRequest& in = request.in;
    const Feature& feature = features[f];
    if (feature.num_targets == 0 || !feature.first_n) return true;
    const FeatureRows rows = RowsOf(in, f);
    if (b >= rows.count || rows.first > in.num_rows) return true;
    const int64_t begin = RowBegin(in, rows.first + b), end = RowBegin(in, rows.first + b + 1);
    if (begin < 0 || begin > end || end > in.num_ids) return false;
    for (int64_t first = begin; first < end; first += kIdsAtOnce) {
      if (IsGivenUp(first - begin, bad)) return false;
      uint64_t ids[kIdsAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) ids[k] = in.ids[first + k < end ? first + k : first];
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        const int64_t block = static_cast<int64_t>(ids[k] >> 32);
        const int64_t position = static_cast<int64_t>(ids[k] & 0xffffffffu);
        if (block >= request.num_blocks) return false;
        if (position > request.blocks[block].size - feature.width) return false;
      }
    }
    return true;
  }

  MONO_DEVICE void operator()(int64_t item) const {
    const Request request =
        num_requests == 1 ? first : requests[FindPart(requests, num_requests, item)];
    const MonoGpuLayoutRequest& in = request.in;
    int64_t i = item - request.first_tile;
    bool good;
    if (i < in.num_rows) {
      good = RowIsGood(in, i);
    } else if (i - in.num_rows < in.num_starts) {
      good = StartIsGood(in, i - in.num_rows);
    } else {
      int64_t feature, row;
      DivMod(i - in.num_rows - in.num_starts, in.batch_size, &feature, &row);
      good = IdsAreGood(request, feature, row);
    }
    if (!good) MarkBad(bad);
  }
};

struct Plan {
  std::vector<Feature> features;
  std::vector<Target> targets;
  std::vector<bool> add;  // of each target
  int64_t sum_floats = 0;
  int64_t num_sources = 0;
};

// Plans a layout, with sources for batches of `batch` rows.
inline Plan MakePlan(const MonoGpuLayoutPlan& from, int64_t batch) {
  Plan plan;
  for (int64_t f = 0; f < from.num_features; ++f) {
    const MonoGpuLayoutFeature& feature = from.features[f];
    const int64_t first = static_cast<int64_t>(plan.targets.size());
    plan.features.push_back({plan.num_sources, feature.width, feature.positions, first,
                             feature.num_targets, feature.mean != 0, feature.first_n != 0});
    plan.num_sources += batch * feature.positions;
    for (int64_t t = first; t < first + feature.num_targets; ++t) {
      const MonoGpuLayoutTarget& target = from.targets[t];
      plan.targets.push_back({f, target.output, target.column, target.step, target.start,
                              target.width, from.row_sizes[target.output], plan.sum_floats});
      plan.add.push_back(target.add != 0);
      plan.sum_floats += feature.positions * target.width;
    }
  }
  return plan;
}

// Both sides of a slice allow accesses of 16 bytes.
inline bool IsPacked(const Target& target) {
  return (target.column | target.step | target.start | target.width | target.row_size) % 4 == 0;
}

inline int CheckArguments(const MonoGpuLayoutPlan& plan, const MonoGpuLayoutRequest& request) {
  if (request.batch_size < 0 || request.batch_size > INT32_MAX) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "batch_size is " + std::to_string(request.batch_size) + ", want >= 0");
  }
  if (request.num_ids > INT32_MAX) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "fid_offset has " + std::to_string(request.num_ids) +
                                               " elements, want less than 2^31");
  }
  if (request.num_starts != plan.num_features && request.num_starts != plan.num_features + 1) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "nfl_offset has " + std::to_string(request.num_starts) + " entries, want " +
                    std::to_string(plan.num_features) + " features, with or without an end entry");
  }
  return MONO_GPU_OK;
}

// Items of CheckRequest, with or without the ids.
inline int64_t NumChecks(const MonoGpuLayoutPlan& plan, const MonoGpuLayoutRequest& request,
                         bool with_ids) {
  return request.num_rows + request.num_starts +
         (with_ids ? plan.num_features * request.batch_size : 0);
}

}  // namespace layout
}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_REQUEST_H_
