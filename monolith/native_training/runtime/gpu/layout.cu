// Fused layout: pools the embeddings of a batch's ids into the model's input tensors, in the order
// of distribution/embedding_layout.h. One launch follows the offsets, checks them and pools.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/layout_request.h"
#include "monolith/native_training/runtime/gpu/tuning.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace layout {
namespace {

constexpr int kIdsAtOnce = 4;

// A place of an output: one slice, or several that are added up.
struct Unit {
  float* out;
  int64_t row_size;
  int64_t column;
  int64_t step;
  int64_t width;
  int64_t positions;
  int64_t first_target;  // of its UnitTargets
  int64_t num_targets;
  int64_t first_tile;
  int64_t pack;
};

// A slice that goes to a unit.
struct UnitTarget {
  int64_t feature;
  int64_t start;
  int64_t feature_width;
  bool mean;
  bool first_n;
};

// Item of a unit = (batch row, FIRSTN position, pack of columns). A lane has kPoolItems of them, so
// that their loads, which depend on one another, are in flight together.
struct PoolTile {
  const Unit* units;
  int64_t num_units;
  const UnitTarget* targets;
  const Request* requests;
  int64_t num_requests;
  int64_t batch;  // of all requests
  int32_t* bad;

  struct Item {
    const Request* request;
    int64_t row;  // of the outputs
    int64_t position;
    int64_t column;
    bool valid;
    bool any;  // the sum holds something
  };

  // Ids [begin, begin + count).
  struct Span {
    int64_t begin;
    int64_t count;
  };

  MONO_DEVICE const Request* RequestOf(int64_t row) const {
    int64_t low = 0, high = num_requests;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (requests[middle].first_row <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return requests + low;
  }

  // The ids of an item that a slice pools.
  MONO_DEVICE Span IdsOf(const Item& item, const UnitTarget& target) const {
    const MonoGpuLayoutRequest& in = item.request->in;
    const FeatureRows rows = RowsOf(in, target.feature);
    const int64_t row = rows.shared ? 0 : item.row - item.request->first_row;
    if (!item.valid || row >= rows.count || rows.first > in.num_rows) return {0, 0};
    const int64_t begin = RowBegin(in, rows.first + row);
    const int64_t end = RowBegin(in, rows.first + row + 1);
    if (begin < 0 || begin > end || end > in.num_ids) {
      MarkBad(bad);
      return {0, 0};
    }
    if (!target.first_n) return {begin, end - begin};
    return {begin + item.position, begin + item.position < end ? 1 : 0};
  }

  // Where columns of an embedding are; null if it is out of bounds.
  MONO_DEVICE const float* AddressOf(const Item& item, const UnitTarget& target,
                                     uint64_t id) const {
    const int64_t block = static_cast<int64_t>(id >> 32);
    const int64_t position = static_cast<int64_t>(id & 0xffffffffu);
    if (block < item.request->num_blocks) {
      const Block& from = item.request->blocks[block];
      if (position <= from.size - target.feature_width) {
        return from.data + position + target.start + item.column;
      }
    }
    MarkBad(bad);
    return nullptr;
  }

  // Adds the values of up to kIdsAtOnce ids from `first` of the span on.
  template <int kSize>
  MONO_DEVICE static void AddValues(const Span& span, int64_t first, const Pack<kSize>* values,
                                    Pack<kSize>* pooled) {
    for (int k = 0; k < kIdsAtOnce; ++k) {
      if (first + k >= span.count) continue;
      if (first + k == 0) {
        *pooled = values[k];
      } else {
        AddTo(pooled, values[k]);
      }
    }
  }

  template <int kSize>
  MONO_DEVICE void LoadIds(const Item& item, const UnitTarget& target, const Span& span,
                           int64_t first, const uint64_t* ids, Pack<kSize>* values) const {
    const float* from[kIdsAtOnce];
    for (int k = 0; k < kIdsAtOnce; ++k) {
      from[k] = first + k < span.count ? AddressOf(item, target, ids[k]) : nullptr;
    }
    for (int k = 0; k < kIdsAtOnce; ++k) {
      values[k] = from[k] != nullptr ? Load<kSize>(from[k]) : Zeros<kSize>();
    }
  }

  MONO_DEVICE static void ReadIds(const Item& item, const Span& span, int64_t first,
                                  uint64_t* ids) {
    for (int k = 0; k < kIdsAtOnce; ++k) {
      ids[k] = first + k < span.count ? item.request->in.ids[span.begin + first + k] : 0;
    }
  }

  // Adds one slice to the items' sums.
  template <int kSize>
  MONO_DEVICE void Pool(const UnitTarget& target, Item* items, Pack<kSize>* sums) const {
    Span spans[kPoolItems];
    uint64_t ids[kPoolItems][kIdsAtOnce];
    Pack<kSize> values[kPoolItems][kIdsAtOnce];
    for (int p = 0; p < kPoolItems; ++p) spans[p] = IdsOf(items[p], target);
    for (int p = 0; p < kPoolItems; ++p) ReadIds(items[p], spans[p], 0, ids[p]);
    for (int p = 0; p < kPoolItems; ++p) {
      LoadIds<kSize>(items[p], target, spans[p], 0, ids[p], values[p]);
    }
    for (int p = 0; p < kPoolItems; ++p) {
      if (spans[p].count == 0) continue;
      Pack<kSize> pooled = Zeros<kSize>();
      AddValues<kSize>(spans[p], 0, values[p], &pooled);
      for (int64_t i = kIdsAtOnce; i < spans[p].count; i += kIdsAtOnce) {
        ReadIds(items[p], spans[p], i, ids[p]);
        LoadIds<kSize>(items[p], target, spans[p], i, ids[p], values[p]);
        AddValues<kSize>(spans[p], i, values[p], &pooled);
      }
      if (target.mean) {
        const float count = static_cast<float>(spans[p].count);
        for (int k = 0; k < kSize; ++k) pooled.values[k] /= count;
      }
      if (items[p].any) {
        AddTo(&sums[p], pooled);
      } else {
        sums[p] = pooled;
      }
      items[p].any = true;
    }
  }

  template <int kSize>
  MONO_DEVICE void Run(const Unit& unit, int64_t first) const {
    const int64_t packs = unit.width / kSize;
    Item items[kPoolItems];
    Pack<kSize> sums[kPoolItems];
    for (int p = 0; p < kPoolItems; ++p) {
      const int64_t item = first + p * kLanes;
      int64_t rest, pack;
      items[p].valid = item < batch * unit.positions * packs;
      DivMod(items[p].valid ? item : 0, packs, &rest, &pack);
      DivMod(rest, unit.positions, &items[p].row, &items[p].position);
      items[p].column = pack * kSize;
      items[p].request = RequestOf(items[p].row);
      items[p].any = false;
      sums[p] = Zeros<kSize>();
    }
    for (int64_t t = unit.first_target; t < unit.first_target + unit.num_targets; ++t) {
      const UnitTarget target = targets[t];
      Pool<kSize>(target, items, sums);
    }
    for (int p = 0; p < kPoolItems; ++p) {
      if (!items[p].valid) continue;
      Store<kSize>(sums[p], unit.out + items[p].row * unit.row_size + unit.column +
                                items[p].position * unit.step + items[p].column);
    }
  }

  MONO_DEVICE void operator()(int64_t tile, int lane) const {
    const Unit unit = units[FindPart(units, num_units, tile)];
    const int64_t first = (tile - unit.first_tile) * (kLanes * kPoolItems) + lane;
    if (unit.pack == 4) {
      Run<4>(unit, first);
    } else {
      Run<1>(unit, first);
    }
  }
};

// Places of the outputs, with their slices.
std::vector<Unit> MakeUnits(const Plan& plan, const MonoGpuLayoutPlan& from, int64_t batch,
                            float* const* outputs, std::vector<UnitTarget>* unit_targets,
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
    for (const int64_t t : group) {
      const Target& own = plan.targets[t];
      const Feature& feature = plan.features[own.feature];
      unit_targets->push_back(
          {own.feature, own.start, feature.width, feature.mean, feature.first_n});
    }
    *tiles += CeilDiv(batch * positions * (target.width / pack), kLanes * kPoolItems);
  }
  return units;
}

}  // namespace
}  // namespace layout
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;          // NOLINT: only the C function follows
using namespace ::monolith::gpu::layout;  // NOLINT

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
    const bool any_first_n = std::any_of(own.features.begin(), own.features.end(),
                                         [](const Feature& feature) { return feature.first_n; });
    int64_t batch = 0, checks = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      MONO_GPU_TRY(CheckArguments(*plan, requests[r]));
      const int64_t items = NumChecks(*plan, requests[r], any_first_n);
      Request request{requests[r], nullptr, num_blocks, batch, checks};
      if (!measuring) {
        (void)space.Measure(workspace, workspace_bytes);
        request.blocks = space.At(block_slot) + r * num_blocks;
      }
      batch += requests[r].batch_size;
      checks += items;
      all_requests.push_back(request);
    }
    std::vector<UnitTarget> unit_targets;
    int64_t tiles;
    const std::vector<Unit> units = MakeUnits(own, *plan, batch, outputs, &unit_targets, &tiles);
    const auto request_slot = space.Put(all_requests);
    const auto feature_slot = space.Put(own.features);
    const auto unit_slot = space.Put(units);
    const auto unit_target_slot = space.Put(unit_targets);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    const PoolTile pool{space.At(unit_slot),
                        static_cast<int64_t>(units.size()),
                        space.At(unit_target_slot),
                        space.At(request_slot),
                        num_requests,
                        batch,
                        space.bad()};
    const CheckRequest check{space.At(request_slot),
                             num_requests,
                             space.At(feature_slot),
                             plan->num_features,
                             space.bad(),
                             nullptr,
                             nullptr,
                             {},
                             nullptr};
    return ForTiles(stream, tiles, pool, CeilDiv(checks, kLanes),
                    EachItem<CheckRequest>{checks, check});
  });
}
