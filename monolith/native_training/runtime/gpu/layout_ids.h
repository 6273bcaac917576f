// The ids of a request, as a list that can be sorted by place: for the gradient.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_IDS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_IDS_H_

#include <algorithm>
#include <cstdint>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/launch.h"
#include "monolith/native_training/runtime/gpu/layout_request.h"
#include "monolith/native_training/runtime/gpu/place_keys.h"
#include "monolith/native_training/runtime/gpu/thread_block.h"

namespace monolith {
namespace gpu {
namespace layout {

// Ids that no slice takes are left out. A source is the number of a (feature, row, FIRSTN
// position), by feature first. Where embeddings have several widths, each id has room for all
// pieces of the widest (bucket_sum.h).
struct IdList {
  uint32_t* keys;  // kNothing on entry
  uint32_t* numbers;
  uint32_t* sources;  // of each id
  int64_t pieces;     // of an id, at most; 1: they are not cut
  Keys of;
  int32_t* unaligned;
};

// Checks a request, then lists its ids. A block has kRows batch rows of a feature; their ids lie
// one after the other, however many each has, and the lanes share them.
struct ListIds {
  EachItem<CheckRequest> check;
  MonoGpuLayoutRequest in;
  const Block* blocks;
  int64_t num_blocks;
  const Feature* features;
  int64_t lists_of_feature;
  int64_t lists;
  int32_t* bad;
  IdList list;

  static constexpr int64_t kMaxBlocks = int64_t{1} << 20;
  static constexpr int64_t kRows = 2 * kLanes;

  struct Memory {
    uint32_t begins[kRows + 1];  // where the ids of each row begin, and the last one's end
    int32_t wrong;
  };

  MONO_DEVICE void operator()(const ThreadBlock& block) const {
    const int64_t checks = (check.n + kLanes - 1) / kLanes;
    for (int64_t n = block.number; n < checks + lists; n += kMaxBlocks) {
      if (n < checks) {
        block.Each([&](int lane) { check(n, lane); });
        continue;
      }
      int64_t feature, nth;
      DivMod(n - checks, lists_of_feature, &feature, &nth);
      if (features[feature].num_targets > 0) List(block, feature, nth * kRows);
    }
  }

  // The rows of a feature from `first` on.
  MONO_DEVICE void List(const ThreadBlock& block, int64_t f, int64_t first) const {
    const FeatureRows rows = RowsOf(in, f);
    if (first >= rows.count || rows.first > in.num_rows) return;
    const int64_t left = rows.count - first, count = left < kRows ? left : kRows;
    Memory& memory = *block.At<Memory>(0);
    block.Each([&](int lane) {
      if (lane == 0) memory.wrong = *static_cast<const volatile int32_t*>(bad);
    });
    block.Each([&](int lane) {
      for (int64_t i = lane; i <= count; i += kLanes) {
        const int64_t row = rows.first + first + i, begin = RowBegin(in, row);
        memory.begins[i] = static_cast<uint32_t>(begin);
        // Also that rows do not go back and forth.
        if (begin < 0 || begin > in.num_ids || (i > 0 && begin < RowBegin(in, row - 1))) {
          memory.wrong = 1;
        }
      }
    });
    block.Each([&](int lane) {
      if (memory.wrong != 0) {
        MarkBad(bad);
        return;
      }
      const Feature feature = features[f];
      const uint32_t positions = static_cast<uint32_t>(feature.positions);
      const uint32_t source = static_cast<uint32_t>(feature.first_tile + first * positions);
      const int64_t pieces = list.pieces == 1 ? 1 : feature.width / list.of.min_width;
      const uint32_t end = memory.begins[count];
      if (end == memory.begins[0]) return;
      const float rows_of_id = static_cast<float>(count) / (end - memory.begins[0]);
      for (uint32_t i = memory.begins[0] + lane; i < end; i += kIdsAtOnce * kLanes) {
        uint64_t ids[kIdsAtOnce];
        MONO_UNROLL
        for (int k = 0; k < kIdsAtOnce; ++k) {
          ids[k] = in.ids[i + k * kLanes < end ? i + k * kLanes : i];
        }
        MONO_UNROLL
        for (int k = 0; k < kIdsAtOnce; ++k) {
          const uint32_t number = i + k * kLanes;
          if (number >= end) continue;
          const int64_t place = PlaceOf(ids[k], feature.width);
          if (place < 0) {
            MarkBad(bad);
            continue;
          }
          const uint32_t row =
              RowOf(memory.begins, static_cast<uint32_t>(count), number, rows_of_id);
          const uint32_t nth = number - memory.begins[row];
          if (feature.first_n && nth >= positions) continue;
          list.sources[number] = source + row * positions + (feature.first_n ? nth : 0);
          List(number, list.of.Of(place, list.unaligned), pieces);
        }
      }
    });
  }

  // The last of the rows that begin at an id or before it. Where all have as many ids, often
  // one each, the first look finds it.
  MONO_DEVICE static uint32_t RowOf(const uint32_t* begins, uint32_t count, uint32_t id,
                                    float rows_of_id) {
    uint32_t low = 0, high = count;
    const uint32_t guess = static_cast<uint32_t>((id - begins[0] + 0.5f) * rows_of_id);
    if (guess < count) {
      if (begins[guess] > id) {
        high = guess;
      } else if (begins[guess + 1] > id) {
        return guess;
      } else {
        low = guess;
      }
    }
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      if (begins[middle] <= id) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Negative: it is no place of the embeddings.
  MONO_DEVICE int64_t PlaceOf(uint64_t id, int64_t width) const {
    const int64_t number = static_cast<int64_t>(id >> 32);
    const int64_t position = static_cast<int64_t>(id & 0xffffffffu);
    if (number >= num_blocks) return -1;
    const Block block = blocks[number];
    return position > block.size - width ? -1 : block.offset + position;
  }

  MONO_DEVICE void List(uint32_t number, uint32_t key, int64_t pieces) const {
    if (list.pieces == 1) {
      list.keys[number] = key;
      list.numbers[number] = number;
      return;
    }
    const int64_t first = number * list.pieces;
    for (int64_t n = 0; n < pieces; ++n) {
      list.keys[first + n] = key + static_cast<uint32_t>(n);
      list.numbers[first + n] = static_cast<uint32_t>(first + n);
    }
  }
};

// `features`, and all that `request` and `list` point to, are on the device.
inline int ListAllIds(Stream stream, const Request& request, const Feature* features,
                      int64_t num_features, int32_t* bad, const IdList& list) {
  const int64_t checks = request.in.num_rows + request.in.num_starts;
  const int64_t lists_of_feature = CeilDiv(request.in.batch_size, ListIds::kRows);
  const int64_t lists = num_features * lists_of_feature;
  const ListIds program{{checks, CheckRequest{nullptr, 1, request, features, num_features, bad}},
                        request.in,
                        request.blocks,
                        request.num_blocks,
                        features,
                        lists_of_feature,
                        lists,
                        bad,
                        list};
  return ForBlocks(stream, std::min(CeilDiv(checks, int64_t{kLanes}) + lists, ListIds::kMaxBlocks),
                   int64_t{sizeof(ListIds::Memory)}, program);
}

}  // namespace layout
}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_LAYOUT_IDS_H_
