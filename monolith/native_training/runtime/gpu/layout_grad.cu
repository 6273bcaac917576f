// The gradient of the fused layout. Its first launch checks the offsets and lists the ids; then
// these are sorted by embedding and the occurrences of each are added up (scatter_sum.h), unless an
// offset was wrong. The order of every sum is that of distribution/embedding_layout.h.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/bucket_sum.h"
#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/layout_ids.h"
#include "monolith/native_training/runtime/gpu/layout_request.h"
#include "monolith/native_training/runtime/gpu/scatter_sum.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/workspace.h"

namespace monolith {
namespace gpu {
namespace layout {
namespace {

// A slice's gradient.
struct GradTarget {
  const float* grad;  // of its first column and the first batch row
  int64_t feature;
  int64_t row_size;
  int64_t step;
  int64_t start;
  int64_t width;
  int64_t sum_offset;

  MONO_DEVICE bool Covers(int64_t column) const {
    return column >= start && column < start + width;
  }
};

// The gradient of a shared feature's row, which is that of all batch rows together. An item is a
// float of `sums`, where each target has positions * width of them.
struct SumShared {
  MonoGpuLayoutRequest request;
  const GradTarget* targets;
  int64_t num_targets;
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
    const GradTarget& target = targets[low];
    if ((request.starts[target.feature] & kSharedBit) == 0) return;
    int64_t position, column;
    DivMod(item - target.sum_offset, target.width, &position, &column);
    const float* grad = target.grad + position * target.step + column;
    float sum = 0;
    for (int64_t b = 0; b < request.batch_size; ++b, grad += target.row_size) sum += *grad;
    sums[item] = sum;
  }
};

struct IdGradientArguments {
  MonoGpuLayoutRequest request;
  const Block* blocks;
  const uint32_t* sources;
  const Feature* features;
  int64_t num_features;
  bool one_position;  // no feature has several
  bool any_mean;
  const GradTarget* targets;
  const float* sums;
  int64_t min_width;
  bool one_width;
  int64_t pieces;
  const int32_t* unaligned;  // not 0: some place is no multiple of min_width
};

// Gradients of ids, as scatter_sum.h wants them. An occurrence is an id or a piece of one, its
// location a source or a piece of it (layout_request.h). kCut: there are pieces.
template <bool kCut>
struct IdGradients : IdGradientArguments {
  struct Origin {
    int64_t feature;
    int64_t row;
    int64_t position;
  };

  MONO_DEVICE IdGradients Ready() const { return *this; }

  MONO_DEVICE bool CannotOverlap() const { return one_width && ReadOnly(unaligned) == 0; }

  // The number of a piece among those of its id or source, and which of them it is.
  MONO_DEVICE int64_t WholeOf(uint32_t number, int64_t* piece) const {
    int64_t whole = number;
    *piece = 0;
    if constexpr (kCut) DivMod(number, pieces, &whole, piece);
    return whole;
  }

  MONO_DEVICE int64_t Place(uint32_t key, uint32_t occurrence) const {
    if (ReadOnly(unaligned) == 0) return static_cast<int64_t>(key) * min_width;
    int64_t piece;
    const uint64_t of = request.ids[WholeOf(occurrence, &piece)];
    return blocks[of >> 32].offset + static_cast<int64_t>(of & 0xffffffffu) + piece * min_width;
  }

  MONO_DEVICE int64_t Width(uint32_t occurrence) const {
    return one_width ? min_width : features[OriginOf(Locate(occurrence)).feature].width;
  }

  MONO_DEVICE uint32_t Locate(uint32_t occurrence) const {
    int64_t piece;
    const uint32_t source = sources[WholeOf(occurrence, &piece)];
    return kCut ? static_cast<uint32_t>(source * pieces + piece) : source;
  }

  MONO_DEVICE Origin OriginOf(int64_t source) const {
    Origin origin{0, 0, 0};
    if (one_position) {
      DivMod(source, request.batch_size, &origin.feature, &origin.row);
      return origin;
    }
    origin.feature = FindPart(features, num_features, source);
    const Feature& feature = features[origin.feature];
    DivMod(source - feature.first_tile, feature.positions, &origin.row, &origin.position);
    return origin;
  }

  // The gradient of a slice's column.
  MONO_DEVICE const float* In(const GradTarget& target, const Origin& o, int64_t column) const {
    const int64_t c = column - target.start;
    return (request.starts[o.feature] & kSharedBit) != 0
               ? sums + target.sum_offset + o.position * target.width + c
               : target.grad + o.row * target.row_size + o.position * target.step + c;
  }

  MONO_DEVICE const float* Address(uint32_t location, int64_t column) const {
    int64_t piece;
    const Origin o = OriginOf(WholeOf(location, &piece));
    const Feature& feature = features[o.feature];
    column += piece * min_width;
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      if (targets[t].Covers(column)) return In(targets[t], o, column);
    }
    return nullptr;
  }

  static constexpr bool kWithLocations = true;

  MONO_DEVICE const float* Row(uint32_t location) const {
    int64_t piece;
    const Origin o = OriginOf(WholeOf(location, &piece));
    const Feature& feature = features[o.feature];
    const int64_t first = piece * min_width;
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      const GradTarget& target = targets[t];
      if (target.Covers(first) && target.Covers(first + min_width - 1)) return In(target, o, first);
    }
    return nullptr;
  }

  template <int kSize>
  MONO_DEVICE void Finish(uint32_t location, Pack<kSize>* term) const {
    if (!any_mean) return;
    int64_t piece;
    const Origin o = OriginOf(WholeOf(location, &piece));
    if (!features[o.feature].mean) return;
    const int64_t row = StartOf(request, o.feature) + o.row;
    const float count = static_cast<float>(RowBegin(request, row + 1) - RowBegin(request, row));
    for (int k = 0; k < kSize; ++k) term->values[k] /= count;
  }

  // Feature by feature and slice by slice, as the CPU adds them. Sorted by place, then by id, which
  // is by feature. Ids are not cut then.
  template <int kSize>
  MONO_DEVICE void AddRun(const Runs& runs, int64_t first, int64_t column, Pack<kSize>* sum) const {
    const uint32_t key = runs.keys[first];
    for (int64_t end = first; runs.IsAt(end, key); first = end) {
      const int64_t f = OriginOf(Locate(runs.occurrences[first])).feature;
      while (runs.IsAt(end, key) && OriginOf(Locate(runs.occurrences[end])).feature == f) ++end;
      const Feature& feature = features[f];
      for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
        if (!targets[t].Covers(column)) continue;
        for (int64_t i = first; i < end; ++i) {
          const uint32_t source = Locate(runs.occurrences[i]);
          Pack<kSize> term = Load<kSize>(In(targets[t], OriginOf(source), column));
          Finish<kSize>(source, &term);
          AddTo(sum, term);
        }
      }
    }
  }

  template <int kSize>
  MONO_DEVICE void AddOne(uint32_t location, int64_t column, Pack<kSize>* sum) const {
    int64_t piece;
    const Origin o = OriginOf(WholeOf(location, &piece));
    const Feature& feature = features[o.feature];
    column += piece * min_width;
    for (int64_t t = feature.first_target; t < feature.first_target + feature.num_targets; ++t) {
      if (!targets[t].Covers(column)) continue;
      Pack<kSize> term = Load<kSize>(In(targets[t], o, column));
      Finish<kSize>(location, &term);
      AddTo(sum, term);
    }
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
    const Plan own = MakePlan(*plan, request->batch_size);
    if (own.num_sources > INT64_C(0xffffffff)) {
      return Fail(MONO_GPU_INVALID_ARGUMENT,
                  "batch_size is " + std::to_string(request->batch_size) +
                      ", and all features have " + std::to_string(own.num_sources) +
                      " places, want less than 2^32");
    }
    int64_t min_width = INT64_MAX, max_width = 1, divisor = 0;
    bool packed = true, one_position = true, any_mean = false;
    for (const Feature& feature : own.features) {
      one_position = one_position && feature.positions == 1;
      any_mean = any_mean || feature.mean;
      if (feature.num_targets == 0) continue;
      min_width = std::min(min_width, feature.width);
      max_width = std::max(max_width, feature.width);
      divisor = std::gcd(divisor, feature.width);
      packed = packed && feature.width % 4 == 0;
    }
    min_width = std::max<int64_t>(1, std::min(min_width, max_width));
    std::vector<GradTarget> targets;
    for (const Target& target : own.targets) {
      packed = packed && IsPacked(target);
      targets.push_back({output_grads[target.output] + target.column, target.feature,
                         target.row_size, target.step, target.start, target.width,
                         target.sum_offset});
    }
    std::vector<Block> blocks;
    const int64_t ids = request->num_ids;
    const bool in_order = AreColumnsApart(own);
    const int64_t most = divisor > 0 ? max_width / divisor : 1;  // pieces of an id
    bool in_buckets = in_order && divisor > 0 && most <= kMaxPieces &&
                      PiecesArePaid(ids, ids * most) &&
                      own.num_sources <= INT64_C(0xffffffff) / most;
    for (int64_t b = 0; b < num_blocks; ++b) {
      blocks.push_back({nullptr, block_offsets[b], block_sizes[b]});
      in_buckets = in_buckets && (block_sizes[b] == 0 || block_offsets[b] % divisor == 0);
    }
    const int64_t pieces = in_buckets ? most : 1;
    if (in_buckets) min_width = max_width = divisor;
    const bool one_width = min_width == max_width;
    const int64_t slots = ids * pieces;
    Keys of;
    MONO_GPU_TRY(MakeKeys(out_size, min_width, &of));
    if (in_buckets) ChooseBuckets(slots, max_width, packed ? 4 : 1, &of);
    int64_t sort_bytes = 0;
    MONO_GPU_TRY(SortScratch<uint32_t>(slots, of.bits, &sort_bytes, of.shift));
    Workspace space;
    const auto block_slot = space.Put(blocks);
    const auto feature_slot = space.Put(own.features);
    const auto target_slot = space.Put(targets);
    const auto overlap = space.Put(std::vector<int32_t>{0});
    const auto unaligned = space.Put(std::vector<int32_t>{0});
    const auto any_long = space.Put(std::vector<int32_t>{0});
    const auto sums = space.Scratch<float>(own.sum_floats);
    const auto keys = space.Scratch<uint32_t>(slots);
    const auto sorted_keys = space.Scratch<uint32_t>(slots);
    const auto numbers = space.Scratch<uint32_t>(slots);
    const auto sorted_numbers = space.Scratch<uint32_t>(slots);
    const auto sources = space.Scratch<uint32_t>(ids);
    const auto sort_scratch = space.Scratch<char>(sort_bytes);
    const auto spans = space.Scratch<Span>(in_buckets ? NumBuckets(of) : 0);
    const auto partials = space.Scratch<float>(in_buckets ? BucketPartials(slots, max_width, of)
                                                          : RunPartials(slots, of, max_width));
    if (space.Measure(workspace, workspace_bytes)) return MONO_GPU_OK;
    MONO_GPU_TRY(space.Upload(stream));
    static_assert(kNothing == 0xffffffffu);
    MONO_GPU_TRY(
        FillBytes(stream, space.At(keys), 0xff, slots * static_cast<int64_t>(sizeof(uint32_t))));
    const IdList list{space.At(keys),     space.At(numbers), space.At(sources), pieces, of,
                      space.At(unaligned)};
    MONO_GPU_TRY(ListAllIds(stream, {*request, space.At(block_slot), num_blocks, 0, 0},
                            space.At(feature_slot), plan->num_features, space.bad(), list));
    MONO_GPU_TRY(SortPairs(stream, space.At(sort_scratch), sort_bytes, space.At(keys),
                           space.At(sorted_keys), space.At(numbers), space.At(sorted_numbers),
                           slots, of.bits, of.shift));
    MONO_GPU_TRY(
        ForEach(stream, own.sum_floats,
                SumShared{*request, space.At(target_slot), static_cast<int64_t>(targets.size()),
                          space.bad(), space.At(sums)}));
    const Runs runs{space.At(sorted_keys), space.At(sorted_numbers), slots, of};
    const IdGradientArguments arguments{*request,           space.At(block_slot),
                                        space.At(sources),  space.At(feature_slot),
                                        plan->num_features, one_position,
                                        any_mean,           space.At(target_slot),
                                        space.At(sums),     min_width,
                                        one_width,          pieces,
                                        space.At(unaligned)};
    const auto sum_buckets = [&](auto source) {
      using Source = decltype(source);
      const auto add = packed ? SumBuckets<4, Source> : SumBuckets<1, Source>;
      return add(stream, runs, source, max_width, space.bad(), space.At(unaligned), space.At(spans),
                 space.At(partials), space.At(any_long), out, out_size);
    };
    if (pieces > 1) return sum_buckets(IdGradients<true>{arguments});
    using Source = IdGradients<false>;
    if (in_buckets) return sum_buckets(Source{arguments});
    const auto scatter =
        in_order ? (packed ? ScatterSum<4, true, Source> : ScatterSum<1, true, Source>)
                 : (packed ? ScatterSum<4, false, Source> : ScatterSum<1, false, Source>);
    return scatter(stream, runs, Source{arguments}, max_width, space.bad(), space.At(overlap),
                   space.At(partials), space.At(any_long), out, out_size);
  });
}
