// How GPU tables are made, and what the host knows of them.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/log.h"
#include "monolith/native_training/runtime/gpu/gpu_table.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"

namespace monolith {
namespace gpu {
namespace {

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

std::string DescribeRefused(const std::string& table, int64_t rows, std::vector<int64_t> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  std::string text = table +
                     ": values or gradients with NaN or infinity were not written, those of " +
                     std::to_string(rows) + (rows == 1 ? " row: id " : " rows: ids ");
  for (size_t i = 0; i < ids.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ids[i]);
  if (rows > static_cast<int64_t>(ids.size())) text += ", ...";
  return text;
}

// Rows up to 16 bytes lie in one access, larger ones start at a sector of 32 bytes.
int64_t StrideOf(int64_t row_bytes) {
  for (const int64_t size : {4, 8, 16}) {
    if (row_bytes <= size) return size;
  }
  return CeilDiv(row_bytes, 32) * 32;
}

}  // namespace

// -- Creation.

GpuTable::GpuTable(const engine::TableConfig& config, const std::string& name,
                   engine::RowLayout layout, engine::ExpiryPolicy expiry, uint64_t seed)
    : config_(config),
      name_(name.empty() ? "A table on a GPU" : "Table '" + name + "'"),
      layout_(std::move(layout)),
      expiry_(std::move(expiry)),
      codec_(layout_),
      seed_(seed),
      stride_(StrideOf(layout_.row_bytes)) {}

GpuTable::~GpuTable() {
#if defined(__CUDACC__)
  if (UseDevice(streams_.device()) == MONO_GPU_OK) cudaDeviceSynchronize();
#endif
  // Nobody will ask any more.
  if (Poll(0) == MONO_GPU_OK && TellRefused() != MONO_GPU_OK) {
    engine::Log(engine::LogLevel::kError, mono_gpu_last_error());
  }
}

int GpuTable::Create(const engine::TableConfig& config, const std::string& name,
                     std::unique_ptr<GpuTable>* table) {
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
      new GpuTable(config, name, std::move(layout), std::move(expiry), ChooseSeed(config.seed)));
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
#endif
  MONO_GPU_TRY(streams_.Initialize());
  int64_t budget = 0;
  MONO_GPU_TRY(TableBudget(&budget));
  const int64_t most = static_cast<int64_t>(kErasedRow) * stride_;
  MONO_GPU_TRY(arena_.Reserve(std::max(std::min(budget, most), int64_t{2} << 20)));
  MONO_GPU_TRY(published_.Allocate(kPublishedRing * static_cast<int64_t>(sizeof(PublishedState))));
  MONO_GPU_TRY(state_.Allocate(nullptr, sizeof(TableState), "the counters of a table"));
  MONO_GPU_TRY(FillBytes(nullptr, state_.As<char>(), 0, sizeof(TableState)));
  MONO_GPU_TRY(spill_.Allocate(nullptr, int64_t{1} << 14, "the spill list of a table"));
  MONO_GPU_TRY(shard_views_.Allocate(nullptr, kTableShards * sizeof(ShardView), "a directory"));
  return Clear(nullptr);
}

int GpuTable::Clear(Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return AsWrite(stream, [&]() -> int {
    MONO_GPU_TRY(ReadState(stream));
    // The state that must be there first: rows, and lines for every shard.
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
    return PublishShards(stream, 0);
  });
}

IndexView GpuTable::View() const {
  return {engine::TableHash(), shard_views_.As<ShardView>(), spill_.As<TableSlot>(),
          static_cast<uint64_t>(spill_.bytes()) / sizeof(TableSlot), state_.As<TableState>()};
}

RowPlan GpuTable::PlanFor(RowMode mode, int64_t global_step) const {
  RowPlan plan = {};
  plan.num_segments = static_cast<int32_t>(layout_.num_segments());
  plan.dim = static_cast<int32_t>(layout_.dim);
  plan.row_floats = static_cast<int32_t>(layout_.row_bytes / 4);
  plan.mode = mode;
  plan.seed = seed_;
  plan.global_step = global_step;
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
    const bool by_step = o.kind == engine::OptimizerKind::kAdam && o.decay_by_step;
    to.flags = (o.use_nesterov ? SegmentPlan::kNesterov : 0) |
               (decoupled ? SegmentPlan::kDecoupled : 0) | (by_step ? SegmentPlan::kByStep : 0) |
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
    if (by_step) {
      // As the engine has it; a device's powers may differ in their last bits.
      to.step_correction = std::sqrt(1.0f - std::pow(o.beta2, static_cast<float>(global_step + 1)));
    }
    to.amplitude = from.compressor.amplitude;
    to.retriever_scale = from.retriever == engine::RetrieverKind::kHashNet
                             ? engine::HashNetScale(from.compressor, global_step)
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

bool GpuTable::HasArrived(const InFlight& write) const {
  // Stored last, by the device.
  const volatile uint64_t& there =
      published_.As<PublishedState>()[write.sequence % kPublishedRing].sequence;
  if (there != write.sequence) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

int GpuTable::WaitFor(const InFlight& write) const {
  while (!HasArrived(write)) {
#if defined(__CUDACC__)
    // A device that failed never stores it.
    const cudaError_t state = cudaStreamQuery(nullptr);
    if (state != cudaErrorNotReady) MONO_GPU_TRY(CheckCuda(state, "a write"));
#endif
    std::this_thread::yield();
  }
  return MONO_GPU_OK;
}

// Takes in what writes have left, and waits while more than `may_stay` are under way.
int GpuTable::Poll(int64_t may_stay) {
  while (!in_flight_.empty()) {
    const InFlight oldest = in_flight_.front();
    if (!HasArrived(oldest)) {
      if (static_cast<int64_t>(in_flight_.size()) <= may_stay) return MONO_GPU_OK;
      MONO_GPU_TRY(WaitFor(oldest));
    }
    const TableState& state =
        published_.As<PublishedState>()[oldest.sequence % kPublishedRing].state;
    NoteRefused(state, oldest.not_finite);
    known_ = state;
    in_flight_ids_ -= oldest.n;
    in_flight_.pop_front();
    MONO_GPU_TRY(CheckNothingLost());
  }
  return MONO_GPU_OK;
}

void GpuTable::NoteRefused(const TableState& state, NotFinite not_finite) {
  const int64_t rows = static_cast<int64_t>(state.nonfinite - known_.nonfinite);
  if (rows == 0 || not_finite == NotFinite::kWrite) return;
  std::vector<int64_t> ids;
  for (int64_t k = 1; k <= std::min<int64_t>(rows, kNamedIds); ++k) {
    ids.push_back(state.bad_ids[(state.nonfinite - static_cast<uint64_t>(k)) % kNamedIds]);
  }
  if (not_finite == NotFinite::kStop) {
    refused_ += rows;
    bad_ids_.insert(bad_ids_.end(), ids.begin(), ids.end());
    bad_ids_.resize(std::min<size_t>(bad_ids_.size(), kNamedIds));
    return;
  }
  // Ever more rarely, as tables in main memory: a run may go on for days.
  ++warnings_;
  if (warnings_ > 8 && (warnings_ & (warnings_ - 1)) != 0) return;
  engine::Log(engine::LogLevel::kWarning, DescribeRefused(name_, rows, std::move(ids)));
}

int GpuTable::TellRefused() {
  if (refused_ == 0) return MONO_GPU_OK;
  const std::string text = DescribeRefused(name_, refused_, std::move(bad_ids_));
  refused_ = 0;
  bad_ids_.clear();
  return Fail(MONO_GPU_REFUSED, text + ". An earlier call had them; it has written its other rows");
}

int GpuTable::Check() {
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(Poll(0));
  return TellRefused();
}

// The state as it is after all calls so far.
int GpuTable::ReadState(Stream stream) {
  MONO_GPU_TRY(Poll(0));
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
  const Stream stream = streams_.write_stream();
  MONO_GPU_TRY(streams_.BeginRead(stream));
  MONO_GPU_TRY(ReadState(stream));
  *stats = {};
  for (int s = 0; s < kTableShards; ++s) {
    stats->size += known_.live[s];
    stats->index_bytes += shards_[s].slots.bytes();
    stats->slots += shards_[s].num_slots();
  }
  stats->row_bytes = arena_.bytes();
  stats->other_bytes = free_stack_.bytes() + spill_.bytes() + absent_.bytes() + prefix_.bytes() +
                       times_.bytes() + joined_.bytes() + sums_.bytes() + sorting_.bytes();
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

}  // namespace gpu
}  // namespace monolith
