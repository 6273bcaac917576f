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
  int32_t start;
  int32_t feature_width;
  bool mean;
  bool first_n;
};

// Item of a unit = (batch row, FIRSTN position, pack of columns). A lane has kPoolItems of them,
// one after the other: where the unit is one slice of one request, what is common to them is looked
// up once, and the ids of the next are on their way while one is pooled.
struct PoolTile {
  const Unit* units;
  int64_t num_units;
  const UnitTarget* targets;
  const Request* requests;
  int64_t num_requests;
  int64_t batch;  // of all requests
  int32_t* bad;

  static constexpr int kMinBlocks = 3;

  struct Place {
    int64_t row;  // of the outputs
    int32_t position;
    int32_t column;
    bool valid;
  };

  // A slice in a request.
  struct Source {
    UnitTarget target;
    FeatureRows rows;
    const uint64_t* ids;
    const int32_t* row_begins;
    int64_t num_rows;
    int64_t num_ids;
    int64_t first_row;  // of the request, in the outputs
    const Block* blocks;
    int64_t num_blocks;
    Block first_block;
  };

  // Ids [begin, begin + count).
  struct Ids {
    int32_t begin;
    int32_t count;
  };

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

  MONO_DEVICE static Source SourceOf(const Request& request, const UnitTarget& target) {
    const MonoGpuLayoutRequest& in = request.in;
    Source source{target,
                  RowsOf(in, target.feature),
                  in.ids,
                  in.rows,
                  in.num_rows,
                  in.num_ids,
                  request.first_row,
                  request.blocks,
                  request.num_blocks,
                  {nullptr, 0, 0}};
    if (request.num_blocks > 0) source.first_block = request.blocks[0];
    return source;
  }

  template <int kSize>
  MONO_DEVICE Place PlaceOf(const Unit& unit, int64_t item) const {
    const int64_t packs = unit.width / kSize;
    Place place;
    int64_t rest, pack;
    place.valid = item < batch * unit.positions * packs;
    DivMod(place.valid ? item : 0, packs, &rest, &pack);
    int64_t position = 0;
    place.row = rest;
    if (unit.positions > 1) DivMod(rest, unit.positions, &place.row, &position);
    place.position = static_cast<int32_t>(position);
    place.column = static_cast<int32_t>(pack) * kSize;
    return place;
  }

  // The ids that a slice pools.
  MONO_DEVICE Ids IdsOf(const Source& source, const Place& place) const {
    const int64_t row = source.rows.shared ? 0 : place.row - source.first_row;
    if (!place.valid || row >= source.rows.count || source.rows.first > source.num_rows) {
      return {0, 0};
    }
    const int64_t first = source.rows.first + row;
    const int64_t begin = first < source.num_rows ? source.row_begins[first] : source.num_ids;
    const int64_t end = first + 1 < source.num_rows ? source.row_begins[first + 1] : source.num_ids;
    if (begin < 0 || begin > end || end > source.num_ids) {
      MarkBad(bad);
      return {0, 0};
    }
    // There are less than 2^31 ids.
    const int32_t start = static_cast<int32_t>(begin);
    if (!source.target.first_n) return {start, static_cast<int32_t>(end) - start};
    return place.position < end - begin ? Ids{start + place.position, 1} : Ids{0, 0};
  }

  // Where columns of an embedding are; null if it is out of bounds.
  MONO_DEVICE const float* AddressOf(const Source& source, uint64_t id, int32_t column) const {
    const int64_t block = static_cast<int64_t>(id >> 32);
    const int64_t position = static_cast<int64_t>(id & 0xffffffffu);
    if (block < source.num_blocks) {
      const Block from = block == 0 ? source.first_block : source.blocks[block];
      if (position <= from.size - source.target.feature_width) {
        return from.data + position + source.target.start + column;
      }
    }
    MarkBad(bad);
    return nullptr;
  }

  // Adds one slice to *sum; *any tells whether it holds something yet.
  template <int kSize>
  MONO_DEVICE void Pool(const Source& source, const Ids& span, int32_t column, bool* any,
                        Pack<kSize>* sum) const {
    if (span.count == 0) return;
    Pack<kSize> pooled = Zeros<kSize>();
    for (int32_t first = 0; first < span.count; first += kIdsAtOnce) {
      uint64_t ids[kIdsAtOnce];
      Pack<kSize> values[kIdsAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        ids[k] = first + k < span.count ? source.ids[int64_t{span.begin} + first + k] : 0;
      }
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        const float* const from =
            first + k < span.count ? AddressOf(source, ids[k], column) : nullptr;
        values[k] = from != nullptr ? Load<kSize>(from) : Zeros<kSize>();
      }
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        if (first + k >= span.count) continue;
        if (first + k == 0) {
          pooled = values[k];
        } else {
          AddTo(&pooled, values[k]);
        }
      }
    }
    if (source.target.mean) {
      const float count = static_cast<float>(span.count);
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
  MONO_DEVICE static void Write(const Unit& unit, const Place& place, const Pack<kSize>& sum) {
    if (!place.valid) return;
    Store<kSize>(sum, unit.out + place.row * unit.row_size + unit.column +
                          place.position * unit.step + place.column);
  }

  template <int kSize>
  MONO_DEVICE void RunOneSlice(const Unit& unit, int64_t item) const {
    const Source source = SourceOf(requests[0], targets[unit.first_target]);
    Place place = PlaceOf<kSize>(unit, item);
    Ids span = IdsOf(source, place);
    for (int p = 0; p < kPoolItems; ++p) {
      item += kLanes;
      Place next = PlaceOf<kSize>(unit, item);
      next.valid = next.valid && p + 1 < kPoolItems;
      const Ids next_span = IdsOf(source, next);
      Pack<kSize> sum = Zeros<kSize>();
      bool any = false;
      Pool<kSize>(source, span, place.column, &any, &sum);
      Write<kSize>(unit, place, sum);
      place = next;
      span = next_span;
    }
  }

  template <int kSize>
  MONO_DEVICE void Run(const Unit& unit, int64_t item) const {
    if (num_requests == 1 && unit.num_targets == 1) {
      RunOneSlice<kSize>(unit, item);
      return;
    }
    for (int p = 0; p < kPoolItems; ++p, item += kLanes) {
      const Place place = PlaceOf<kSize>(unit, item);
      if (!place.valid) return;
      const Request& request = RequestOf(place.row);
      Pack<kSize> sum = Zeros<kSize>();
      bool any = false;
      for (int64_t t = unit.first_target; t < unit.first_target + unit.num_targets; ++t) {
        const Source source = SourceOf(request, targets[t]);
        Pool<kSize>(source, IdsOf(source, place), place.column, &any, &sum);
      }
      Write<kSize>(unit, place, sum);
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
      unit_targets->push_back({own.feature, static_cast<int32_t>(own.start),
                               static_cast<int32_t>(feature.width), feature.mean, feature.first_n});
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
    const Plan own = MakePlan(*plan, /*batch=*/0);
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
                             /*listing=*/false,
                             {}};
    return ForTiles(stream, tiles, pool, CeilDiv(checks, kLanes),
                    EachItem<CheckRequest>{checks, check});
  });
}
