// The gradient of the fused layout. Its first launch checks the offsets and lists the ids; then
// these are sorted by embedding and the occurrences of each are added up (scatter_sum.h), unless an
// offset was wrong. The order of every sum is that of distribution/embedding_layout.h.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/layout_request.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace layout {
namespace {

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
  int64_t min_width;
  bool one_width;
  const int32_t* unaligned;  // not 0: some place is no multiple of min_width

  MONO_DEVICE IdGradients Ready() const { return *this; }

  MONO_DEVICE bool CannotOverlap() const { return one_width && ReadOnly(unaligned) == 0; }

  MONO_DEVICE int64_t Place(uint32_t key, uint32_t id) const {
    return static_cast<int64_t>(key) * min_width + occurrences[id].rest;
  }

  MONO_DEVICE int64_t Width(uint32_t id) const {
    return one_width ? min_width : features[occurrences[id].feature].width;
  }

  MONO_DEVICE static bool Covers(const Target& target, int64_t column) {
    return column >= target.start && column < target.start + target.width;
  }

  // The gradient of a slice's column.
  MONO_DEVICE const float* In(const Feature& feature, const Target& target, const Occurrence& o,
                              int64_t column) const {
    const int64_t position = feature.first_n ? o.detail : 0;
    const int64_t c = column - target.start;
    return o.row < 0 ? sums + target.sum_offset + position * target.width + c
                     : grads[target.output] + o.row * target.row_size + target.column +
                           position * target.step + c;
  }

  MONO_DEVICE const float* Address(uint32_t id, int64_t column) const {
    const Occurrence o = occurrences[id];
    const Feature& feature = features[o.feature];
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      if (Covers(targets[t], column)) return In(feature, targets[t], o, column);
    }
    return nullptr;
  }

  template <int kSize>
  MONO_DEVICE void Finish(uint32_t id, Pack<kSize>* term) const {
    const Occurrence o = occurrences[id];
    if (!features[o.feature].mean || o.detail <= 1) return;
    const float count = static_cast<float>(o.detail);
    for (int k = 0; k < kSize; ++k) term->values[k] /= count;
  }

  // Feature by feature and slice by slice, as the CPU adds them. Sorted by place, then by id, which
  // is by feature.
  template <int kSize>
  MONO_DEVICE void AddRun(const Runs& runs, int64_t first, int64_t column, Pack<kSize>* sum) const {
    const uint32_t key = runs.keys[first];
    for (int64_t end = first; runs.IsAt(end, key); first = end) {
      const int32_t f = occurrences[runs.occurrences[first]].feature;
      while (runs.IsAt(end, key) && occurrences[runs.occurrences[end]].feature == f) ++end;
      const Feature& feature = features[f];
      for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
        if (!Covers(targets[t], column)) continue;
        for (int64_t i = first; i < end; ++i) {
          const uint32_t id = runs.occurrences[i];
          Pack<kSize> term = Load<kSize>(In(feature, targets[t], occurrences[id], column));
          Finish<kSize>(id, &term);
          AddTo(sum, term);
        }
      }
    }
  }

  MONO_DEVICE float AddOne(uint32_t id, int64_t column, float sum) const {
    const Occurrence o = occurrences[id];
    const Feature& feature = features[o.feature];
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      if (!Covers(targets[t], column)) continue;
      Pack<1> term = LoadAligned<1>(In(feature, targets[t], o, column));
      Finish<1>(id, &term);
      sum += term.values[0];
    }
    return sum;
  }
};

// Numbers all ids; those that CheckRequest does not list count for nothing.
struct NumberIds {
  uint32_t* keys;
  uint32_t* numbers;
  uint32_t nowhere;

  MONO_DEVICE void operator()(int64_t i) const {
    keys[i] = nowhere;
    numbers[i] = static_cast<uint32_t>(i);
  }
};

// No column of a feature is in two slices.
bool AreColumnsApart(const Plan& plan) {
  for (const Feature& feature : plan.features) {
    std::vector<bool> taken(feature.width, false);
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      for (int64_t c = 0; c < plan.targets[t].width; ++c) {
        if (taken[plan.targets[t].start + c]) return false;
        taken[plan.targets[t].start + c] = true;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace layout
}  // namespace gpu
}  // namespace monolith

using namespace ::monolith::gpu;          // NOLINT: only the C function follows
using namespace ::monolith::gpu::layout;  // NOLINT

int mono_gpu_op_layout_grad(void* stream, const MonoGpuLayoutPlan* plan,
                            const MonoGpuLayoutRequest* request, int64_t num_blocks,
                            const int64_t* block_offsets, const int64_t* block_sizes,
                            const float* const* output_grads, float* out, int64_t out_size,
                            void* workspace, int64_t* workspace_bytes) {
  return Guard([&]() -> int {
    MONO_GPU_TRY(CheckArguments(*plan, *request));
    const Plan own = MakePlan(*plan);
    int64_t min_width = INT64_MAX, max_width = 1;
    bool packed = true;
    for (const Feature& feature : own.features) {
      if (feature.num_targets == 0) continue;
      min_width = std::min(min_width, feature.width);
      max_width = std::max(max_width, feature.width);
      packed = packed && feature.width % 4 == 0;
    }
    min_width = std::max<int64_t>(1, std::min(min_width, max_width));
    for (const Target& target : own.targets) packed = packed && IsPacked(target);
    std::vector<Block> blocks;
    for (int64_t b = 0; b < num_blocks; ++b) {
      blocks.push_back({nullptr, block_offsets[b], block_sizes[b]});
    }
    const int64_t ids = request->num_ids;
    Keys of;
    MONO_GPU_TRY(MakeKeys(out_size, min_width, &of));
    const int bits = BitsOf(of.nowhere);
    int64_t sort_bytes = 0;
    MONO_GPU_TRY(SortScratch<uint32_t>(ids, bits, &sort_bytes));
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
    const auto unaligned = space.Put(std::vector<int32_t>{0});
    const auto sums = space.Scratch<float>(own.sum_floats);
    const auto keys = space.Scratch<uint32_t>(ids);
    const auto sorted_keys = space.Scratch<uint32_t>(ids);
    const auto numbers = space.Scratch<uint32_t>(ids);
    const auto sorted_numbers = space.Scratch<uint32_t>(ids);
    const auto occurrences = space.Scratch<Occurrence>(ids);
    const auto sort_scratch = space.Scratch<char>(sort_bytes);
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    MONO_GPU_TRY(FillBytes(stream, out, 0, out_size * static_cast<int64_t>(sizeof(float))));
    MONO_GPU_TRY(ForEach(stream, ids, NumberIds{space.At(keys), space.At(numbers), of.nowhere}));
    MONO_GPU_TRY(ForEach(
        stream, NumChecks(*plan, *request, /*with_ids=*/true),
        CheckRequest{space.At(request_slot), 1, space.At(feature_slot), plan->num_features,
                     space.bad(), space.At(occurrences), space.At(keys), of, space.At(unaligned)}));
    MONO_GPU_TRY(SortPairs(stream, space.At(sort_scratch), sort_bytes, space.At(keys),
                           space.At(sorted_keys), space.At(numbers), space.At(sorted_numbers), ids,
                           bits));
    MONO_GPU_TRY(ForEach(
        stream, own.sum_floats,
        SumShared{*request, space.At(target_slot), static_cast<int64_t>(own.targets.size()),
                  space.At(feature_slot), space.At(grad_slot), space.bad(), space.At(sums)}));
    const Runs runs{space.At(sorted_keys), space.At(sorted_numbers), ids, of};
    const IdGradients source{space.At(occurrences),  space.At(feature_slot), space.At(target_slot),
                             space.At(grad_slot),    space.At(sums),         min_width,
                             min_width == max_width, space.At(unaligned)};
    const auto scatter =
        AreColumnsApart(own)
            ? (packed ? ScatterSum<4, true, IdGradients> : ScatterSum<1, true, IdGradients>)
            : (packed ? ScatterSum<4, false, IdGradients> : ScatterSum<1, false, IdGradients>);
    return scatter(stream, runs, source, max_width, space.bad(), space.At(overlap), out, out_size);
  });
}
