// Fused layout: pools the embeddings of a batch's ids into the model's input tensors, and the way
// back. The terms are those of distribution/embedding_layout.h, and so is the order of every sum.
//
// A first launch follows all offsets and checks them; the others do nothing where one is wrong. The
// gradient lists the ids there too, sorts them by embedding and lets the first occurrence of an
// embedding add up the rest (scatter_sum.h).
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace {

constexpr uint32_t kSharedBit = 0x80000000u;
constexpr int kNowhere = 0x7f;  // every byte of such a place

struct Feature {
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

// Which rows of feature_offset a feature has: `first` on, `count` of them.
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

// What the gradient needs to know of an id.
struct Occurrence {
  int32_t feature;
  int32_t row;    // in the batch; -1: shared by all
  int32_t begin;  // first id of its row
  int32_t count;  // ids of its row
};

// Follows all offsets. Items of a request: its rows, its starts, then (feature, batch row).
struct CheckRequest {
  const Request* requests;
  int64_t num_requests;
  const Feature* features;
  int64_t num_features;
  int32_t* bad;
  // For the gradient, else null.
  uint64_t* places;
  Occurrence* occurrences;

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

  // The ids of one feature in one batch row.
  MONO_DEVICE bool IdsAreGood(const Request& request, int64_t f, int64_t b) const {
    const MonoGpuLayoutRequest& in = request.in;
    const Feature& feature = features[f];
    if (feature.num_targets == 0) return true;
    const FeatureRows rows = RowsOf(in, f);
    if (b >= rows.count || rows.first > in.num_rows) return true;
    const int64_t begin = RowBegin(in, rows.first + b), end = RowBegin(in, rows.first + b + 1);
    if (begin < 0 || begin > end || end > in.num_ids) return false;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = static_cast<int64_t>(in.ids[i] >> 32);
      const int64_t position = static_cast<int64_t>(in.ids[i] & 0xffffffffu);
      if (block >= request.num_blocks || position > request.blocks[block].size - feature.width) {
        return false;
      }
      if (places == nullptr || (feature.first_n && i - begin >= feature.positions)) continue;
      places[i] = static_cast<uint64_t>(request.blocks[block].offset + position);
      occurrences[i] = {static_cast<int32_t>(f), rows.shared ? -1 : static_cast<int32_t>(b),
                        static_cast<int32_t>(begin), static_cast<int32_t>(end - begin)};
    }
    return true;
  }

  MONO_DEVICE void operator()(int64_t item) const {
    const Request request = requests[FindPart(requests, num_requests, item)];
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

// A place of an output: one slice, or several that are added up.
struct Unit {
  float* out;
  int64_t row_size;
  int64_t column;
  int64_t step;
  int64_t width;
  int64_t positions;
  int64_t first_target;  // in unit_targets
  int64_t num_targets;
  int64_t first_tile;
  int64_t pack;
};

// Item of a unit = (batch row, FIRSTN position, pack of columns).
struct PoolTile {
  const Unit* units;
  int64_t num_units;
  const int64_t* unit_targets;
  const Target* targets;
  const Feature* features;
  const Request* requests;
  int64_t num_requests;
  int64_t batch;  // of all requests
  const int32_t* bad;

  MONO_DEVICE const Request& RequestOf(int64_t row) const {
    int64_t low = 0, high = num_requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (requests[middle].first_row <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return requests[low];
  }

  template <int kSize>
  MONO_DEVICE Pack<kSize> At(const Request& request, int64_t i, int64_t column) const {
    const uint64_t id = request.in.ids[i];
    return Load<kSize>(request.blocks[id >> 32].data + static_cast<int64_t>(id & 0xffffffffu) +
                       column);
  }

  // Adds columns of one slice to *sum; *any tells whether it holds something yet.
  template <int kSize>
  MONO_DEVICE void Pool(const Request& request, const Target& target, int64_t b, int64_t position,
                        int64_t column, bool* any, Pack<kSize>* sum) const {
    const Feature& feature = features[target.feature];
    const FeatureRows rows = RowsOf(request.in, target.feature);
    const int64_t row = rows.shared ? 0 : b;
    if (row >= rows.count) return;
    const int64_t begin = RowBegin(request.in, rows.first + row);
    const int64_t end = RowBegin(request.in, rows.first + row + 1);
    const int64_t first = target.start + column;
    if (feature.first_n) {
      if (begin + position < end) *sum = At<kSize>(request, begin + position, first);
      return;
    }
    if (begin == end) return;
    Pack<kSize> pooled = At<kSize>(request, begin, first);
    for (int64_t i = begin + 1; i < end; ++i) AddTo(&pooled, At<kSize>(request, i, first));
    if (feature.mean) {
      const float count = static_cast<float>(end - begin);
      for (int k = 0; k < kSize; ++k) pooled.values[k] /= count;
    }
    if (*any) {
      AddTo(sum, pooled);
    } else {
      *sum = pooled;
    }
    *any = true;
  }

  template <int kSize>
  MONO_DEVICE void Run(const Unit& unit, int64_t item) const {
    const int64_t packs = unit.width / kSize;
    if (item >= batch * unit.positions * packs) return;
    int64_t rest, pack, b, position;
    DivMod(item, packs, &rest, &pack);
    DivMod(rest, unit.positions, &b, &position);
    const Request& request = RequestOf(b);
    const int64_t column = pack * kSize;
    Pack<kSize> sum = Zeros<kSize>();
    bool any = false;
    for (int64_t t = unit.first_target; t < unit.first_target + unit.num_targets; ++t) {
      Pool<kSize>(request, targets[unit_targets[t]], b - request.first_row, position, column, &any,
                  &sum);
    }
    Store<kSize>(sum, unit.out + b * unit.row_size + unit.column + position * unit.step + column);
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    if (*bad != 0) return;
    const Unit unit = units[FindPart(units, num_units, tile)];
    const int64_t item = (tile - unit.first_tile) * kLanes + lane;
    if (unit.pack == 4) {
      Run<4>(unit, item);
    } else {
      Run<1>(unit, item);
    }
  }
};

// The gradient of a shared feature's row, which is that of all batch rows together. An item is a
// float of `sums`, where each target has positions * width of them.
struct SumShared {
  MonoGpuLayoutRequest request;
  const Target* targets;
  int64_t num_targets;
  const Feature* features;
  const float* const* grads;
  const int32_t* bad;
  float* sums;

  MONO_DEVICE void operator()(int64_t item) const {
    if (*bad != 0) return;
    int64_t low = 0, high = num_targets;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (targets[middle].sum_offset <= item) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Target& target = targets[low];
    if ((request.starts[target.feature] & kSharedBit) == 0) return;
    int64_t position, column;
    DivMod(item - target.sum_offset, target.width, &position, &column);
    const float* grad = grads[target.output] + target.column + position * target.step + column;
    float sum = 0;
    for (int64_t b = 0; b < request.batch_size; ++b, grad += target.row_size) sum += *grad;
    sums[item] = sum;
  }
};

// Gradients of ids, as scatter_sum.h wants them.
struct IdGradients {
  const Occurrence* occurrences;
  const Feature* features;
  const Target* targets;
  const float* const* grads;
  const float* sums;

  MONO_DEVICE int64_t Width(uint32_t id) const { return features[occurrences[id].feature].width; }

  template <int kSize>
  MONO_DEVICE Pack<kSize> Term(const Feature& feature, const Target& target, const Occurrence& o,
                               uint32_t id, int64_t column) const {
    const int64_t position = feature.first_n ? static_cast<int64_t>(id) - o.begin : 0;
    const int64_t c = column - target.start;
    Pack<kSize> term = o.row < 0
                           ? Load<kSize>(sums + target.sum_offset + position * target.width + c)
                           : Load<kSize>(grads[target.output] + o.row * target.row_size +
                                         target.column + position * target.step + c);
    if (feature.mean && o.count > 1) {
      const float count = static_cast<float>(o.count);
      for (int k = 0; k < kSize; ++k) term.values[k] /= count;
    }
    return term;
  }

  MONO_DEVICE static bool Covers(const Target& target, int64_t column) {
    return column >= target.start && column < target.start + target.width;
  }

  // The occurrences of one feature: slice by slice, as the CPU adds them.
  template <int kSize>
  MONO_DEVICE int64_t AddGroup(const Runs<uint64_t>& runs, int64_t first, int64_t place,
                               int64_t column, Pack<kSize>* sum) const {
    const int32_t f = occurrences[runs.occurrences[first]].feature;
    const Feature& feature = features[f];
    int64_t end = first;
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      const Target& target = targets[t];
      if (!Covers(target, column)) continue;
      // Sorted by place, then by id, which is by feature: where the fourth fits, all four do.
      for (end = first;
           runs.IsAt(end + 3, place) && occurrences[runs.occurrences[end + 3]].feature == f;
           end += 4) {
        Pack<kSize> terms[4];
        for (int k = 0; k < 4; ++k) {
          const uint32_t id = runs.occurrences[end + k];
          terms[k] = Term<kSize>(feature, target, occurrences[id], id, column);
        }
        for (int k = 0; k < 4; ++k) AddTo(sum, terms[k]);
      }
      for (; runs.IsAt(end, place); ++end) {
        const uint32_t id = runs.occurrences[end];
        const Occurrence o = occurrences[id];
        if (o.feature != f) break;
        AddTo(sum, Term<kSize>(feature, target, o, id, column));
      }
    }
    while (runs.IsAt(end, place) && occurrences[runs.occurrences[end]].feature == f) ++end;
    return end;
  }

  MONO_DEVICE float AddOne(uint32_t id, int64_t column, float sum) const {
    const Occurrence o = occurrences[id];
    const Feature& feature = features[o.feature];
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      if (!Covers(targets[t], column)) continue;
      sum += Term<1>(feature, targets[t], o, id, column).values[0];
    }
    return sum;
  }
};

struct NumberIds {
  uint32_t* numbers;

  MONO_DEVICE void operator()(int64_t i) const { numbers[i] = static_cast<uint32_t>(i); }
};

struct Plan {
  std::vector<Feature> features;
  std::vector<Target> targets;
  std::vector<bool> add;  // of each target
  int64_t sum_floats = 0;
};

Plan MakePlan(const MonoGpuLayoutPlan& from) {
  Plan plan;
  for (int64_t f = 0; f < from.num_features; ++f) {
    const MonoGpuLayoutFeature& feature = from.features[f];
    const int64_t first = static_cast<int64_t>(plan.targets.size());
    plan.features.push_back({feature.width, feature.positions, first, feature.num_targets,
                             feature.mean != 0, feature.first_n != 0});
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
bool IsPacked(const Target& target) {
  return (target.column | target.step | target.start | target.width | target.row_size) % 4 == 0;
}

// Places of the outputs, with the numbers of their targets.
std::vector<Unit> MakeUnits(const Plan& plan, const MonoGpuLayoutPlan& from, int64_t batch,
                            float* const* outputs, std::vector<int64_t>* unit_targets,
                            int64_t* tiles) {
  std::vector<std::vector<int64_t>> groups;
  std::vector<int64_t> group_of_output(from.num_outputs, -1);
  for (size_t t = 0; t < plan.targets.size(); ++t) {
    int64_t* const shared = plan.add[t] ? &group_of_output[plan.targets[t].output] : nullptr;
    if (shared == nullptr || *shared < 0) {
      if (shared != nullptr) *shared = static_cast<int64_t>(groups.size());
      groups.emplace_back();
    }
    groups[shared == nullptr ? groups.size() - 1 : *shared].push_back(static_cast<int64_t>(t));
  }
  std::vector<Unit> units;
  *tiles = 0;
  for (const std::vector<int64_t>& group : groups) {
    const Target& target = plan.targets[group[0]];
    int64_t pack = 4;
    for (const int64_t t : group) pack = IsPacked(plan.targets[t]) ? pack : 1;
    const int64_t positions = plan.features[target.feature].positions;
    units.push_back({outputs[target.output], target.row_size, target.column, target.step,
                     target.width, positions, static_cast<int64_t>(unit_targets->size()),
                     static_cast<int64_t>(group.size()), *tiles, pack});
    unit_targets->insert(unit_targets->end(), group.begin(), group.end());
    *tiles += CeilDiv(batch * positions * (target.width / pack), kLanes);
  }
  return units;
}

int CheckArguments(const MonoGpuLayoutPlan& plan, const MonoGpuLayoutRequest& request) {
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

// Items of CheckRequest.
int64_t NumChecks(const MonoGpuLayoutPlan& plan, const MonoGpuLayoutRequest& request) {
  return request.num_rows + request.num_starts + plan.num_features * request.batch_size;
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;  // NOLINT: only the C functions follow

int mono_gpu_op_layout(void* stream, const MonoGpuLayoutPlan* plan, int64_t num_requests,
                       const MonoGpuLayoutRequest* requests, int64_t num_blocks,
                       const float* const* blocks, const int64_t* block_sizes,
                       float* const* outputs, void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    const Plan own = MakePlan(*plan);
    std::vector<Block> all_blocks;
    for (int64_t b = 0; b < num_requests * num_blocks; ++b) {
      all_blocks.push_back({blocks[b], 0, block_sizes[b]});
    }
    Workspace space;
    const auto block_slot = space.Put(all_blocks);
    // Their pointers are known when there is a workspace; their size does not depend on it.
    const bool measuring = workspace == nullptr;
    std::vector<Request> all_requests;
    int64_t batch = 0, checks = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      MONO_GPU_TRY(CheckArguments(*plan, requests[r]));
      const int64_t items = NumChecks(*plan, requests[r]);
      Request request{requests[r], nullptr, num_blocks, batch, checks};
      if (!measuring) {
        (void)space.Measure(workspace, workspace_bytes);
        request.blocks = space.At(block_slot) + r * num_blocks;
      }
      batch += requests[r].batch_size;
      checks += items;
      all_requests.push_back(request);
    }
    std::vector<int64_t> unit_targets;
    int64_t tiles;
    const std::vector<Unit> units = MakeUnits(own, *plan, batch, outputs, &unit_targets, &tiles);
    const auto request_slot = space.Put(all_requests);
    const auto feature_slot = space.Put(own.features);
    const auto target_slot = space.Put(own.targets);
    const auto unit_slot = space.Put(units);
    const auto unit_target_slot = space.Put(unit_targets);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(ForEach(stream, checks,
                         CheckRequest{space.At(request_slot), num_requests, space.At(feature_slot),
                                      plan->num_features, space.bad(), nullptr, nullptr}));
    return ForTiles(
        stream, tiles,
        PoolTile{space.At(unit_slot), static_cast<int64_t>(units.size()),
                 space.At(unit_target_slot), space.At(target_slot), space.At(feature_slot),
                 space.At(request_slot), num_requests, batch, space.bad()});
  });
}

int mono_gpu_op_layout_grad(void* stream, const MonoGpuLayoutPlan* plan,
                            const MonoGpuLayoutRequest* request, int64_t num_blocks,
                            const int64_t* block_offsets, const int64_t* block_sizes,
                            const float* const* output_grads, float* out, int64_t out_size,
                            void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    MONO_GPU_TRY(CheckArguments(*plan, *request));
    const Plan own = MakePlan(*plan);
    int64_t max_width = 1;
    bool packed = true;
    for (const Feature& feature : own.features) {
      if (feature.num_targets == 0) continue;
      max_width = std::max(max_width, feature.width);
      packed = packed && feature.width % 4 == 0;
    }
    for (const Target& target : own.targets) packed = packed && IsPacked(target);
    std::vector<Block> blocks;
    for (int64_t b = 0; b < num_blocks; ++b) {
      blocks.push_back({nullptr, block_offsets[b], block_sizes[b]});
    }
    const int64_t ids = request->num_ids;
    // Ids that count for nothing have the place kNowhere, whose highest sorted bit is set and that
    // of places is not: they go to the end.
    int bits = BitsOf(static_cast<uint64_t>(out_size)) + 1;
    if (bits % 8 == 0) ++bits;
    int64_t sort_bytes = 0;
    MONO_GPU_TRY(SortScratch<uint64_t>(ids, bits, &sort_bytes));
    Workspace space;
    const auto block_slot = space.Put(blocks);
    std::vector<Request> requests = {{*request, nullptr, num_blocks, 0, 0}};
    if (workspace != nullptr) {
      (void)space.Measure(workspace, workspace_bytes);
      requests[0].blocks = space.At(block_slot);
    }
    const auto request_slot = space.Put(requests);
    const auto feature_slot = space.Put(own.features);
    const auto target_slot = space.Put(own.targets);
    const auto grad_slot =
        space.Put(std::vector<const float*>(output_grads, output_grads + plan->num_outputs));
    const auto overlap = space.Put(std::vector<int32_t>{0});
    const auto sums = space.Scratch<float>(own.sum_floats);
    const auto places = space.Scratch<uint64_t>(ids);
    const auto sorted_places = space.Scratch<uint64_t>(ids);
    const auto numbers = space.Scratch<uint32_t>(ids);
    const auto sorted_numbers = space.Scratch<uint32_t>(ids);
    const auto occurrences = space.Scratch<Occurrence>(ids);
    const auto sort_scratch = space.Scratch<char>(sort_bytes);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
    MONO_GPU_TRY(FillBytes(stream, space.At(places), kNowhere,
                           ids * static_cast<int64_t>(sizeof(uint64_t))));
    MONO_GPU_TRY(
        ForEach(stream, NumChecks(*plan, *request),
                CheckRequest{space.At(request_slot), 1, space.At(feature_slot), plan->num_features,
                             space.bad(), space.At(places), space.At(occurrences)}));
    MONO_GPU_TRY(ForEach(stream, ids, NumberIds{space.At(numbers)}));
    MONO_GPU_TRY(SortPairs(stream, space.At(sort_scratch), sort_bytes, space.At(places),
                           space.At(sorted_places), space.At(numbers), space.At(sorted_numbers),
                           ids, bits));
    MONO_GPU_TRY(ForEach(
        stream, own.sum_floats,
        SumShared{*request, space.At(target_slot), static_cast<int64_t>(own.targets.size()),
                  space.At(feature_slot), space.At(grad_slot), space.bad(), space.At(sums)}));
    const Runs<uint64_t> runs{space.At(sorted_places), space.At(sorted_numbers), ids, out_size};
    const IdGradients source{space.At(occurrences), space.At(feature_slot), space.At(target_slot),
                             space.At(grad_slot), space.At(sums)};
    if (packed) {
      return ScatterSum<4>(stream, runs, source, max_width, space.bad(), space.At(overlap), out);
    }
    return ScatterSum<1>(stream, runs, source, max_width, space.bad(), space.At(overlap), out);
  });
}
