// Admission of absent ids.
#include "monolith/native_training/runtime/gpu/table_batches.h"

namespace monolith {
namespace gpu {

// The filter is the engine's, on the host: the absent ids go there, what it lets in comes back. An
// id of which every occurrence is a step is offered until it gets in; the steps before are left
// out.
int GpuTable::AskFilter(Stream stream, const Job& job, Batch* batch) {
  const int64_t words = CeilDiv(batch->n, kWordIds);
  std::vector<uint32_t> absent(words), starts, skips;
  std::vector<int64_t> ids(batch->n);
  MONO_GPU_TRY(CopyToHost(stream, absent_.As<uint32_t>(), absent.data(), words * 4));
  MONO_GPU_TRY(CopyToHost(stream, batch->ids, ids.data(), batch->n * 8));
  if (batch->starts != nullptr) {
    starts.resize(batch->n + 1);
    MONO_GPU_TRY(CopyToHost(stream, batch->starts, starts.data(), (batch->n + 1) * 4));
  }
  const bool in_steps = batch->starts != nullptr && !batch->sum;
  if (in_steps) skips.assign(batch->n, 0);
  const auto occurrences = [&starts](int64_t i) {
    return starts.empty() ? 1u : starts[i + 1] - starts[i];
  };
  std::vector<int64_t> places, asked;
  std::vector<uint32_t> counts;
  std::vector<uint8_t> dropped;
  for (int64_t i = 0; i < batch->n; ++i) {
    if (absent[i / kWordIds] >> (i % kWordIds) & 1) places.push_back(i);
  }
  uint64_t filtered = 0;
  while (!places.empty()) {
    asked.clear();
    counts.clear();
    for (const int64_t i : places) {
      asked.push_back(ids[i]);
      counts.push_back(in_steps ? 1 : occurrences(i));
    }
    dropped.assign(asked.size(), 0);
    job.filter->Filter(asked.data(), counts.data(), static_cast<int64_t>(asked.size()), true,
                       dropped.data());
    size_t kept = 0;
    for (size_t k = 0; k < dropped.size(); ++k) {
      if (dropped[k] == 0) continue;
      const int64_t i = places[k];
      ++filtered;
      if (in_steps && ++skips[i] < occurrences(i)) {
        places[kept++] = i;
      } else {
        absent[i / kWordIds] &= ~(1u << (i % kWordIds));
      }
    }
    places.resize(kept);
  }
  if (filtered == 0) return MONO_GPU_OK;
  MONO_GPU_TRY(CopyToDevice(stream, absent.data(), absent_.As<uint32_t>(), words * 4));
  if (in_steps) {
    if (skips_.bytes() < batch->n * 4) {
      skips_.Free(stream);
      MONO_GPU_TRY(skips_.Allocate(stream, batch->n * 4, "the filtered ids of a batch"));
    }
    MONO_GPU_TRY(CopyToDevice(stream, skips.data(), skips_.As<uint32_t>(), batch->n * 4));
    batch->skips = skips_.As<uint32_t>();
  }
  TableState* const state = state_.As<TableState>();
  uint64_t before = 0;
  MONO_GPU_TRY(CopyToHost(stream, &state->filtered, &before, 8));
  before += filtered;
  return CopyToDevice(stream, &before, &state->filtered, 8);
}

}  // namespace gpu
}  // namespace monolith
