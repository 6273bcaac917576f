// What the host does for GPU tables: order of streams, writes, what it knows of the device.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "monolith/native_training/runtime/gpu/gpu_table.h"
#include "monolith/native_training/runtime/gpu/sort.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int kRing = 8;
constexpr int64_t kMaxBatch = int64_t{1} << 30;

int FromStatus(const engine::Status& status) {
  if (status.ok()) return MONO_GPU_OK;
  const int code = status.code == engine::StatusCode::kResourceExhausted ? MONO_GPU_OUT_OF_MEMORY
                   : status.code == engine::StatusCode::kUnimplemented   ? MONO_GPU_UNIMPLEMENTED
                                                                       : MONO_GPU_INVALID_ARGUMENT;
  return Fail(code, status.message);
}

uint64_t ChooseSeed(uint64_t configured) {
  if (configured != 0) return configured;
  const char* const text = std::getenv("MONOLITH_TABLE_SEED");
  if (text != nullptr && text[0] != '\0') return std::strtoull(text, nullptr, 10);
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

uint32_t ClampTime(int64_t seconds) {
  return static_cast<uint32_t>(
      std::min<int64_t>(std::max<int64_t>(seconds, 0), std::numeric_limits<uint32_t>::max()));
}

// Rows up to 16 bytes lie in one access, larger ones start at a sector of 32 bytes.
int64_t StrideOf(int64_t row_bytes) {
  for (const int64_t size : {4, 8, 16}) {
    if (row_bytes <= size) return size;
  }
  return CeilDiv(row_bytes, 32) * 32;
}

constexpr uint32_t kNoPosition = 0xffffffffu;

MONO_DEVICE uint32_t CompareAndSwap(uint32_t* word, uint32_t before, uint32_t after) {
#if defined(__CUDACC__)
  return atomicCAS(word, before, after);
#else
  const uint32_t seen = *word;
  if (seen == before) *word = after;
  return seen;
#endif
}

MONO_DEVICE void LowerTo(uint32_t* word, uint32_t value) {
#if defined(__CUDACC__)
  atomicMin(word, value);
#else
  if (value < *word) *word = value;
#endif
}

// Gives equal ids one place in a hash table of positions, which keeps the first of them.
struct ClaimPlace {
  engine::IdHash hash;
  const int64_t* ids;
  uint32_t* places;
  uint32_t mask;
  uint32_t* place_of;

  MONO_DEVICE void operator()(int64_t i) const {
    const int64_t id = ids[i];
    const uint32_t position = static_cast<uint32_t>(i);
    for (uint32_t place = static_cast<uint32_t>(hash(id)) & mask;; place = (place + 1) & mask) {
      uint32_t seen = places[place];
      if (seen == kNoPosition) seen = CompareAndSwap(places + place, kNoPosition, position);
      if (seen == kNoPosition || ids[seen] == id) {
        LowerTo(places + place, position);
        place_of[i] = place;
        return;
      }
    }
  }
};

// Numbers positions, each with the first one of its id.
struct TakeGroups {
  const uint32_t* places;
  uint32_t* firsts;  // in: the place of every position
  uint32_t* numbers;

  MONO_DEVICE void operator()(int64_t i) const {
    firsts[i] = places[firsts[i]];
    numbers[i] = static_cast<uint32_t>(i);
  }
};

// Marks the first of equal neighbours.
struct MarkFirst {
  const uint32_t* sorted;
  int64_t n;
  uint32_t* words;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    PerId<bool> first;
    for (int k = 0; k < kIdsPerLane; ++k) {
      const int64_t i = word * kWordIds + OwnId(lane, k);
      first.own[k] = i < n && (i == 0 || sorted[i] != sorted[i - 1]);
    }
    const uint32_t bits = WordOf(first);
    if (lane == 0) words[word] = bits;
  }
};

// Distinct ids and where their occurrences start.
struct TakeFirst {
  const int64_t* ids;
  const uint32_t* sorted;
  int64_t n;
  const uint32_t* words;
  const uint32_t* prefix;
  int64_t* distinct;
  uint32_t* starts;
  const uint32_t* total;

  MONO_DEVICE void operator()(int64_t i) const {
    const uint32_t bits = words[i / kWordIds];
    const int j = static_cast<int>(i % kWordIds);
    if (i == 0) starts[*total] = static_cast<uint32_t>(n);
    if ((bits >> j & 1) == 0) return;
    uint32_t rank = prefix[i / kWordIds];
    for (int k = 0; k < j; ++k) rank += bits >> k & 1;
    distinct[rank] = ids[sorted[i]];
    starts[rank] = static_cast<uint32_t>(i);
  }
};

// Sums the rows of equal ids in the order of the batch.
struct SumRows {
  Batch batch;
  const float* rows;
  int dim;
  float* sums;

  MONO_DEVICE void operator()(int64_t item) const {
    const int64_t i = item / dim;
    const int column = static_cast<int>(item % dim);
    if (i >= static_cast<int64_t>(*batch.count)) return;
    float sum = 0;
    for (uint32_t k = batch.starts[i]; k < batch.starts[i + 1]; ++k) {
      const float value = rows[static_cast<int64_t>(batch.order[k]) * dim + column];
      sum = k == batch.starts[i] ? value : sum + value;
    }
    sums[item] = sum;
  }
};

}  // namespace

// -- Order of streams.

struct GpuTable::Events {
#if defined(__CUDACC__)
  struct Reader {
    Stream stream;
    cudaEvent_t event;
    bool pending;
  };
  cudaEvent_t write = nullptr;
  Stream write_stream = nullptr;
  bool written = false;
  // The default stream is there as long as the process: its events are recorded when another stream
  // asks, which spares those who have no other all of them.
  bool write_recorded = false;
  std::vector<Reader> readers;
  cudaEvent_t ring[kRing] = {};

  ~Events() {
    if (write != nullptr) cudaEventDestroy(write);
    for (const Reader& reader : readers) cudaEventDestroy(reader.event);
    for (cudaEvent_t event : ring) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
#endif
};

namespace {

#if defined(__CUDACC__)
// Calls may come from threads that have another device.
int UseDevice(int device) {
  int current = -1;
  MONO_GPU_TRY(CheckCuda(cudaGetDevice(&current), "current device"));
  return current == device ? MONO_GPU_OK : CheckCuda(cudaSetDevice(device), "setting the device");
}
#endif

}  // namespace

int GpuTable::BeginRead(Stream stream) {
#if defined(__CUDACC__)
  MONO_GPU_TRY(UseDevice(device_));
  if (events_->written && events_->write_stream != stream) {
    if (!events_->write_recorded) {
      MONO_GPU_TRY(CheckCuda(cudaEventRecord(events_->write, nullptr), "recording an event"));
      events_->write_recorded = true;
    }
    return CheckCuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), events_->write, 0),
                     "waiting for a write");
  }
#endif
  (void)stream;
  return MONO_GPU_OK;
}

int GpuTable::EndRead(Stream stream) {
#if defined(__CUDACC__)
  Events::Reader* mine = nullptr;
  for (Events::Reader& reader : events_->readers) {
    if (reader.stream == stream) mine = &reader;
  }
  if (mine == nullptr) {
    Events::Reader reader = {stream, nullptr, false};
    MONO_GPU_TRY(
        CheckCuda(cudaEventCreateWithFlags(&reader.event, cudaEventDisableTiming), "an event"));
    events_->readers.push_back(reader);
    mine = &events_->readers.back();
  }
  mine->pending = true;
  if (stream == nullptr) return MONO_GPU_OK;
  return CheckCuda(cudaEventRecord(mine->event, static_cast<cudaStream_t>(stream)),
                   "recording an event");
#else
  (void)stream;
  return MONO_GPU_OK;
#endif
}

int GpuTable::BeginWrite(Stream stream) {
#if defined(__CUDACC__)
  MONO_GPU_TRY(BeginRead(stream));
  for (Events::Reader& reader : events_->readers) {
    if (reader.pending && reader.stream != stream) {
      if (reader.stream == nullptr) {
        MONO_GPU_TRY(CheckCuda(cudaEventRecord(reader.event, nullptr), "recording an event"));
      }
      MONO_GPU_TRY(
          CheckCuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), reader.event, 0),
                    "waiting for a lookup"));
    }
    reader.pending = false;
  }
#else
  (void)stream;
#endif
  return MONO_GPU_OK;
}

int GpuTable::EndWrite(Stream stream) {
#if defined(__CUDACC__)
  events_->written = true;
  events_->write_stream = stream;
  events_->write_recorded = stream != nullptr;
  if (stream == nullptr) return MONO_GPU_OK;
  return CheckCuda(cudaEventRecord(events_->write, static_cast<cudaStream_t>(stream)),
                   "recording an event");
#else
  (void)stream;
  return MONO_GPU_OK;
#endif
}

// -- Creation.

GpuTable::GpuTable(const engine::TableConfig& config, engine::RowLayout layout,
                   engine::ExpiryPolicy expiry, uint64_t seed)
    : config_(config),
      layout_(std::move(layout)),
      expiry_(std::move(expiry)),
      codec_(layout_),
      seed_(seed),
      stride_(StrideOf(layout_.row_bytes)),
      events_(std::make_unique<Events>()) {}

GpuTable::~GpuTable() {
#if defined(__CUDACC__)
  if (UseDevice(device_) == MONO_GPU_OK) cudaDeviceSynchronize();
#endif
}

int GpuTable::Create(const engine::TableConfig& config, std::unique_ptr<GpuTable>* table) {
  engine::RowLayout layout;
  MONO_GPU_TRY(FromStatus(engine::CompileRowLayout(config, &layout)));
  if (layout.serving()) {
    return Fail(MONO_GPU_UNIMPLEMENTED,
                "a GPU table has TRAINING entries; SERVING tables are for the CPU");
  }
  if (layout.num_segments() > kMaxSegments) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "the entry has " + std::to_string(layout.num_segments()) +
                    " segments, a GPU table has at most " + std::to_string(kMaxSegments));
  }
  engine::ExpiryPolicy expiry;
  MONO_GPU_TRY(FromStatus(engine::ExpiryPolicy::Create(config.expiry, &expiry)));
  std::unique_ptr<GpuTable> result(
      new GpuTable(config, std::move(layout), std::move(expiry), ChooseSeed(config.seed)));
  MONO_GPU_TRY(result->Initialize());
  if (config.initial_capacity > 1) MONO_GPU_TRY(result->Reserve(nullptr, config.initial_capacity));
  *table = std::move(result);
  return MONO_GPU_OK;
}

int GpuTable::Initialize() {
#if defined(__CUDACC__)
  int32_t devices = 0;
  if (mono_gpu_device_count(&devices) != MONO_GPU_OK || devices == 0) {
    return Fail(MONO_GPU_FAILED_PRECONDITION, std::string("no CUDA device for a GPU table (") +
                                                  mono_gpu_last_error() +
                                                  "); use CuckooHashTableConfig");
  }
  MONO_GPU_TRY(CheckCuda(cudaGetDevice(&device_), "current device"));
  MONO_GPU_TRY(
      CheckCuda(cudaEventCreateWithFlags(&events_->write, cudaEventDisableTiming), "an event"));
  for (cudaEvent_t& event : events_->ring) {
    MONO_GPU_TRY(CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
  }
#endif
  int64_t budget = 0;
  MONO_GPU_TRY(TableBudget(&budget));
  const int64_t most = static_cast<int64_t>(kErasedRow) * stride_;
  MONO_GPU_TRY(arena_.Reserve(std::max(std::min(budget, most), int64_t{2} << 20)));
  MONO_GPU_TRY(published_.Allocate(kRing * static_cast<int64_t>(sizeof(TableState))));
  MONO_GPU_TRY(state_.Allocate(nullptr, sizeof(TableState), "the counters of a table"));
  MONO_GPU_TRY(FillBytes(nullptr, state_.As<char>(), 0, sizeof(TableState)));
  MONO_GPU_TRY(spill_.Allocate(nullptr, int64_t{1} << 14, "the spill list of a table"));
  MONO_GPU_TRY(shard_views_.Allocate(nullptr, kTableShards * sizeof(ShardView), "a directory"));
  return Clear(nullptr);
}

int GpuTable::Clear(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(BeginWrite(stream));
  MONO_GPU_TRY(ReadState(stream));
  // What must be there first: rows, and lines for every shard.
  MONO_GPU_TRY(arena_.Grow(std::max<int64_t>(stride_, 1)));
  DeviceBuffer fresh[kTableShards];
  const uint32_t lines = 2;
  const int64_t bytes = int64_t{lines} * kSlotsPerLine * static_cast<int64_t>(sizeof(TableSlot));
  for (DeviceBuffer& slots : fresh) {
    MONO_GPU_TRY(slots.Allocate(stream, bytes, "the index of a table"));
    MONO_GPU_TRY(FillBytes(stream, slots.As<char>(), 0, bytes));
  }
  for (int s = 0; s < kTableShards; ++s) {
    shards_[s].slots.Swap(&fresh[s]);
    shards_[s].lines = lines;
    fresh[s].Free(stream);
  }
  MONO_GPU_TRY(FillBytes(stream, arena_.base(), 0, stride_));
  TableState empty = {};
  empty.next_row = 1;
  empty.filtered = known_.filtered;
  empty.nonfinite = known_.nonfinite;
  known_ = empty;
  MONO_GPU_TRY(CopyToDevice(stream, &known_, state_.As<char>(), sizeof(known_)));
  MONO_GPU_TRY(PublishShards(stream, 0));
  return EndWrite(stream);
}

IndexView GpuTable::View() const {
  return {engine::TableHash(), shard_views_.As<ShardView>(), spill_.As<TableSlot>(),
          static_cast<uint64_t>(spill_.bytes()) / sizeof(TableSlot), state_.As<TableState>()};
}

RowPlan GpuTable::PlanFor(RowMode mode) const {
  RowPlan plan = {};
  plan.num_segments = static_cast<int32_t>(layout_.num_segments());
  plan.dim = static_cast<int32_t>(layout_.dim);
  plan.row_floats = static_cast<int32_t>(layout_.row_bytes / 4);
  plan.mode = mode;
  plan.seed = seed_;
  plan.global_step = last_global_step_;
  for (int s = 0; s < plan.num_segments; ++s) {
    const engine::Segment& from = layout_.segments[s];
    const engine::OptimizerConfig& o = from.optimizer;
    SegmentPlan& to = plan.segments[s];
    to.dim = static_cast<int32_t>(from.dim);
    to.value_begin = static_cast<int32_t>(from.value_begin);
    to.state_begin = static_cast<int32_t>(from.state_offset / 4);
    to.optimizer = o.kind;
    to.initializer = from.initializer.kind;
    to.retriever = from.retriever;
    const bool decoupled =
        o.kind == engine::OptimizerKind::kDynamicWdAdagrad && o.decouple_weight_decay;
    to.flags = (o.use_nesterov ? SegmentPlan::kNesterov : 0) |
               (decoupled ? SegmentPlan::kDecoupled : 0) |
               (o.stochastic_rounding_float16 ? SegmentPlan::kRounded : 0);
    const bool constant = from.initializer.kind == engine::InitializerKind::kConstants;
    to.initial_low = constant ? from.initializer.constant : from.initializer.minval;
    to.initial_high = from.initializer.maxval;
    to.weight_decay = o.weight_decay;
    to.beta = o.beta;
    to.l1 = o.l1;
    to.l2 = o.l2;
    to.rho = o.averaging_ratio;
    to.epsilon = o.epsilon;
    to.beta1 = o.beta1;
    to.beta2 = o.beta2;
    to.momentum = o.momentum;
    to.amplitude = from.compressor.amplitude;
    to.retriever_scale = from.retriever == engine::RetrieverKind::kHashNet
                             ? engine::HashNetScale(from.compressor, last_global_step_)
                             : from.compressor.range;
    to.num_fields = static_cast<int32_t>(from.state.size());
    for (int f = 0; f < to.num_fields; ++f) {
      const engine::StateField& field = from.state[f];
      to.fields[f] = {static_cast<int32_t>(field.offset / 4),
                      static_cast<int32_t>(field.count * (field.is_int64 ? 2 : 1)), field.initial};
    }
  }
  return plan;
}

// -- What the host knows.

// Where the write under way puts the state.
int GpuTable::NextPublished(TableState** host) {
  if (static_cast<int>(in_flight_.size()) == kRing) MONO_GPU_TRY(Poll(true));
  *host = published_.As<TableState>() + next_slot_;
  return MONO_GPU_OK;
}

int GpuTable::NoteInFlight(Stream stream, int64_t n) {
#if defined(__CUDACC__)
  MONO_GPU_TRY(CheckCuda(
      cudaEventRecord(events_->ring[next_slot_], static_cast<cudaStream_t>(stream)), "an event"));
#else
  (void)stream;
#endif
  in_flight_.push_back({n, next_slot_});
  in_flight_ids_ += n;
  next_slot_ = (next_slot_ + 1) % kRing;
  return MONO_GPU_OK;
}

// Takes in what writes have left; all of them if it shall wait.
int GpuTable::Poll(bool wait) {
  while (!in_flight_.empty()) {
    const InFlight& oldest = in_flight_.front();
#if defined(__CUDACC__)
    cudaEvent_t event = events_->ring[oldest.slot];
    const cudaError_t state = wait ? cudaEventSynchronize(event) : cudaEventQuery(event);
    if (state == cudaErrorNotReady) return MONO_GPU_OK;
    MONO_GPU_TRY(CheckCuda(state, "a write"));
#else
    (void)wait;
#endif
    known_ = published_.As<TableState>()[oldest.slot];
    in_flight_ids_ -= oldest.n;
    in_flight_.pop_front();
    MONO_GPU_TRY(CheckNothingLost());
  }
  return MONO_GPU_OK;
}

// The state as it is after all calls so far.
int GpuTable::ReadState(Stream stream) {
  MONO_GPU_TRY(Poll(true));
  MONO_GPU_TRY(CopyToHost(stream, state_.As<TableState>(), &known_, sizeof(known_)));
  return CheckNothingLost();
}

int GpuTable::CheckNothingLost() const {
  if (known_.lost == 0) return MONO_GPU_OK;
  return Fail(MONO_GPU_CUDA_ERROR, "the index of a GPU table lost " + std::to_string(known_.lost) +
                                       " keys: this is a mistake in Monolith");
}

int GpuTable::Size(int64_t* size) {
  GpuTableStats stats;
  MONO_GPU_TRY(Stats(&stats));
  *size = stats.size;
  return MONO_GPU_OK;
}

int GpuTable::Stats(GpuTableStats* stats) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stream stream = nullptr;
#if defined(__CUDACC__)
  stream = events_->write_stream;
#endif
  MONO_GPU_TRY(BeginRead(stream));
  MONO_GPU_TRY(ReadState(stream));
  *stats = {};
  for (int s = 0; s < kTableShards; ++s) {
    stats->size += known_.live[s];
    stats->index_bytes += shards_[s].slots.bytes();
    stats->slots += shards_[s].num_slots();
  }
  stats->row_bytes = arena_.bytes();
  stats->other_bytes = free_stack_.bytes() + spill_.bytes() + absent_.bytes() + prefix_.bytes() +
                       sums_.bytes() + sorting_.bytes();
  stats->free_rows = static_cast<int64_t>(known_.free_rows) + mapped_rows() -
                     static_cast<int64_t>(known_.next_row);
  stats->spilled = static_cast<int64_t>(known_.spilled);
  stats->nonfinite_gradients = static_cast<int64_t>(known_.nonfinite);
  stats->filtered = static_cast<int64_t>(known_.filtered);
  stats->expired = expired_;
  stats->max_update_ts = max_update_ts_;
  stats->rebuilds = rebuilds_;
  stats->waits = waits_;
  return MONO_GPU_OK;
}

// -- Writes.

struct GpuTable::Job {
  RowPlan plan;
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* source = nullptr;
  int64_t source_floats = 0;
  uint32_t ts = 0;
  const uint32_t* load_ts = nullptr;
  int32_t* existed = nullptr;
  Duplicates duplicates = Duplicates::kNone;
  engine::OccurrenceFilter* filter = nullptr;
};

int GpuTable::Write(Stream stream, const Job& job) {
  if (job.n < 0 || job.n > kMaxBatch) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(job.n) +
                                               ", want 0 to " + std::to_string(kMaxBatch));
  }
  if (job.n == 0) return MONO_GPU_OK;
  MONO_GPU_TRY(BeginWrite(stream));
  MONO_GPU_TRY(EnsureScratch(stream, job.n));
  Batch batch;
  batch.ids = job.ids;
  batch.n = job.n;
  if (job.duplicates == Duplicates::kNone) return WriteDistinct(stream, job, batch);
  MONO_GPU_TRY(FindDuplicates(stream, job.ids, job.n, &batch));
  if (job.duplicates == Duplicates::kSteps) return WriteDistinct(stream, job, batch);
  const int64_t bytes = job.n * layout_.dim * 4;
  if (sums_.bytes() < bytes) {
    sums_.Free(stream);
    MONO_GPU_TRY(sums_.Allocate(stream, bytes, "the gradients of a batch"));
  }
  MONO_GPU_TRY(
      ForEach(stream, job.n * layout_.dim,
              SumRows{batch, job.source, static_cast<int>(layout_.dim), sums_.As<float>()}));
  Job summed = job;
  summed.source = sums_.As<float>();
  batch.starts = nullptr;
  batch.order = nullptr;
  return WriteDistinct(stream, summed, batch);
}

int GpuTable::WriteDistinct(Stream stream, const Job& job, const Batch& batch) {
  MONO_GPU_TRY(MakeRoom(stream, batch));
  WriteArguments arguments = {View(),
                              arena_.base(),
                              stride_,
                              batch,
                              job.source,
                              job.source_floats,
                              job.ts,
                              job.load_ts,
                              job.existed,
                              absent_.As<uint32_t>(),
                              prefix_.As<uint32_t>(),
                              free_stack_.As<uint32_t>()};
  MONO_GPU_TRY(LaunchUpdate(stream, arguments, job.plan));
  if (job.filter != nullptr) MONO_GPU_TRY(AskFilter(stream, job, &arguments.batch));
  TableState* host = nullptr;
  MONO_GPU_TRY(NextPublished(&host));
  MONO_GPU_TRY(LaunchInsert(stream, arguments, job.plan, host));
  MONO_GPU_TRY(NoteInFlight(stream, batch.n));
  return EndWrite(stream);
}

// Finds the first position of every id, then sorts (first position, position): equal ids become
// neighbours, their positions stay in order, and ids in the order in which they first came. Sorting
// by the few bits of positions takes a third of what sorting by ids takes.
int GpuTable::FindDuplicates(Stream stream, const int64_t* ids, int64_t n, Batch* batch) {
  const int bits = BitsOf(static_cast<uint64_t>(n - 1));
  int64_t scratch = 0;
  MONO_GPU_TRY(SortScratch<uint32_t>(n, bits, &scratch));
  const int64_t words = CeilDiv(n, kWordIds);
  const int64_t places = int64_t{1} << (bits + 1);
  int64_t bytes = 0;
  const auto part = [&bytes](int64_t size) {
    const int64_t begin = bytes;
    bytes += CeilDiv(std::max<int64_t>(size, 1), 256) * 256;
    return begin;
  };
  const int64_t distinct_at = part(n * 8), places_at = part(places * 4), firsts_at = part(n * 4),
                numbers_at = part(n * 4), sorted_at = part(n * 4), order_at = part(n * 4),
                starts_at = part((n + 1) * 4), words_at = part(words * 4),
                prefix_at = part(words * 4), total_at = part(4), scratch_at = part(scratch);
  if (sorting_.bytes() < bytes) {
    sorting_.Free(stream);
    MONO_GPU_TRY(sorting_.Allocate(stream, bytes, "finding the duplicates of a batch"));
  }
  char* const base = sorting_.As<char>();
  const auto at = [base](int64_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
  const auto distinct = reinterpret_cast<int64_t*>(base + distinct_at);
  MONO_GPU_TRY(FillBytes(stream, at(places_at), 0xff, places * 4));
  MONO_GPU_TRY(ForEach(stream, n,
                       ClaimPlace{engine::TableHash(), ids, at(places_at),
                                  static_cast<uint32_t>(places - 1), at(firsts_at)}));
  MONO_GPU_TRY(ForEach(stream, n, TakeGroups{at(places_at), at(firsts_at), at(numbers_at)}));
  MONO_GPU_TRY(SortPairs<uint32_t>(stream, base + scratch_at, scratch, at(firsts_at), at(sorted_at),
                                   at(numbers_at), at(order_at), n, bits));
  MONO_GPU_TRY(ForWarps(stream, words, kAllBlocks, MarkFirst{at(sorted_at), n, at(words_at)}));
  MONO_GPU_TRY(ScanBits(stream, at(words_at), words, at(prefix_at), at(total_at)));
  MONO_GPU_TRY(ForEach(stream, n,
                       TakeFirst{ids, at(sorted_at), n, at(words_at), at(prefix_at), distinct,
                                 at(starts_at), at(total_at)}));
  batch->ids = distinct;
  batch->count = at(total_at);
  batch->starts = at(starts_at);
  batch->all_starts = at(starts_at);
  batch->order = at(order_at);
  return MONO_GPU_OK;
}

// The filter is the engine's, on the host: the absent ids go there, what it lets in comes back. An
// id of which every occurrence is a step is offered until it gets in; the steps before are left
// out.
int GpuTable::AskFilter(Stream stream, const Job& job, Batch* batch) {
  const int64_t words = CeilDiv(batch->n, kWordIds);
  std::vector<uint32_t> absent(words), starts, skips;
  std::vector<int64_t> ids(batch->n);
  MONO_GPU_TRY(CopyToHost(stream, absent_.As<uint32_t>(), absent.data(), words * 4));
  MONO_GPU_TRY(CopyToHost(stream, batch->ids, ids.data(), batch->n * 8));
  if (batch->all_starts != nullptr) {
    starts.resize(batch->n + 1);
    MONO_GPU_TRY(CopyToHost(stream, batch->all_starts, starts.data(), (batch->n + 1) * 4));
  }
  const bool in_steps = batch->starts != nullptr;
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

int GpuTable::Assign(Stream stream, const int64_t* ids, int64_t n, const float* values,
                     const GpuWriteOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  Job job;
  job.plan = PlanFor(RowMode::kAssign);
  job.ids = ids;
  job.n = n;
  job.source = values;
  job.source_floats = layout_.dim;
  job.ts = ClampTime(options.req_time);
  // The last one stays, whatever came before.
  job.duplicates = options.duplicates == Duplicates::kNone ? Duplicates::kNone : Duplicates::kSteps;
  job.filter = options.filter;
  MONO_GPU_TRY(Write(stream, job));
  max_update_ts_ = std::max<int64_t>(max_update_ts_, job.ts);
  return MONO_GPU_OK;
}

int GpuTable::AssignAdd(Stream stream, const int64_t* ids, int64_t n, const float* values,
                        const GpuWriteOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  Job job;
  job.plan = PlanFor(RowMode::kAssignAdd);
  job.ids = ids;
  job.n = n;
  job.source = values;
  job.source_floats = layout_.dim;
  job.ts = ClampTime(options.req_time);
  job.duplicates = options.duplicates == Duplicates::kNone ? Duplicates::kNone : Duplicates::kSteps;
  job.filter = options.filter;
  MONO_GPU_TRY(Write(stream, job));
  max_update_ts_ = std::max<int64_t>(max_update_ts_, job.ts);
  return MONO_GPU_OK;
}

int GpuTable::Optimize(Stream stream, const int64_t* ids, int64_t n, const float* gradients,
                       const GpuOptimizeOptions& options) {
  if (options.num_learning_rates < layout_.num_segments()) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "learning_rate has " + std::to_string(options.num_learning_rates) +
                    " elements, the table has " + std::to_string(layout_.num_segments()) +
                    " segments");
  }
  if (layout_.uses_global_step && options.global_step < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "global_step is " + std::to_string(options.global_step) + ", want >= 0");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  last_global_step_ = options.global_step;
  Job job;
  job.plan = PlanFor(RowMode::kOptimize);
  for (int s = 0; s < job.plan.num_segments; ++s) {
    job.plan.segments[s].lr = options.learning_rates[s];
  }
  job.ids = ids;
  job.n = n;
  job.source = gradients;
  job.source_floats = layout_.dim;
  job.ts = ClampTime(options.write.req_time);
  job.duplicates = options.write.duplicates;
  job.filter = options.write.filter;
  MONO_GPU_TRY(Write(stream, job));
  max_update_ts_ = std::max<int64_t>(max_update_ts_, job.ts);
  return MONO_GPU_OK;
}

int GpuTable::Reinitialize(Stream stream, const int64_t* ids, int64_t n, int64_t now,
                           int32_t* existed) {
  std::lock_guard<std::mutex> lock(mutex_);
  Job job;
  job.plan = PlanFor(RowMode::kReinitialize);
  job.ids = ids;
  job.n = n;
  job.ts = ClampTime(max_update_ts_ > 0 ? max_update_ts_ : now);
  job.existed = existed;
  job.duplicates = Duplicates::kSteps;
  MONO_GPU_TRY(Write(stream, job));
  max_update_ts_ = std::max<int64_t>(max_update_ts_, job.ts);
  return MONO_GPU_OK;
}

int GpuTable::ImportRows(Stream stream, const int64_t* ids, const uint32_t* ts, const char* rows,
                         int64_t n) {
  if (n <= 0) return MONO_GPU_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(BeginWrite(stream));
  const int64_t row_bytes = n * layout_.row_bytes;
  DeviceBuffer staging;
  MONO_GPU_TRY(staging.Allocate(stream, n * 12 + row_bytes, "loading a table"));
  int64_t* const device_ids = staging.As<int64_t>();
  const auto device_ts = reinterpret_cast<uint32_t*>(device_ids + n);
  const auto device_rows = reinterpret_cast<float*>(device_ts + n);
  MONO_GPU_TRY(CopyToDevice(stream, ids, device_ids, n * 8));
  MONO_GPU_TRY(CopyToDevice(stream, ts, device_ts, n * 4));
  MONO_GPU_TRY(CopyToDevice(stream, rows, device_rows, row_bytes));
  Job job;
  job.plan = PlanFor(RowMode::kLoad);
  job.ids = device_ids;
  job.n = n;
  job.source = device_rows;
  job.source_floats = layout_.row_bytes / 4;
  job.load_ts = device_ts;
  job.duplicates = Duplicates::kSteps;
  const int code = Write(stream, job);
  staging.Free(stream);
  MONO_GPU_TRY(code);
  max_update_ts_ = std::max<int64_t>(max_update_ts_, *std::max_element(ts, ts + n));
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith
