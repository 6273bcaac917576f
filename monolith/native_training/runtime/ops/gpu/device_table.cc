#include "monolith/native_training/runtime/ops/gpu/device_table.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <exception>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/tables/bad_gradients.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int kShards = engine::EmbeddingTable::NumShards();
// The tag and the eight bytes of the id, with which the codec begins a record.
constexpr int64_t kIdBytes = 9;

MonoGpuTableSegment ToSegment(const engine::SegmentConfig& from) {
  MonoGpuTableSegment to = {};
  to.dim = from.dim_size;
  to.optimizer = static_cast<int32_t>(from.optimizer.kind);
  to.initializer = static_cast<int32_t>(from.initializer.kind);
  to.compressor = static_cast<int32_t>(from.compressor.kind);
  to.use_nesterov = from.optimizer.use_nesterov;
  to.decay_by_step = from.optimizer.decay_by_step;
  to.decouple_weight_decay = from.optimizer.decouple_weight_decay;
  to.stochastic_rounding_float16 = from.optimizer.stochastic_rounding_float16;
  to.initial_accumulator_value = from.optimizer.initial_accumulator_value;
  to.weight_decay = from.optimizer.weight_decay;
  to.beta = from.optimizer.beta;
  to.l1 = from.optimizer.l1;
  to.l2 = from.optimizer.l2;
  to.averaging_ratio = from.optimizer.averaging_ratio;
  to.epsilon = from.optimizer.epsilon;
  to.beta1 = from.optimizer.beta1;
  to.beta2 = from.optimizer.beta2;
  to.momentum = from.optimizer.momentum;
  to.constant = from.initializer.constant;
  to.minval = from.initializer.minval;
  to.maxval = from.initializer.maxval;
  to.range = from.compressor.range;
  to.init_scale = from.compressor.init_scale;
  to.max_scale = from.compressor.max_scale;
  to.amplitude = from.compressor.amplitude;
  to.step_size = from.compressor.step_size;
  return to;
}

// Whether no row can be expired: the oldest has time 0.
bool NeverExpires(const engine::ExpiryPolicy& policy, int64_t newest) {
  int64_t least = policy.default_seconds();
  for (const int64_t seconds : policy.slot_seconds()) least = std::min(least, seconds);
  return newest < least;
}

// Calls visit(record, framed bytes) for all of them until an error.
template <typename Visit>
engine::Status ForEachRecord(const std::string& records, const Visit& visit) {
  int64_t at = 0;
  const int64_t size = static_cast<int64_t>(records.size());
  while (at < size) {
    engine::RecordView record;
    int64_t used = 0;
    if (engine::ReadRecord(records.data() + at, size - at, &record.data, &record.size, &used) !=
        engine::RecordResult::kRecord) {
      return engine::Status::Internal("a table on a GPU has given a damaged record");
    }
    engine::Status status = visit(record, std::string_view(records).substr(at, used));
    if (!status.ok()) return status;
    at += used;
  }
  return engine::Status::Ok();
}

int64_t IdOf(const engine::RecordView& record) {
  int64_t id;
  std::memcpy(&id, record.data + 1, sizeof(id));
  return id;
}

// Offsets of SavePage: | shard number inside the partition | 32-bit hash | 24-bit rows of that hash
// done |, plus 1. Rows come in the order of a hash, so that those which are inserted between two
// pages move no other.
struct PageOffset {
  int64_t ordinal = 0;
  uint64_t hash = 0;
  int64_t done = 0;

  static PageOffset Decode(int64_t offset) {
    const uint64_t bits = static_cast<uint64_t>(std::max<int64_t>(offset, 1) - 1);
    return {static_cast<int64_t>(bits >> 56), (bits >> 24) & 0xffffffffull,
            static_cast<int64_t>(bits & 0xffffff)};
  }
  int64_t Encode() const {
    return 1 + static_cast<int64_t>((static_cast<uint64_t>(ordinal) << 56) | (hash << 24) |
                                    static_cast<uint64_t>(done));
  }
};

// A filter behind a function of C. An exception must not pass through that.
struct FilterCall {
  engine::OccurrenceFilter* filter = nullptr;
  bool count_once = false;
  bool failed = false;

  static void Run(void* context, const int64_t* ids, const uint32_t* counts, int64_t n,
                  uint8_t* dropped) {
    auto* const call = static_cast<FilterCall*>(context);
    try {
      call->filter->Filter(ids, call->count_once ? nullptr : counts, n, /*for_table=*/true,
                           dropped);
    } catch (const std::exception&) {
      call->failed = true;
      std::fill(dropped, dropped + n, uint8_t{1});
    }
  }
};

Status GetNotFinite(int32_t* not_finite) {
  engine::NonFinite policy = engine::NonFinite::kStop;
  TF_RETURN_IF_ERROR(GetNonFinite(&policy));
  *not_finite = policy == engine::NonFinite::kStop   ? MONO_GPU_NOT_FINITE_STOP
                : policy == engine::NonFinite::kSkip ? MONO_GPU_NOT_FINITE_SKIP
                                                     : MONO_GPU_NOT_FINITE_WRITE;
  return OkStatus();
}

MonoGpuWriteOptions ToOptions(const DeviceTable& table, const DeviceWriteOptions& from,
                              int32_t not_finite, FilterCall* filter) {
  MonoGpuWriteOptions to = {};
  to.not_finite = not_finite;
  to.req_time = from.req_time;
  to.global_step = from.global_step;
  to.learning_rates = from.learning_rates;
  to.num_learning_rates = from.learning_rates == nullptr ? 0 : table.num_segments();
  to.duplicates = from.sum_duplicates ? MONO_GPU_SUM_GRADIENTS : MONO_GPU_STEP_FOR_EACH;
  if (from.filter != nullptr && !from.filter->NeverFilters()) {
    filter->filter = from.filter;
    filter->count_once = from.count_once;
    to.filter = &FilterCall::Run;
    to.filter_context = filter;
  }
  return to;
}

// The status of a call on several tables, which come once or several times in a row.
Status CheckMany(std::vector<const DeviceTable*> tables, int code) {
  if (code == MONO_GPU_OK) return OkStatus();
  if (code == MONO_GPU_REFUSED) return GpuStatus(tables.front()->library(), code);
  tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
  const Status status = tables.front()->Check(code);
  if (tables.size() == 1) return status;
  std::string others;
  for (size_t i = 1; i < tables.size(); ++i) {
    strings::StrAppend(&others, i > 1 ? ", " : "", tables[i]->name());
  }
  return Status(status.code(),
                strings::StrCat(status.message(), " (in one call with ", others, ")"));
}

Status CheckFilter(const FilterCall& filter) {
  if (!filter.failed) return OkStatus();
  return errors::ResourceExhausted("no memory to ask an occurrence filter");
}

}  // namespace

// Two passes: a twin would take the memory of two tables. What the first finds wrong leaves the
// table as it was.
class DeviceTable::Load : public engine::RecordLoad {
 public:
  explicit Load(DeviceTable* table) : table_(table) {}
  ~Load() override {
    if (cleared_ && !finished_) {
      LOG(ERROR) << "table " << table_->name_
                 << " is empty: a file that was good has changed while it was read again";
      table_->library_->table_clear(table_->table_, nullptr);
    }
  }

  int num_passes() const override { return 2; }

  engine::Status BeginPass(int pass, int64_t rows) override {
    if (pass == 0) return engine::Status::Ok();
    cleared_ = true;
    const auto& library = *table_->library_;
    engine::Status status = table_->ToEngine(library.table_clear(table_->table_, nullptr));
    if (!status.ok()) return status;
    return table_->ToEngine(library.table_reserve(table_->table_, nullptr, rows));
  }

  engine::Status Add(const engine::RecordView* records, int64_t n,
                     engine::LoadStats* stats) override {
    std::vector<float> values(table_->layout_.dim);
    std::vector<char> row(table_->layout_.stride);
    std::string changed;
    const int64_t now = std::max<int64_t>(0, std::time(nullptr));
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (cleared_) lock.lock();
    for (int64_t i = 0; i < n; ++i) {
      engine::ParsedEntry entry;
      engine::Status status =
          table_->codec_.Parse(records[i].data, records[i].size, values.data(), row.data(), &entry);
      if (!status.ok()) return status;
      if (table_->config_.skip_zero_embedding &&
          std::all_of(values.begin(), values.end(), [](float value) { return value == 0; })) {
        ++stats->skipped_zero;
        continue;
      }
      ++stats->loaded;
      stats->state_reset += entry.state_reset;
      if (!cleared_) continue;
      // Tables in main memory do the same: a row without a time counts from now on, where it would
      // have expired against the first time that comes.
      const engine::ExpiryPolicy& expiry = table_->expiry_;
      if (entry.ts == 0 && expiry.IsExpired(entry.id, 0, now) &&
          !expiry.IsExpired(entry.id, static_cast<uint32_t>(now), now)) {
        changed.resize(table_->codec_.max_record_bytes());
        const int64_t size = table_->codec_.Encode(entry.id, row.data(), static_cast<uint32_t>(now),
                                                   /*with_id=*/true, &changed[0]);
        Append(changed.data(), size);
      } else {
        Append(records[i].data, records[i].size);
      }
    }
    if (static_cast<int64_t>(bytes_.size()) < kBatchBytes) return engine::Status::Ok();
    return Flush();
  }

  engine::Status Finish() override {
    std::lock_guard<std::mutex> lock(mutex_);
    engine::Status status = Flush();
    finished_ = status.ok();
    return status;
  }

 private:
  // Copying a row at a time would wait for the device each time.
  static constexpr int64_t kBatchBytes = 32 << 20;

  void Append(const char* data, int64_t size) {
    bytes_.append(data, size);
    sizes_.push_back(size);
  }

  engine::Status Flush() {
    std::vector<const char*> records;
    records.reserve(sizes_.size());
    const char* at = bytes_.data();
    for (const int64_t size : sizes_) {
      records.push_back(at);
      at += size;
    }
    int64_t state_reset = 0;
    engine::Status status = table_->ToEngine(
        table_->library_->table_load_records(table_->table_, nullptr, records.data(), sizes_.data(),
                                             static_cast<int64_t>(sizes_.size()), &state_reset));
    bytes_.clear();
    sizes_.clear();
    return status;
  }

  DeviceTable* const table_;
  bool cleared_ = false;  // the second pass has begun
  bool finished_ = false;
  std::mutex mutex_;
  std::string bytes_;  // of records that wait
  std::vector<int64_t> sizes_;
};

Status DeviceTable::Create(const ::monolith::hash_table::EmbeddingHashTableConfig& proto,
                           const std::string& name, std::unique_ptr<DeviceTable>* table) {
  engine::TableConfig config;
  TF_RETURN_IF_ERROR(TableConfigFromProto(proto, &config));
  if (!proto.has_gpucuco()) {
    return errors::FailedPrecondition("table ", name, " was placed on a GPU, but its type is ",
                                      proto.has_cuckoo() ? "cuckoo" : "not set",
                                      "; use GpucucoHashTableConfig, or place it on a CPU");
  }
  engine::RowLayout layout;
  TF_RETURN_IF_ERROR(FromEngine(engine::CompileRowLayout(config, &layout)));
  if (layout.serving()) {
    return errors::InvalidArgument("table ", name,
                                   " is for serving, whose rows are kept in main memory; use "
                                   "CuckooHashTableConfig");
  }
  std::unique_ptr<DeviceTable> created(new DeviceTable(name, std::move(config), std::move(layout)));
  TF_RETURN_IF_ERROR(
      FromEngine(engine::ExpiryPolicy::Create(created->config_.expiry, &created->expiry_)));
  const Status found = GetGpuLibrary(&created->library_);
  if (!found.ok()) {
    return errors::FailedPrecondition("no CUDA device can hold table ", name, ": ", found.message(),
                                      "; use CuckooHashTableConfig");
  }
  TF_RETURN_IF_ERROR(created->Check(created->CreateTable()));
  TF_RETURN_IF_ERROR(MakeEvictionThread(
      proto,
      [made = created.get()] {
        int64_t erased = 0;
        const Status status =
            made->Check(made->library_->table_evict(made->table_, nullptr, &erased));
        if (!status.ok()) LOG(ERROR) << "Expired rows stay: " << status.message();
      },
      &created->eviction_));
  *table = std::move(created);
  return OkStatus();
}

DeviceTable::~DeviceTable() {
  eviction_.reset();
  if (table_ != nullptr) library_->table_destroy(table_);
}

int DeviceTable::CreateTable() {
  std::vector<MonoGpuTableSegment> segments;
  for (const engine::SegmentConfig& segment : config_.entry.segments) {
    segments.push_back(ToSegment(segment));
  }
  std::vector<uint32_t> slots, days;
  for (const engine::SlotExpireTime& slot : config_.expiry.slots) {
    slots.push_back(slot.slot);
    days.push_back(slot.days);
  }
  MonoGpuTableConfig config = {};
  config.segments = segments.data();
  config.num_segments = static_cast<int64_t>(segments.size());
  config.initial_capacity = config_.initial_capacity;
  config.seed = config_.seed;
  config.default_expire_days = config_.expiry.default_days;
  config.expire_slots = slots.data();
  config.expire_days = days.data();
  config.num_expire_slots = static_cast<int64_t>(slots.size());
  config.name = name_.c_str();
  return library_->table_create(&config, &table_);
}

Status DeviceTable::Check(int code) const {
  const Status status = GpuStatus(*library_, code);
  // The table itself tells of refusals; another call of this step may be on it.
  if (status.ok() || code == MONO_GPU_REFUSED) return status;
  std::string text = strings::StrCat("table ", name_, ": ", status.message());
  MonoGpuTableStats stats = {};
  if (code == MONO_GPU_OUT_OF_MEMORY && table_ != nullptr &&
      library_->table_stats(table_, &stats) == MONO_GPU_OK) {
    strings::StrAppend(&text, "; it has ", stats.size, " rows in ",
                       stats.row_bytes + stats.index_bytes + stats.other_bytes, " bytes");
  }
  return Status(status.code(), text);
}

engine::Status DeviceTable::ToEngine(int code) const {
  const Status status = Check(code);
  const std::string text(status.message());
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return engine::Status::Ok();
    case absl::StatusCode::kInvalidArgument:
      return engine::Status::InvalidArgument(text);
    case absl::StatusCode::kResourceExhausted:
      return engine::Status::ResourceExhausted(text);
    case absl::StatusCode::kFailedPrecondition:
      return engine::Status::FailedPrecondition(text);
    default:
      return engine::Status::Internal(text);
  }
}

Status DeviceTable::GetStats(MonoGpuTableStats* stats) const {
  *stats = {};
  return Check(library_->table_stats(table_, stats));
}

Status DeviceTable::WriteStats(int64_t* out) const {
  MonoGpuTableStats stats = {};
  TF_RETURN_IF_ERROR(GetStats(&stats));
  out[0] = stats.size;
  out[1] = stats.row_bytes + stats.index_bytes + stats.other_bytes;
  out[2] = stats.expired;
  out[3] = stats.filtered;
  out[4] = stats.nonfinite_gradients;
  return OkStatus();
}

engine::Status DeviceTable::GetSize(int64_t* size) const {
  MonoGpuTableStats stats = {};
  engine::Status status = ToEngine(library_->table_stats(table_, &stats));
  *size = stats.size;
  return status;
}

int64_t DeviceTable::MaxUpdateTs() const {
  MonoGpuTableStats stats = {};
  return library_->table_stats(table_, &stats) == MONO_GPU_OK ? stats.max_update_ts : 0;
}

Status DeviceTable::ReadShard(int shard, std::string* records) const {
  records->clear();
  int64_t count = 0;
  return Check(library_->table_save_shard(
      table_, nullptr, shard, /*leave_out_expired=*/0,
      [](void* context, const char* bytes, int64_t size) {
        try {
          static_cast<std::string*>(context)->append(bytes, size);
          return 0;
        } catch (const std::exception&) {
          return 1;
        }
      },
      records, &count));
}

engine::Status DeviceTable::WriteShard(int shard, const engine::ExpiryPolicy* expiry,
                                       const engine::AppendBytes& append,
                                       engine::SaveStats* stats) const {
  // A checkpoint is not taken of a run that is to stop.
  engine::Status status = ToEngine(library_->table_check(table_));
  if (!status.ok()) return status;
  // As of before the rows are read: a later time would call rows old that are not yet.
  MonoGpuTableStats before = {};
  status = ToEngine(library_->table_stats(table_, &before));
  if (!status.ok()) return status;
  std::string records;
  const Status read = ReadShard(shard, &records);
  if (!read.ok()) return engine::Status::Internal(std::string(read.message()));
  std::string kept;
  std::vector<float> values(layout_.dim);
  std::vector<char> row(layout_.stride);
  const bool all = expiry == nullptr || NeverExpires(*expiry, before.max_update_ts);
  status = ForEachRecord(records, [&](const engine::RecordView& record, std::string_view framed) {
    if (!all) {
      engine::ParsedEntry entry;
      engine::Status parsed =
          codec_.Parse(record.data, record.size, values.data(), row.data(), &entry);
      if (!parsed.ok()) return parsed;
      if (expiry->IsExpired(entry.id, entry.ts, before.max_update_ts)) {
        ++stats->expired;
        return engine::Status::Ok();
      }
      kept.append(framed);
    }
    ++stats->saved;
    return engine::Status::Ok();
  });
  if (!status.ok()) return status;
  return append(all ? records : kept);
}

std::unique_ptr<engine::RecordLoad> DeviceTable::NewLoad() { return std::make_unique<Load>(this); }

Status DeviceTable::LookupEntries(void* stream, const int64_t* ids, int64_t n,
                                  std::vector<std::string>* entries) const {
  entries->clear();
  TF_RETURN_IF_ERROR(Check(library_->table_save_ids(
      table_, stream, ids, n,
      [](void* context, const char* bytes, int64_t size) {
        try {
          auto* const to = static_cast<std::vector<std::string>*>(context);
          if (size < kIdBytes) {
            to->emplace_back();
          } else {
            to->emplace_back(bytes + kIdBytes, size - kIdBytes);
          }
          return 0;
        } catch (const std::exception&) {
          return 1;
        }
      },
      entries)));
  if (static_cast<int64_t>(entries->size()) == n) return OkStatus();
  return errors::Internal("table ", name_, " has given ", entries->size(), " entries for ", n,
                          " ids");
}

Status DeviceTable::SavePage(int64_t part, int64_t num_parts, int64_t limit, int64_t offset,
                             int64_t* new_offset, std::vector<std::string>* entries) const {
  if (num_parts <= 0 || part < 0 || part >= num_parts) {
    return errors::InvalidArgument("shard_idx is ", part, ", num_shards is ", num_parts);
  }
  if (limit < 0 || offset < 0) {
    return errors::InvalidArgument("limit is ", limit, ", offset is ", offset, ", want both >= 0");
  }
  struct Found {
    uint32_t hash;
    int64_t id;
    std::string_view bytes;
  };
  PageOffset at = PageOffset::Decode(offset);
  std::string records;
  std::vector<Found> found;
  entries->clear();
  while (part + at.ordinal * num_parts < kShards && static_cast<int64_t>(entries->size()) < limit) {
    TF_RETURN_IF_ERROR(ReadShard(static_cast<int>(part + at.ordinal * num_parts), &records));
    found.clear();
    TF_RETURN_IF_ERROR(FromEngine(
        ForEachRecord(records, [&](const engine::RecordView& record, std::string_view /*framed*/) {
          const int64_t id = IdOf(record);
          const auto hash = static_cast<uint32_t>(engine::MixId(id) >> 32);
          if (hash >= at.hash) {
            found.push_back(
                {hash, id, std::string_view(record.data, static_cast<size_t>(record.size))});
          }
          return engine::Status::Ok();
        })));
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
      return std::tie(a.hash, a.id) < std::tie(b.hash, b.id);
    });
    PageOffset next{at.ordinal + 1, 0, 0};
    int64_t same_hash = 0;  // rows before this one with its hash
    for (size_t i = 0; i < found.size(); ++i) {
      same_hash = i > 0 && found[i].hash == found[i - 1].hash ? same_hash + 1 : 0;
      if (found[i].hash == at.hash && same_hash < at.done) continue;
      if (static_cast<int64_t>(entries->size()) == limit) {
        next = {at.ordinal, found[i].hash, same_hash};
        break;
      }
      entries->emplace_back(found[i].bytes);
    }
    at = next;
  }
  *new_offset = at.Encode();
  return OkStatus();
}

std::string DeviceTable::DebugString() const {
  MonoGpuTableStats stats = {};
  if (!GetStats(&stats).ok()) return strings::StrCat("table ", name_, " on a GPU");
  return strings::StrCat("{\"accessor\": \"gpu\", \"size\": ", stats.size,
                         ", \"memory\": ", stats.row_bytes + stats.index_bytes + stats.other_bytes,
                         ", \"expired\": ", stats.expired, ", \"filtered\": ", stats.filtered,
                         ", \"nonfinite_gradients\": ", stats.nonfinite_gradients, "}");
}

Status LookUpDeviceTables(GpuCall* call, const std::vector<DeviceLookup>& lookups) {
  std::vector<MonoGpuLookupJob> jobs;
  std::vector<const DeviceTable*> tables;
  for (const DeviceLookup& lookup : lookups) {
    if (lookup.n == 0) continue;
    jobs.push_back({lookup.table->get(), lookup.ids, lookup.n, lookup.out, nullptr, 0});
    tables.push_back(lookup.table);
  }
  if (jobs.empty()) return OkStatus();
  return CheckMany(tables, call->library().table_lookup_many(call->stream(), jobs.data(),
                                                             static_cast<int64_t>(jobs.size())));
}

Status WriteDeviceTable(GpuCall* call, const DeviceTable& table, DeviceWrite write,
                        const DeviceSpan& span, const DeviceWriteOptions& options) {
  FilterCall filter;
  int32_t not_finite = 0;
  TF_RETURN_IF_ERROR(GetNotFinite(&not_finite));
  const MonoGpuWriteOptions c_options = ToOptions(table, options, not_finite, &filter);
  const auto function = write == DeviceWrite::kAssign ? call->library().table_assign
                                                      : call->library().table_assign_add;
  TF_RETURN_IF_ERROR(table.Check(
      function(table.get(), call->stream(), span.ids, span.n, span.values, &c_options)));
  return CheckFilter(filter);
}

Status OptimizeDeviceTables(GpuCall* call, const std::vector<DeviceUpdate>& updates) {
  std::vector<FilterCall> filters(updates.size());
  std::vector<MonoGpuWriteOptions> options(updates.size());
  std::vector<MonoGpuOptimizeJob> jobs;
  std::vector<const DeviceTable*> tables;
  int32_t not_finite = 0;
  TF_RETURN_IF_ERROR(GetNotFinite(&not_finite));
  for (size_t i = 0; i < updates.size(); ++i) {
    options[i] = ToOptions(*updates[i].table, updates[i].options, not_finite, &filters[i]);
    for (const DeviceSpan& span : updates[i].spans) {
      if (span.n == 0) continue;
      jobs.push_back({updates[i].table->get(), span.ids, span.n, span.values, &options[i], 0,
                      MONO_GPU_FLOAT32, 0});
      tables.push_back(updates[i].table);
    }
  }
  if (jobs.empty()) return OkStatus();
  TF_RETURN_IF_ERROR(
      CheckMany(tables, call->library().table_optimize_many(call->stream(), jobs.data(),
                                                            static_cast<int64_t>(jobs.size()))));
  for (const FilterCall& filter : filters) TF_RETURN_IF_ERROR(CheckFilter(filter));
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
