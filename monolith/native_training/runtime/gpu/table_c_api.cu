// The tables of the C interface.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/c_api.h"
#include "monolith/native_training/runtime/gpu/errors.h"
#include "monolith/native_training/runtime/gpu/gpu_table.h"

struct MonoGpuTable {
  std::unique_ptr<monolith::gpu::GpuTable> table;
};

namespace monolith {
namespace gpu {
namespace {

int ReadKind(const char* what, int64_t segment, int32_t value, int32_t end) {
  if (value >= 0 && value < end) return MONO_GPU_OK;
  return Fail(MONO_GPU_INVALID_ARGUMENT, "segment " + std::to_string(segment) + ": " + what +
                                             " is " + std::to_string(value) + ", want 0 to " +
                                             std::to_string(end - 1));
}

int ReadSegment(int64_t number, const MonoGpuTableSegment& from, engine::SegmentConfig* to) {
  MONO_GPU_TRY(ReadKind("optimizer", number, from.optimizer,
                        static_cast<int32_t>(engine::OptimizerKind::kDc) + 1));
  MONO_GPU_TRY(ReadKind("initializer", number, from.initializer,
                        static_cast<int32_t>(engine::InitializerKind::kRandomUniform) + 1));
  MONO_GPU_TRY(ReadKind("compressor", number, from.compressor,
                        static_cast<int32_t>(engine::CompressorKind::kOneBit) + 1));
  to->dim_size = from.dim;
  engine::OptimizerConfig& o = to->optimizer;
  o.kind = static_cast<engine::OptimizerKind>(from.optimizer);
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
  o.stochastic_rounding_float16 = from.stochastic_rounding_float16 != 0;
  to->initializer.kind = static_cast<engine::InitializerKind>(from.initializer);
  to->initializer.constant = from.constant;
  to->initializer.minval = from.minval;
  to->initializer.maxval = from.maxval;
  to->compressor.kind = static_cast<engine::CompressorKind>(from.compressor);
  to->compressor.range = from.range;
  to->compressor.step_size = from.step_size;
  to->compressor.init_scale = from.init_scale;
  to->compressor.max_scale = from.max_scale;
  to->compressor.amplitude = from.amplitude;
  return MONO_GPU_OK;
}

int ReadConfig(const MonoGpuTableConfig& from, engine::TableConfig* to) {
  for (int64_t i = 0; i < from.num_segments; ++i) {
    to->entry.segments.emplace_back();
    MONO_GPU_TRY(ReadSegment(i, from.segments[i], &to->entry.segments.back()));
  }
  to->initial_capacity = from.initial_capacity;
  to->seed = from.seed;
  to->expiry.default_days = from.default_expire_days;
  for (int64_t i = 0; i < from.num_expire_slots; ++i) {
    to->expiry.slots.push_back({from.expire_slots[i], from.expire_days[i]});
  }
  return MONO_GPU_OK;
}

// A filter behind a function of C.
class CallbackFilter : public engine::OccurrenceFilter {
 public:
  CallbackFilter(MonoGpuFilter filter, void* context) : filter_(filter), context_(context) {}
  void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool /*for_table*/,
              uint8_t* filtered) override {
    filter_(context_, ids, counts, n, filtered);
  }

 private:
  const MonoGpuFilter filter_;
  void* const context_;
};

// The filters of a write.
struct Filters {
  explicit Filters(const MonoGpuWriteOptions& from) : asked(from.filter, from.filter_context) {}
  CallbackFilter asked;
  ChanceFilter chance = {};
};

// The options of the C interface; `filters` have to stay as long as they are used.
int ReadOptions(const MonoGpuWriteOptions& from, Filters* filters, GpuOptimizeOptions* to) {
  if (from.duplicates < MONO_GPU_IDS_ARE_DISTINCT || from.duplicates > MONO_GPU_SUM_GRADIENTS) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "duplicates is " + std::to_string(from.duplicates) + ", want 0 to 2");
  }
  to->write.req_time = from.req_time;
  to->write.duplicates = static_cast<Duplicates>(from.duplicates);
  if (from.not_finite < MONO_GPU_NOT_FINITE_STOP || from.not_finite > MONO_GPU_NOT_FINITE_WRITE) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "not_finite is " + std::to_string(from.not_finite) + ", want 0 to 2");
  }
  to->write.not_finite = static_cast<NotFinite>(from.not_finite);
  to->write.filter = from.filter == nullptr ? nullptr : &filters->asked;
  if (from.chance_filter != nullptr) {
    if (from.filter != nullptr) {
      return Fail(MONO_GPU_INVALID_ARGUMENT, "a write has filter or chance_filter, not both");
    }
    const MonoGpuChanceFilter& chance = *from.chance_filter;
    filters->chance = {chance.seed, chance.batch, chance.thresholds, chance.default_threshold,
                       chance.equal_probability != 0};
    to->write.chance = &filters->chance;
  }
  to->learning_rates = from.learning_rates;
  to->num_learning_rates = from.num_learning_rates;
  to->global_step = from.global_step;
  return MONO_GPU_OK;
}

// Calls run(options) with the options of the C interface.
template <typename Run>
int WithOptions(const MonoGpuWriteOptions& from, const Run& run) {
  Filters filters(from);
  GpuOptimizeOptions options;
  MONO_GPU_TRY(ReadOptions(from, &filters, &options));
  return run(options);
}

int SaveShard(GpuTable* table, void* stream, int32_t shard, const engine::ExpiryPolicy* policy,
              MonoGpuSink sink, void* context, int64_t* num_records, int64_t* live = nullptr) {
  std::string records;
  int64_t saved = 0;
  MONO_GPU_TRY(table->SaveShard(stream, shard, policy, &records, &saved, live));
  if (!records.empty() &&
      sink(context, records.data(), static_cast<int64_t>(records.size())) != 0) {
    return Fail(MONO_GPU_FAILED_PRECONDITION,
                "the records of shard " + std::to_string(shard) + " could not be written");
  }
  *num_records += saved;
  return MONO_GPU_OK;
}

}  // namespace
}  // namespace gpu
}  // namespace monolith

using monolith::gpu::FloatType;
using monolith::gpu::Guard;
using monolith::gpu::SaveShard;
using monolith::gpu::WithOptions;

int mono_gpu_table_create(const MonoGpuTableConfig* config, MonoGpuTable** table) {
  return Guard([&] {
    monolith::engine::TableConfig read;
    MONO_GPU_TRY(monolith::gpu::ReadConfig(*config, &read));
    auto result = std::make_unique<MonoGpuTable>();
    MONO_GPU_TRY(monolith::gpu::GpuTable::Create(read, config->name == nullptr ? "" : config->name,
                                                 &result->table));
    *table = result.release();
    return MONO_GPU_OK;
  });
}

void mono_gpu_table_destroy(MonoGpuTable* table) { delete table; }

int64_t mono_gpu_table_dim(const MonoGpuTable* table) { return table->table->dim(); }

int mono_gpu_table_lookup(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                          float* out, uint8_t* found) {
  return Guard([&] { return table->table->Lookup(stream, ids, n, out, found); });
}

int mono_gpu_table_assign(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                          const float* values, const MonoGpuWriteOptions* options) {
  return Guard([&] {
    return WithOptions(*options, [&](const monolith::gpu::GpuOptimizeOptions& o) {
      return table->table->Assign(stream, ids, n, values, o.write);
    });
  });
}

int mono_gpu_table_assign_add(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                              const float* values, const MonoGpuWriteOptions* options) {
  return Guard([&] {
    return WithOptions(*options, [&](const monolith::gpu::GpuOptimizeOptions& o) {
      return table->table->AssignAdd(stream, ids, n, values, o.write);
    });
  });
}

int mono_gpu_table_optimize(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                            const float* gradients, const MonoGpuWriteOptions* options) {
  return Guard([&] {
    return WithOptions(*options, [&](const monolith::gpu::GpuOptimizeOptions& o) {
      return table->table->Optimize(stream, ids, n, gradients, o);
    });
  });
}

int mono_gpu_table_lookup_many(void* stream, const MonoGpuLookupJob* jobs, int64_t num_jobs) {
  return Guard([&] {
    std::vector<monolith::gpu::GpuLookupJob> all;
    for (int64_t i = 0; i < num_jobs; ++i) {
      all.push_back({jobs[i].table->table.get(), jobs[i].ids, jobs[i].n, jobs[i].out, jobs[i].found,
                     jobs[i].out_stride});
    }
    return monolith::gpu::GpuTable::LookupMany(stream, all.data(), num_jobs);
  });
}

int mono_gpu_table_optimize_many(void* stream, const MonoGpuOptimizeJob* jobs, int64_t num_jobs) {
  return Guard([&] {
    // Jobs that share their options here share them there.
    std::map<const MonoGpuWriteOptions*, monolith::gpu::GpuOptimizeOptions> options;
    std::deque<monolith::gpu::Filters> filters;
    std::vector<monolith::gpu::GpuOptimizeJob> all;
    for (int64_t i = 0; i < num_jobs; ++i) {
      const MonoGpuWriteOptions& from = *jobs[i].options;
      const auto [at, is_new] = options.try_emplace(&from);
      if (is_new) {
        filters.emplace_back(from);
        MONO_GPU_TRY(monolith::gpu::ReadOptions(from, &filters.back(), &at->second));
      }
      const MonoGpuOptimizeJob& job = jobs[i];
      monolith::gpu::GpuTable* const table = job.table->table.get();
      const int64_t stride = job.gradient_stride == 0 ? table->dim() : job.gradient_stride;
      all.push_back({table,
                     job.ids,
                     job.n,
                     {job.gradients, stride, static_cast<FloatType>(job.gradient_type)},
                     &at->second});
    }
    return monolith::gpu::GpuTable::OptimizeMany(stream, all.data(), num_jobs);
  });
}

int mono_gpu_keep_stream(void* stream) {
  return Guard([&] {
    monolith::gpu::KeepStream(stream);
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_reinitialize(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                                int64_t now, int32_t* existed) {
  return Guard([&] { return table->table->Reinitialize(stream, ids, n, now, existed); });
}

int mono_gpu_table_erase(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n) {
  return Guard([&] { return table->table->Erase(stream, ids, n); });
}

int mono_gpu_table_evict(MonoGpuTable* table, void* stream, int64_t* erased) {
  return Guard([&] { return table->table->Evict(stream, table->table->expiry(), erased); });
}

int mono_gpu_table_reserve(MonoGpuTable* table, void* stream, int64_t rows) {
  return Guard([&] { return table->table->Reserve(stream, rows); });
}

int mono_gpu_table_clear(MonoGpuTable* table, void* stream) {
  return Guard([&] { return table->table->Clear(stream); });
}

int mono_gpu_table_stats(MonoGpuTable* table, MonoGpuTableStats* stats) {
  return Guard([&] {
    monolith::gpu::GpuTableStats s;
    MONO_GPU_TRY(table->table->Stats(&s));
    *stats = {s.size,     s.row_bytes, s.index_bytes,   s.other_bytes,
              s.slots,    s.free_rows, s.spilled,       s.nonfinite_gradients,
              s.filtered, s.expired,   s.max_update_ts, s.rebuilds,
              s.waits};
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_check(MonoGpuTable* table) {
  return Guard([&] { return table->table->Check(); });
}

int mono_gpu_table_save_shard(MonoGpuTable* table, void* stream, int32_t shard,
                              int32_t leave_out_expired, MonoGpuSink sink, void* context,
                              int64_t* num_records) {
  return Guard([&] {
    return SaveShard(table->table.get(), stream, shard,
                     leave_out_expired ? &table->table->expiry() : nullptr, sink, context,
                     num_records);
  });
}

int mono_gpu_table_save_shard_until(MonoGpuTable* table, void* stream, int32_t shard,
                                    uint32_t default_days, const uint32_t* slots,
                                    const uint32_t* days, int64_t num_slots, MonoGpuSink sink,
                                    void* context, int64_t* num_records, int64_t* num_expired) {
  return Guard([&] {
    monolith::engine::ExpiryConfig config;
    config.default_days = default_days;
    for (int64_t i = 0; i < num_slots; ++i) config.slots.push_back({slots[i], days[i]});
    monolith::engine::ExpiryPolicy policy;
    const monolith::engine::Status status = monolith::engine::ExpiryPolicy::Create(config, &policy);
    if (!status.ok()) return monolith::gpu::Fail(MONO_GPU_INVALID_ARGUMENT, status.message);
    int64_t live = 0;
    const int64_t before = *num_records;
    MONO_GPU_TRY(
        SaveShard(table->table.get(), stream, shard, &policy, sink, context, num_records, &live));
    *num_expired += live - (*num_records - before);
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_save_ids(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                            MonoGpuSink sink, void* context) {
  return Guard([&] {
    std::string records;
    std::vector<int64_t> sizes;
    MONO_GPU_TRY(table->table->SaveIds(stream, ids, n, &records, &sizes));
    const char* at = records.data();
    for (const int64_t size : sizes) {
      if (sink(context, at, size) != 0) {
        return monolith::gpu::Fail(MONO_GPU_FAILED_PRECONDITION,
                                   "the records of ids could not be written");
      }
      at += size;
    }
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_row_numbers(MonoGpuTable* table, void* stream, const int64_t* ids, int64_t n,
                               uint32_t* numbers) {
  return Guard([&] {
    monolith::gpu::ExportedRows exported;
    MONO_GPU_TRY(table->table->ExportIds(stream, ids, n, &exported));
    std::copy(exported.numbers.begin(), exported.numbers.end(), numbers);
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_load_records(MonoGpuTable* table, void* stream, const char* const* records,
                                const int64_t* sizes, int64_t n, int64_t* state_reset) {
  return Guard([&] {
    std::vector<monolith::engine::RecordView> views;
    views.reserve(static_cast<size_t>(n > 0 ? n : 0));
    for (int64_t i = 0; i < n; ++i) views.push_back({records[i], sizes[i]});
    return table->table->LoadRecords(stream, views.data(), static_cast<int64_t>(views.size()),
                                     state_reset);
  });
}

int mono_gpu_table_load(MonoGpuTable* table, void* stream, const char* bytes, int64_t size,
                        int64_t* consumed, int64_t* num_records, int64_t* state_reset) {
  return Guard([&] {
    using monolith::engine::RecordResult;
    std::vector<monolith::engine::RecordView> views;
    *consumed = 0;
    while (*consumed < size) {
      monolith::engine::RecordView view;
      int64_t used = 0;
      const RecordResult result = monolith::engine::ReadRecord(bytes + *consumed, size - *consumed,
                                                               &view.data, &view.size, &used);
      if (result == RecordResult::kIncomplete) break;
      if (result == RecordResult::kCorrupt) {
        return monolith::gpu::Fail(MONO_GPU_FAILED_PRECONDITION,
                                   "record " + std::to_string(*num_records + views.size()) +
                                       " is damaged: its checksum is another");
      }
      views.push_back(view);
      *consumed += used;
    }
    MONO_GPU_TRY(table->table->LoadRecords(stream, views.data(), static_cast<int64_t>(views.size()),
                                           state_reset));
    *num_records += static_cast<int64_t>(views.size());
    return MONO_GPU_OK;
  });
}

int mono_gpu_table_set_budget(int64_t bytes) {
  monolith::gpu::SetTableBudget(bytes);
  return MONO_GPU_OK;
}
