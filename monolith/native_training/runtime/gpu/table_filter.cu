// Admission of absent ids.
#include "monolith/native_training/runtime/gpu/table_batches.h"
#include "monolith/native_training/runtime/hash_filter/probabilistic_filter.h"

namespace monolith {
namespace gpu {
namespace {

struct DrawWords {
  WriteArguments a;
  ChanceFilter chance;
  uint32_t* skips;  // null: the occurrences of an id are one

  MONO_DEVICE bool GetsIn(uint64_t draws, uint32_t threshold, uint32_t count,
                          uint32_t occurrence) const {
    const uint64_t bits =
        engine::SplitMix64(draws + (uint64_t{occurrence} + 1) * engine::kGoldenRatio64);
    return engine::UniformDouble(bits) <
           engine::InsertProbability(chance.equal_probability, threshold, count);
  }

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const uint32_t bits = a.absent[word];
    if (bits == 0) return;
    PerId<bool> stays;
    uint64_t dropped = 0;
    for (int k = 0; k < kIdsPerLane; ++k) {
      const int j = OwnId(lane, k);
      stays.own[k] = (bits >> j & 1) != 0;
      if (!stays.own[k]) continue;
      const int64_t i = word * kWordIds + j;
      const int64_t id = a.batch.ids[i];
      const uint32_t threshold = chance.thresholds == nullptr
                                     ? chance.default_threshold
                                     : chance.thresholds[engine::SlotOfV2(id)];
      const uint64_t draws =
          engine::ValueStream(chance.seed ^ engine::SplitMix64(chance.batch + 1), id);
      const uint32_t occurrences =
          a.batch.starts == nullptr ? 1 : a.batch.starts[i + 1] - a.batch.starts[i];
      if (skips == nullptr) {
        stays.own[k] = GetsIn(draws, threshold, occurrences, 0);
        dropped += stays.own[k] ? 0 : 1;
        continue;
      }
      uint32_t skipped = 0;
      while (skipped < occurrences && !GetsIn(draws, threshold, 1, skipped)) ++skipped;
      skips[i] = skipped;
      stays.own[k] = skipped < occurrences;
      dropped += skipped;
    }
    const uint32_t left = WordOf(stays);
    if (lane == 0) a.absent[word] = left;
    if (dropped != 0) AtomicAdd(&a.index.state->filtered, dropped);
  }
};

}  // namespace

int GpuTable::EnsureSkips(Stream stream, int64_t n) {
  if (skips_.bytes() >= n * 4) return MONO_GPU_OK;
  skips_.Free(stream);
  return skips_.Allocate(stream, n * 4, "the filtered ids of a batch");
}

int GpuTable::DrawAbsent(Stream stream, const ChanceFilter& chance, WriteTask* task) {
  Batch& batch = task->arguments.batch;
  const bool in_steps = batch.starts != nullptr && !batch.sum;
  if (in_steps) MONO_GPU_TRY(EnsureSkips(stream, batch.n));
  MONO_GPU_TRY(
      ForWarps(stream, CeilDiv(batch.n, kWordIds), kAllBlocks,
               DrawWords{task->arguments, chance, in_steps ? skips_.As<uint32_t>() : nullptr}));
  if (in_steps) batch.skips = skips_.As<uint32_t>();
  return MONO_GPU_OK;
}

// The filter is the engine's, on the host: the absent ids go there, what it lets in comes back. An
// id of which every occurrence is a step is offered until it gets in; the steps before are left
// out.
int GpuTable::AskFilter(Stream stream, const Job& job, Batch* batch) {
  int64_t n = batch->n;
  if (batch->count != nullptr) {
    uint32_t count = 0;
    MONO_GPU_TRY(CopyToHost(stream, batch->count, &count, sizeof(count)));
    n = count;
  }
  const int64_t words = CeilDiv(n, kWordIds);
  std::vector<uint32_t> absent(words), starts, skips;
  std::vector<int64_t> ids(n);
  MONO_GPU_TRY(CopyToHost(stream, absent_.As<uint32_t>(), absent.data(), words * 4));
  MONO_GPU_TRY(CopyToHost(stream, batch->ids, ids.data(), n * 8));
  if (batch->starts != nullptr) {
    starts.resize(n + 1);
    MONO_GPU_TRY(CopyToHost(stream, batch->starts, starts.data(), (n + 1) * 4));
  }
  const bool in_steps = batch->starts != nullptr && !batch->sum;
  if (in_steps) skips.assign(n, 0);
  const auto occurrences = [&starts](int64_t i) {
    return starts.empty() ? 1u : starts[i + 1] - starts[i];
  };
  std::vector<int64_t> places, asked;
  std::vector<uint32_t> counts;
  std::vector<uint8_t> dropped;
  for (int64_t i = 0; i < n; ++i) {
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
    MONO_GPU_TRY(EnsureSkips(stream, batch->n));
    MONO_GPU_TRY(CopyToDevice(stream, skips.data(), skips_.As<uint32_t>(), n * 4));
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
