// Fused layout: pools the embeddings of a batch's ids into the model's input tensors, in the order
// of distribution/embedding_layout.h. One launch follows the offsets, checks them and pools;
// outputs that add up several slices, and several requests, take a second one.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/layout_request.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"
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

// Units that are pooled, by lanes for themselves (PoolTile) or together (PoolBlock).
struct Pooling {
  const Unit* units;
  int64_t num_units;
  const UnitTarget* targets;
  const Request* requests;
  int64_t num_requests;
  int64_t batch;  // of all requests
  int32_t* bad;

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

  // Number `number` of the unit's (batch row, FIRSTN position).
  MONO_DEVICE Place PlaceOf(const Unit& unit, int64_t number, int64_t column) const {
    Place place;
    int64_t position = 0;
    place.valid = number < batch * unit.positions;
    place.row = place.valid ? number : 0;
    if (unit.positions > 1) DivMod(place.row, unit.positions, &place.row, &position);
    place.position = static_cast<int32_t>(position);
    place.column = static_cast<int32_t>(column);
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
    const int32_t size = static_cast<int32_t>(end) - start;
    return place.position < size ? Ids{start + place.position, 1} : Ids{start + size, 0};
  }

  // Where columns of an embedding are; null if it is out of bounds.
  MONO_DEVICE static const float* AddressIn(const Source& source, uint64_t id, int32_t column) {
    const int64_t block = static_cast<int64_t>(id >> 32);
    const int64_t position = static_cast<int64_t>(id & 0xffffffffu);
    if (block < source.num_blocks) {
      const Block from = block == 0 ? source.first_block : source.blocks[block];
      if (position <= from.size - source.target.feature_width) {
        return from.data + position + source.target.start + column;
      }
    }
    return nullptr;
  }

  MONO_DEVICE const float* AddressOf(const Source& source, uint64_t id, int32_t column) const {
    const float* const address = AddressIn(source, id, column);
    if (address == nullptr) MarkBad(bad);
    return address;
  }

  // Adds one slice to *sum; *any tells whether it holds something yet.
  template <int kSize>
  MONO_DEVICE void Pool(const Source& source, const Ids& span, int32_t column, bool* any,
                        Pack<kSize>* sum) const {
    if (span.count == 0) return;
    Pack<kSize> pooled = Zeros<kSize>();
    for (int32_t first = 0; first < span.count; first += kIdsAtOnce) {
      if (IsGivenUp(first, bad)) return;
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
};

// Item of a unit = (batch row, FIRSTN position, pack of columns). A lane has kPoolItems of them,
// one after the other.
struct PoolTile : Pooling {
  static constexpr int kMinBlocks = 3;

  template <int kSize>
  MONO_DEVICE void Run(const Unit& unit, int64_t item) const {
    for (int p = 0; p < kPoolItems; ++p, item += kLanes) {
      int64_t number, pack;
      DivMod(item, unit.width / kSize, &number, &pack);
      const Place place = PlaceOf(unit, number, pack * kSize);
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

// Units that are one slice of one request. A block has kPlaces places of one: it reads where their
// ids are, then their ids, each lane one at a time, so that pooling waits for embeddings alone. The
// blocks before those of the units check the request.
struct PoolBlock : Pooling {
  int64_t num_checks;  // blocks of them
  EachItem<CheckRequest> check;

  static constexpr int kMinBlocks = kPoolBlocks;
  static constexpr int kPlaces = kLanes;
  static constexpr int kStaged = 4 * kPlaces;  // ids; more are read when they are pooled

  struct Memory {
    const float* addresses[kStaged];  // of embeddings, or null
    Ids spans[kPlaces];
  };

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    if (block.number < num_checks) {
      block.Each([&](int lane) { check(block.number, lane); });
      return;
    }
    const int64_t number = block.number - num_checks;
    const Unit unit = units[FindPart(units, num_units, number)];
    const int64_t first = (number - unit.first_tile) * kPlaces;
    const int64_t left = batch * unit.positions - first;
    const int count = static_cast<int>(left < kPlaces ? left : kPlaces);
    const Source source = SourceOf(requests[0], targets[unit.first_target]);
    Memory& memory = *block.At<Memory>(0);
    block.Each(
        [&](int lane) { memory.spans[lane] = IdsOf(source, PlaceOf(unit, first + lane, 0)); });
    const int32_t begin = memory.spans[0].begin;
    const Ids last = memory.spans[count - 1];
    // FIRSTN leaves ids out, so that its last place may have none.
    int64_t staged = source.target.first_n ? kStaged : int64_t{last.begin} + last.count - begin;
    staged = staged < kStaged ? staged : kStaged;
    staged = begin + staged < source.num_ids ? staged : source.num_ids - begin;
    block.Each([&](int lane) {
      MONO_UNROLL
      for (int k = 0; k < kStaged / kLanes; ++k) {
        const int i = k * kLanes + lane;
        if (i < staged) {
          memory.addresses[i] = AddressIn(source, source.ids[int64_t{begin} + i], 0);
        }
      }
    });
    block.Each([&](int lane) {
      if (unit.pack == 4) {
        Run<4>(unit, source, memory, first, count, begin, staged, lane);
      } else {
        Run<1>(unit, source, memory, first, count, begin, staged, lane);
      }
    });
  }

  template <int kSize>
  MONO_DEVICE void Run(const Unit& unit, const Source& source, const Memory& memory, int64_t first,
                       int count, int32_t begin, int64_t staged, int lane) const {
    int log_lanes = 0;
    while (log_lanes < 5 && (int64_t{kSize} << log_lanes) < unit.width) ++log_lanes;
    const int own = lane & ((1 << log_lanes) - 1);
    for (int p = lane >> log_lanes; p < count; p += kLanes >> log_lanes) {
      const Ids span = memory.spans[p];
      for (int64_t column = own * kSize; column < unit.width;
           column += int64_t{kSize} << log_lanes) {
        const Place place = PlaceOf(unit, first + p, column);
        Write<kSize>(unit, place, Sum<kSize>(source, memory, span, place.column, begin, staged));
      }
    }
  }

  template <int kSize>
  MONO_DEVICE Pack<kSize> Sum(const Source& source, const Memory& memory, const Ids& span,
                              int32_t column, int32_t begin, int64_t staged) const {
    Pack<kSize> sum = Zeros<kSize>();
    for (int32_t done = 0; done < span.count; done += kIdsAtOnce) {
      if (IsGivenUp(done, bad)) break;
      Pack<kSize> values[kIdsAtOnce];
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        const int64_t i = int64_t{span.begin} - begin + done + k;
        const float* from = nullptr;
        if (done + k < span.count) {
          const float* const address = i >= 0 && i < staged ? memory.addresses[i] : nullptr;
          from = address != nullptr ? address + column
                                    : AddressOf(source, source.ids[begin + i], column);
        }
        values[k] = from != nullptr ? Load<kSize>(from) : Zeros<kSize>();
      }
      MONO_UNROLL
      for (int k = 0; k < kIdsAtOnce; ++k) {
        if (done + k >= span.count) continue;
        if (done + k == 0) {
          sum = values[k];
        } else {
          AddTo(&sum, values[k]);
        }
      }
    }
    if (source.target.mean && span.count > 0) {
      const float count = static_cast<float>(span.count);
      for (int k = 0; k < kSize; ++k) sum.values[k] /= count;
    }
    return sum;
  }
};

// Places of the outputs, with their slices: those of PoolBlock if there is one request, and those
// of PoolTile.
struct Units {
  std::vector<Unit> of_blocks, of_tiles;
  std::vector<UnitTarget> targets;
  int64_t blocks = 0, tiles = 0;
};

Units MakeUnits(const Plan& plan, const MonoGpuLayoutPlan& from, int64_t batch, bool one_request,
                float* const* outputs) {
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
  Units units;
  for (const std::vector<int64_t>& group : groups) {
    const Target& target = plan.targets[group[0]];
    int64_t pack = 4;
    for (const int64_t t : group) pack = IsPacked(plan.targets[t]) ? pack : 1;
    const int64_t positions = plan.features[target.feature].positions;
    Unit unit{outputs[target.output],
              target.row_size,
              target.column,
              target.step,
              target.width,
              positions,
              static_cast<int64_t>(units.targets.size()),
              static_cast<int64_t>(group.size()),
              0,
              pack};
    for (const int64_t t : group) {
      const Target& own = plan.targets[t];
      const Feature& feature = plan.features[own.feature];
      units.targets.push_back({own.feature, static_cast<int32_t>(own.start),
                               static_cast<int32_t>(feature.width), feature.mean, feature.first_n});
    }
    if (one_request && group.size() == 1) {
      unit.first_tile = units.blocks;
      units.blocks += CeilDiv(batch * positions, PoolBlock::kPlaces);
      units.of_blocks.push_back(unit);
    } else {
      unit.first_tile = units.tiles;
      units.tiles += CeilDiv(batch * positions * (target.width / pack), kLanes * kPoolItems);
      units.of_tiles.push_back(unit);
    }
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
    const Units units = MakeUnits(own, *plan, batch, num_requests == 1, outputs);
    const auto request_slot = space.Put(all_requests);
    const auto feature_slot = space.Put(own.features);
    const auto block_unit_slot = space.Put(units.of_blocks);
    const auto tile_unit_slot = space.Put(units.of_tiles);
    const auto unit_target_slot = space.Put(units.targets);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    const Pooling pooling{
        nullptr, 0,          space.At(unit_target_slot), space.At(request_slot), num_requests,
        batch,   space.bad()};
    PoolBlock block{
        pooling,
        CeilDiv(checks, kLanes),
        {checks, CheckRequest{space.At(request_slot), num_requests,
                              num_requests > 0 ? all_requests[0] : Request{},
                              space.At(feature_slot), plan->num_features, space.bad()}}};
    block.units = space.At(block_unit_slot);
    block.num_units = static_cast<int64_t>(units.of_blocks.size());
    MONO_GPU_TRY(ForBlocks(stream, block.num_checks + units.blocks,
                           int64_t{sizeof(PoolBlock::Memory)}, block));
    PoolTile tile{pooling};
    tile.units = space.At(tile_unit_slot);
    tile.num_units = static_cast<int64_t>(units.of_tiles.size());
    return ForTiles(stream, units.tiles, tile);
  });
}
