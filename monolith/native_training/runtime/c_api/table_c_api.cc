#include "monolith/native_training/runtime/c_api/table_c_api.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/c_api/batch_threads.h"
#include "monolith/native_training/runtime/c_api/errors.h"
#include "monolith/native_training/runtime/files/posix_file_system.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/eviction_thread.h"
#include "monolith/native_training/runtime/hash_table/records/table_files.h"

using monolith::engine::BatchThreads;
using monolith::engine::EmbeddingTable;
using monolith::engine::EvictionThread;
using monolith::engine::Guard;
using monolith::engine::LoadStats;
using monolith::engine::LookupRequest;
using monolith::engine::NonFinite;
using monolith::engine::OptimizeOptions;
using monolith::engine::OptimizeRequest;
using monolith::engine::PosixFileSystem;
using monolith::engine::RecordView;
using monolith::engine::RowView;
using monolith::engine::SaveStats;
using monolith::engine::SlidingHashFilter;
using monolith::engine::Status;
using monolith::engine::TableConfig;
using monolith::engine::TableStats;
using monolith::engine::WriteOptions;
using monolith::engine::WriteSpan;

struct MonoTable {
  // Shared: any call; exclusive: the table is replaced by one of another configuration.
  std::shared_mutex mutex;
  std::unique_ptr<EmbeddingTable> table;
  std::unique_ptr<SlidingHashFilter> filter;  // null: every id gets a row
  std::unique_ptr<EvictionThread> eviction;   // behind the table, to stop before it goes
};

namespace {

constexpr int64_t kFilterSplits = 7;
constexpr int64_t kMaxEvictionHours = 24 * 365 * 100;  // fits 64-bit nanoseconds
constexpr int64_t kPageRows = 1 << 13;
constexpr int64_t kConfigurePage = 1 << 16;
constexpr int64_t kMaxSegments = 1 << 20;

Status IsNull(const char* what) { return Status::InvalidArgument(std::string(what) + " is null"); }

Status CheckArray(const char* what, const void* array, int64_t n) {
  if (n < 0) {
    return Status::InvalidArgument("n is " + std::to_string(n) + ", want 0 or more");
  }
  return n > 0 && array == nullptr ? IsNull(what) : Status::Ok();
}

Status CheckBatch(const MonoTable* table, const int64_t* ids, int64_t n, const char* what,
                  const void* values) {
  if (table == nullptr) return IsNull("table");
  Status status = CheckArray("ids", ids, n);
  if (status.ok()) status = CheckArray(what, values, n);
  if (!status.ok()) return status;
  const int64_t dim = table->table->dim();
  if (n > std::numeric_limits<int64_t>::max() / static_cast<int64_t>(sizeof(float)) / dim) {
    return Status::InvalidArgument("n is " + std::to_string(n) + ", more than memory can hold");
  }
  return Status::Ok();
}

Status ReadKind(const char* what, int64_t segment, int32_t value, int32_t end) {
  if (value >= 0 && value < end) return Status::Ok();
  return Status::InvalidArgument("segment " + std::to_string(segment) + ": " + what + " is " +
                                 std::to_string(value) + ", want 0 to " + std::to_string(end - 1));
}

Status ReadSegment(int64_t number, const MonoTableSegment& from,
                   monolith::engine::SegmentConfig* to) {
  using monolith::engine::CompressorKind;
  using monolith::engine::InitializerKind;
  using monolith::engine::OptimizerKind;
  Status status =
      ReadKind("optimizer", number, from.optimizer, static_cast<int32_t>(OptimizerKind::kDc) + 1);
  if (status.ok()) {
    status = ReadKind("initializer", number, from.initializer,
                      static_cast<int32_t>(InitializerKind::kRandomUniform) + 1);
  }
  if (status.ok()) {
    status = ReadKind("compressor", number, from.compressor,
                      static_cast<int32_t>(CompressorKind::kOneBit) + 1);
  }
  if (!status.ok()) return status;
  to->dim_size = from.dim;
  monolith::engine::OptimizerConfig& o = to->optimizer;
  o.kind = static_cast<OptimizerKind>(from.optimizer);
  o.initial_accumulator_value = from.initial_accumulator_value;
  o.weight_decay = from.weight_decay;
  o.beta = from.beta;
  o.l1 = from.l1;
  o.l2 = from.l2;
  o.averaging_ratio = from.averaging_ratio;
  o.epsilon = from.epsilon;
  o.beta1 = from.beta1;
  o.beta2 = from.beta2;
  o.momentum = from.momentum;
  o.use_nesterov = from.use_nesterov != 0;
  o.decay_by_step = from.decay_by_step != 0;
  o.decouple_weight_decay = from.decouple_weight_decay != 0;
  o.enable_dynamic_wd = from.enable_dynamic_wd != 0;
  o.stochastic_rounding_float16 = from.stochastic_rounding_float16 != 0;
  to->initializer.kind = static_cast<InitializerKind>(from.initializer);
  to->initializer.constant = from.constant;
  to->initializer.minval = from.minval;
  to->initializer.maxval = from.maxval;
  to->compressor.kind = static_cast<CompressorKind>(from.compressor);
  to->compressor.range = from.range;
  to->compressor.step_size = from.step_size;
  to->compressor.init_scale = from.init_scale;
  to->compressor.max_scale = from.max_scale;
  to->compressor.amplitude = from.amplitude;
  return Status::Ok();
}

Status ReadConfig(const MonoTableConfig& from, TableConfig* to) {
  if (from.num_segments < 1 || from.num_segments > kMaxSegments) {
    return Status::InvalidArgument("num_segments is " + std::to_string(from.num_segments) +
                                   ", want 1 to " + std::to_string(kMaxSegments));
  }
  if (from.segments == nullptr) return IsNull("segments");
  if (from.num_expire_slots < 0 || from.num_expire_slots > kMaxSegments) {
    return Status::InvalidArgument("num_expire_slots is " + std::to_string(from.num_expire_slots) +
                                   ", want 0 to " + std::to_string(kMaxSegments));
  }
  if (from.num_expire_slots > 0 && (from.expire_slots == nullptr || from.expire_days == nullptr)) {
    return IsNull(from.expire_slots == nullptr ? "expire_slots" : "expire_days");
  }
  for (int64_t i = 0; i < from.num_segments; ++i) {
    Status status = ReadSegment(i, from.segments[i], &to->entry.segments.emplace_back());
    if (!status.ok()) return status;
  }
  to->initial_capacity = from.initial_capacity;
  to->seed = from.seed;
  to->skip_zero_embedding = from.skip_zero_embedding != 0;
  to->expiry.default_days = from.default_expire_days;
  for (int64_t i = 0; i < from.num_expire_slots; ++i) {
    to->expiry.slots.push_back({from.expire_slots[i], from.expire_days[i]});
  }
  return Status::Ok();
}

Status CreateEngineTable(const MonoTableConfig& from, std::unique_ptr<EmbeddingTable>* table) {
  TableConfig config;
  Status status = ReadConfig(from, &config);
  if (status.ok()) status = EmbeddingTable::Create(config, table);
  if (status.ok()) (*table)->SetName(from.name == nullptr ? "table" : from.name);
  return status;
}

std::unique_ptr<EvictionThread> StartEviction(uint32_t hours, EmbeddingTable* table) {
  if (hours == 0) return nullptr;
  return std::make_unique<EvictionThread>(
      std::chrono::hours(std::min<int64_t>(hours, kMaxEvictionHours)),
      [table] { table->Evict(table->expiry()); });
}

Status Create(const MonoTableConfig& config, MonoTable* to) {
  Status status = CreateEngineTable(config, &to->table);
  if (!status.ok()) return status;
  if (config.admit_after > 0) {
    if (config.admit_capacity < 1) {
      return Status::InvalidArgument("admit_capacity is " + std::to_string(config.admit_capacity) +
                                     ", want at least 1");
    }
    monolith::engine::OccurrenceThresholdConfig thresholds;
    thresholds.default_threshold = config.admit_after;
    status =
        SlidingHashFilter::Create(config.admit_capacity, kFilterSplits, thresholds, &to->filter);
    if (!status.ok()) return status;
  }
  to->eviction = StartEviction(config.evict_every_hours, to->table.get());
  return Status::Ok();
}

Status CopyRows(const EmbeddingTable& from, EmbeddingTable* to) {
  std::vector<std::string> entries;
  std::vector<RecordView> records;
  LoadStats stats;
  int64_t offset = 0;
  do {
    entries.clear();
    records.clear();
    Status status = from.SavePage(0, 1, kConfigurePage, offset, &offset, &entries);
    if (!status.ok()) return status;
    for (const std::string& entry : entries) {
      records.push_back({entry.data(), static_cast<int64_t>(entry.size())});
    }
    status = to->LoadRecords(records.data(), static_cast<int64_t>(records.size()), &stats);
    if (!status.ok()) return status;
  } while (static_cast<int64_t>(entries.size()) == kConfigurePage);
  return Status::Ok();
}

Status ReadOptions(const MonoTable& table, const MonoWriteOptions* from, OptimizeOptions* to) {
  if (from == nullptr) return IsNull("options");
  switch (from->non_finite) {
    case MONO_NON_FINITE_STOP:
      to->write.non_finite = NonFinite::kStop;
      break;
    case MONO_NON_FINITE_SKIP:
      to->write.non_finite = NonFinite::kSkip;
      break;
    case MONO_NON_FINITE_WRITE:
      to->write.non_finite = NonFinite::kWrite;
      break;
    default:
      return Status::InvalidArgument("non_finite is " + std::to_string(from->non_finite) +
                                     ", want 0 to 2");
  }
  if (from->num_learning_rates != 0 && from->learning_rates == nullptr) {
    return IsNull("learning_rates");
  }
  to->write.req_time = from->req_time;
  to->write.filter = table.filter.get();
  to->write.runner = BatchThreads::Get();
  to->learning_rates = from->learning_rates;
  to->num_learning_rates = from->num_learning_rates;
  to->global_step = from->global_step;
  to->dedup = from->sum_duplicates != 0;
  to->count_once = to->dedup;
  return Status::Ok();
}

// Calls write(engine's table, span, options) for a batch that was checked.
template <typename Write>
int WriteBatch(MonoTable* table, const int64_t* ids, int64_t n, const char* what,
               const float* values, const MonoWriteOptions* from, const Write& write) {
  return Guard([&] {
    if (table == nullptr) return IsNull("table");
    std::shared_lock<std::shared_mutex> lock(table->mutex);
    Status status = CheckBatch(table, ids, n, what, values);
    OptimizeOptions options;
    if (status.ok()) status = ReadOptions(*table, from, &options);
    if (!status.ok()) return status;
    return write(table->table.get(), WriteSpan{ids, n, values}, options);
  });
}

// Calls read(engine's table).
template <typename Read>
int WithTable(MonoTable* table, const Read& read) {
  return Guard([&] {
    if (table == nullptr) return IsNull("table");
    std::shared_lock<std::shared_mutex> lock(table->mutex);
    return read(table->table.get());
  });
}

// Locks the tables of several jobs, each once, in the order of their addresses.
template <typename Job>
std::vector<std::shared_lock<std::shared_mutex>> LockTables(const Job* jobs, int64_t num_jobs) {
  std::set<MonoTable*> tables;
  for (int64_t i = 0; i < num_jobs; ++i) tables.insert(jobs[i].table);
  std::vector<std::shared_lock<std::shared_mutex>> locks;
  locks.reserve(tables.size());
  for (MonoTable* table : tables) locks.emplace_back(table->mutex);
  return locks;
}

template <typename Job>
Status CheckJobs(const Job* jobs, int64_t num_jobs) {
  Status status = CheckArray("jobs", jobs, num_jobs);
  for (int64_t i = 0; status.ok() && i < num_jobs; ++i) {
    if (jobs[i].table == nullptr) status = IsNull("table");
  }
  return status;
}

Status NameJob(int64_t i, Status status) {
  if (!status.ok()) status.message = "job " + std::to_string(i) + ": " + status.message;
  return status;
}

Status CheckPath(const char* path) {
  if (path == nullptr) return IsNull("path");
  return *path == 0 ? Status::InvalidArgument("path is empty") : Status::Ok();
}

template <typename Value>
void Store(Value* to, Value value) {
  if (to != nullptr) *to = value;
}

}  // namespace

int mono_version() { return MONO_VERSION; }

const char* mono_last_error() { return monolith::engine::LastError(); }

uint32_t mono_crc32c(const void* data, int64_t size) {
  return monolith::engine::Crc32c(data, size);
}

int mono_set_num_threads(int64_t threads) {
  return Guard([&] {
    if (threads < 0) {
      return Status::InvalidArgument("threads is " + std::to_string(threads) + ", want 0 or more");
    }
    BatchThreads::SetNumThreads(threads);
    return Status::Ok();
  });
}

int mono_table_create(const MonoTableConfig* config, MonoTable** table) {
  return Guard([&] {
    if (config == nullptr || table == nullptr)
      return IsNull(config == nullptr ? "config" : "table");
    auto created = std::make_unique<MonoTable>();
    Status status = Create(*config, created.get());
    if (status.ok()) *table = created.release();
    return status;
  });
}

void mono_table_destroy(MonoTable* table) {
  Guard([&] {
    delete table;
    return Status::Ok();
  });
}

int mono_table_configure(MonoTable* table, const MonoTableConfig* config) {
  return Guard([&] {
    if (table == nullptr || config == nullptr) return IsNull(table == nullptr ? "table" : "config");
    std::unique_ptr<EmbeddingTable> next;
    Status status = CreateEngineTable(*config, &next);
    if (!status.ok()) return status;
    std::unique_lock<std::shared_mutex> lock(table->mutex);
    if (next->dim() != table->table->dim()) {
      return Status::InvalidArgument("the configuration has dimension " +
                                     std::to_string(next->dim()) + ", but the table has " +
                                     std::to_string(table->table->dim()));
    }
    status = CopyRows(*table->table, next.get());
    if (!status.ok()) return status;
    std::unique_ptr<EvictionThread> eviction = StartEviction(config->evict_every_hours, next.get());
    table->eviction = std::move(eviction);
    table->table = std::move(next);
    return status;
  });
}

int mono_table_size(MonoTable* table, int64_t* rows) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    if (rows == nullptr) return IsNull("rows");
    *rows = engine_table->Size();
    return Status::Ok();
  });
}

int mono_table_stats(MonoTable* table, MonoTableStats* stats) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    if (stats == nullptr) return IsNull("stats");
    const TableStats from = engine_table->Stats();
    *stats = {from.size,
              from.memory,
              from.row_memory,
              from.index_memory,
              from.free_rows,
              from.expired,
              from.filtered,
              from.nonfinite_gradients,
              engine_table->MaxUpdateTs()};
    return Status::Ok();
  });
}

int mono_table_lookup(MonoTable* table, const int64_t* ids, int64_t n, float* out, uint8_t* found) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckBatch(table, ids, n, "out", out);
    if (!status.ok()) return status;
    if (found == nullptr) {
      engine_table->Lookup(ids, n, out, BatchThreads::Get());
    } else {
      engine_table->Lookup(ids, n, out, found, BatchThreads::Get());
    }
    return status;
  });
}

int mono_table_contains(MonoTable* table, const int64_t* ids, int64_t n, uint8_t* found) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckBatch(table, ids, n, "found", found);
    if (status.ok()) engine_table->Contains(ids, n, found);
    return status;
  });
}

int mono_table_assign(MonoTable* table, const int64_t* ids, int64_t n, const float* values,
                      const MonoWriteOptions* options) {
  return WriteBatch(table, ids, n, "values", values, options,
                    [](EmbeddingTable* to, const WriteSpan& span, const OptimizeOptions& from) {
                      return to->Assign(span, from.write);
                    });
}

int mono_table_assign_add(MonoTable* table, const int64_t* ids, int64_t n, const float* values,
                          const MonoWriteOptions* options) {
  return WriteBatch(table, ids, n, "values", values, options,
                    [](EmbeddingTable* to, const WriteSpan& span, const OptimizeOptions& from) {
                      return to->AssignAdd(span, from.write);
                    });
}

int mono_table_optimize(MonoTable* table, const int64_t* ids, int64_t n, const float* gradients,
                        const MonoWriteOptions* options) {
  return WriteBatch(table, ids, n, "gradients", gradients, options,
                    [](EmbeddingTable* to, const WriteSpan& span, const OptimizeOptions& from) {
                      return to->Optimize(span, from);
                    });
}

int mono_table_lookup_many(const MonoLookupJob* jobs, int64_t num_jobs) {
  return Guard([&] {
    Status status = CheckJobs(jobs, num_jobs);
    if (!status.ok()) return status;
    const auto locks = LockTables(jobs, num_jobs);
    std::vector<LookupRequest> requests(num_jobs);
    for (int64_t i = 0; i < num_jobs; ++i) {
      const MonoLookupJob& job = jobs[i];
      status = NameJob(i, CheckBatch(job.table, job.ids, job.n, "out", job.out));
      if (!status.ok()) return status;
      requests[i].table = job.table->table.get();
      requests[i].ids = job.ids;
      requests[i].n = job.n;
      requests[i].out = job.out;
      requests[i].found = job.found;
    }
    EmbeddingTable::LookupMany(requests.data(), num_jobs, BatchThreads::Get());
    return status;
  });
}

int mono_table_optimize_many(const MonoOptimizeJob* jobs, int64_t num_jobs) {
  return Guard([&] {
    Status status = CheckJobs(jobs, num_jobs);
    if (!status.ok()) return status;
    const auto locks = LockTables(jobs, num_jobs);
    if (static_cast<int64_t>(locks.size()) != num_jobs) {
      return Status::InvalidArgument("a table comes twice: join its ids into one batch");
    }
    std::vector<WriteSpan> spans(num_jobs);
    std::vector<OptimizeRequest> requests(num_jobs);
    for (int64_t i = 0; i < num_jobs; ++i) {
      const MonoOptimizeJob& job = jobs[i];
      status = CheckBatch(job.table, job.ids, job.n, "gradients", job.gradients);
      if (status.ok()) status = ReadOptions(*job.table, job.options, &requests[i].options);
      if (!status.ok()) return NameJob(i, std::move(status));
      spans[i] = {job.ids, job.n, job.gradients};
      requests[i].table = job.table->table.get();
      requests[i].spans = &spans[i];
      requests[i].num_spans = 1;
    }
    return EmbeddingTable::OptimizeMany(requests.data(), num_jobs, BatchThreads::Get());
  });
}

int mono_table_reinitialize(MonoTable* table, const int64_t* ids, int64_t n, int64_t now,
                            int32_t* existed) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckBatch(table, ids, n, "ids", ids);
    if (!status.ok()) return status;
    std::vector<int32_t> unwanted;
    if (existed == nullptr) unwanted.resize(n);
    return engine_table->Reinitialize(ids, n, now, existed == nullptr ? unwanted.data() : existed);
  });
}

int mono_table_erase(MonoTable* table, const int64_t* ids, int64_t n) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckBatch(table, ids, n, "ids", ids);
    if (status.ok()) engine_table->Erase(ids, n);
    return status;
  });
}

int mono_table_evict(MonoTable* table, int64_t* erased) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    const int64_t count = engine_table->Evict(engine_table->expiry());
    Store(erased, count);
    return Status::Ok();
  });
}

int mono_table_reserve(MonoTable* table, int64_t rows) {
  return WithTable(table,
                   [&](EmbeddingTable* engine_table) { return engine_table->Reserve(rows); });
}

int mono_table_clear(MonoTable* table) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    engine_table->Clear();
    return Status::Ok();
  });
}

int mono_table_rows(MonoTable* table, MonoRowSink sink, void* context) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    if (sink == nullptr) return IsNull("sink");
    const int64_t dim = engine_table->dim();
    std::vector<int64_t> ids;
    std::vector<uint32_t> times;
    std::vector<float> values;
    bool stopped = false;
    const auto hand_out = [&] {
      stopped = !ids.empty() && sink(context, ids.data(), times.data(), values.data(),
                                     static_cast<int64_t>(ids.size())) != 0;
      ids.clear();
      times.clear();
      values.clear();
    };
    engine_table->VisitRows([&](const RowView& row) {
      ids.push_back(row.id);
      times.push_back(row.last_update);
      values.insert(values.end(), row.values, row.values + dim);
      if (static_cast<int64_t>(ids.size()) == kPageRows) hand_out();
      return !stopped;
    });
    if (!stopped) hand_out();
    return stopped ? Status::FailedPrecondition("the receiver of the rows has stopped")
                   : Status::Ok();
  });
}

int mono_table_entries(MonoTable* table, const int64_t* ids, int64_t n, MonoEntrySink sink,
                       void* context) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    if (sink == nullptr) return IsNull("sink");
    Status status = CheckBatch(table, ids, n, "ids", ids);
    std::vector<std::string> entries;
    if (status.ok()) status = engine_table->LookupEntries(ids, n, &entries);
    for (int64_t i = 0; status.ok() && i < n; ++i) {
      if (sink(context, i, entries[i].data(), static_cast<int64_t>(entries[i].size())) != 0) {
        status = Status::FailedPrecondition("the receiver of the entries has stopped");
      }
    }
    return status;
  });
}

int mono_table_save(MonoTable* table, const char* path, int64_t num_files, int64_t* saved,
                    int64_t* expired) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckPath(path);
    if (!status.ok()) return status;
    PosixFileSystem files;
    SaveStats stats;
    status = monolith::engine::SaveTable(&files, *engine_table, path, num_files,
                                         &engine_table->expiry(), &stats);
    Store(saved, stats.saved);
    Store(expired, stats.expired);
    return status;
  });
}

int mono_table_load(MonoTable* table, const char* path, int64_t* loaded, int64_t* state_reset) {
  return WithTable(table, [&](EmbeddingTable* engine_table) {
    Status status = CheckPath(path);
    if (!status.ok()) return status;
    PosixFileSystem files;
    LoadStats stats;
    status = monolith::engine::LoadTable(&files, path, engine_table, &stats);
    Store(loaded, stats.loaded);
    Store(state_reset, stats.state_reset);
    return status;
  });
}
