// Runs the same random calls on a GPU table and on the engine's table and compares what they hold.
// Needs no test library: a program on a machine with a GPU uses it, too.
#ifndef MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DIFFERENTIAL_H_
#define MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DIFFERENTIAL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/c_api.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "tests/native_training/runtime/gpu/sanitized.h"

namespace monolith {
namespace gpu {

// Returns its text from the function around it, with the place.
#define MONO_DIFF_CHECK(condition, text)                                         \
  do {                                                                           \
    if (!(condition)) return std::string(#condition) + ": " + std::string(text); \
  } while (false)

// Device memory of one array.
template <typename T>
class Array {
 public:
  explicit Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    if (mono_gpu_write_now(values.data(), data_, n_ * sizeof(T)) != MONO_GPU_OK) std::abort();
  }
  explicit Array(int64_t n) : n_(n) {
    void* memory = nullptr;
    if (mono_gpu_allocate(n * sizeof(T), &memory) != MONO_GPU_OK) std::abort();
    data_ = static_cast<T*>(memory);
  }
  ~Array() { mono_gpu_free(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(n_);
    if (mono_gpu_synchronize(nullptr) != MONO_GPU_OK ||
        mono_gpu_read_now(data_, values.data(), n_ * sizeof(T)) != MONO_GPU_OK) {
      std::fprintf(stderr, "%s\n", mono_gpu_last_error());
      std::abort();
    }
    return values;
  }

 private:
  int64_t n_;
  T* data_ = nullptr;
};

struct TableDeleter {
  void operator()(MonoGpuTable* table) const { mono_gpu_table_destroy(table); }
};
using TablePointer = std::unique_ptr<MonoGpuTable, TableDeleter>;

inline MonoGpuTableSegment ToC(const engine::SegmentConfig& s) {
  MonoGpuTableSegment c = {};
  const engine::OptimizerConfig& o = s.optimizer;
  c.dim = s.dim_size;
  c.optimizer = static_cast<int32_t>(o.kind);
  c.initializer = static_cast<int32_t>(s.initializer.kind);
  c.compressor = static_cast<int32_t>(s.compressor.kind);
  c.use_nesterov = o.use_nesterov;
  c.decay_by_step = o.decay_by_step;
  c.decouple_weight_decay = o.decouple_weight_decay;
  c.stochastic_rounding_float16 = o.stochastic_rounding_float16;
  c.initial_accumulator_value = o.initial_accumulator_value;
  c.weight_decay = o.weight_decay;
  c.beta = o.beta;
  c.l1 = o.l1;
  c.l2 = o.l2;
  c.averaging_ratio = o.averaging_ratio;
  c.epsilon = o.epsilon;
  c.beta1 = o.beta1;
  c.beta2 = o.beta2;
  c.momentum = o.momentum;
  c.constant = s.initializer.constant;
  c.minval = s.initializer.minval;
  c.maxval = s.initializer.maxval;
  c.range = s.compressor.range;
  c.init_scale = s.compressor.init_scale;
  c.max_scale = s.compressor.max_scale;
  c.amplitude = s.compressor.amplitude;
  c.step_size = s.compressor.step_size;
  return c;
}

inline int CreateTable(const engine::TableConfig& config, TablePointer* table) {
  std::vector<MonoGpuTableSegment> segments;
  for (const engine::SegmentConfig& segment : config.entry.segments) {
    segments.push_back(ToC(segment));
  }
  std::vector<uint32_t> slots, days;
  for (const engine::SlotExpireTime& slot : config.expiry.slots) {
    slots.push_back(slot.slot);
    days.push_back(slot.days);
  }
  MonoGpuTableConfig c = {segments.data(),
                          static_cast<int64_t>(segments.size()),
                          config.initial_capacity,
                          config.seed,
                          config.expiry.default_days,
                          0,
                          slots.data(),
                          days.data(),
                          static_cast<int64_t>(slots.size()),
                          "user"};
  MonoGpuTable* made = nullptr;
  const int code = mono_gpu_table_create(&c, &made);
  table->reset(made);
  return code;
}

constexpr int kKindsOfCalls = 12;

struct DifferentialOptions {
  uint32_t seed = 1;
  int steps = Sized(30, kKindsOfCalls);
  int64_t max_batch = Sized(400, 150);
  int64_t distinct_ids = Sized(600, 200);
  float tolerance = 4e-6f;  // relative, of one step
  uint32_t threshold = 0;   // of an occurrence filter for each table; 0: none
  bool skewed = false;      // batches of one id, half of one id, of a Zipf law, without equal ids
  // One row of this number is not finite, in batches of three of four calls; 0: none.
  int bad_rows = 0;
  int32_t not_finite = MONO_GPU_NOT_FINITE_STOP;
};

class Differential {
 public:
  Differential(const engine::TableConfig& config, const DifferentialOptions& options)
      : config_(config), options_(options), random_(options.seed) {
    const int64_t special[] = {0,
                               1,
                               -1,
                               std::numeric_limits<int64_t>::min(),
                               std::numeric_limits<int64_t>::max(),
                               0xffffffffll};
    ids_.assign(std::begin(special), std::end(special));
    while (static_cast<int64_t>(ids_.size()) < options.distinct_ids) {
      ids_.push_back(
          static_cast<int64_t>((uint64_t{random_()} << 32 | random_()) >> (random_() % 3 * 20)));
    }
    std::sort(ids_.begin(), ids_.end());
    ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
  }

  // Returns an empty text, or what differs.
  std::string Run() {
    MONO_DIFF_CHECK(CreateTable(config_, &gpu_) == MONO_GPU_OK, mono_gpu_last_error());
    const engine::Status made = engine::EmbeddingTable::Create(config_, &cpu_);
    MONO_DIFF_CHECK(made.ok(), made.message);
    if (options_.threshold > 0) {
      for (auto* const filter : {&gpu_filter_, &cpu_filter_}) {
        const engine::Status status =
            engine::SlidingHashFilter::Create(1 << 16, 4, {options_.threshold, {}}, filter);
        MONO_DIFF_CHECK(status.ok(), status.message);
      }
    }
    for (int step = 0; step < options_.steps; ++step) {
      // Few steps have each kind once, and what takes rows away finds some.
      constexpr int kInTurn[kKindsOfCalls] = {0, 6, 1, 7, 9, 2, 8, 3, 10, 11, 4, 5};
      const int call = IsSanitized() ? kInTurn[step % kKindsOfCalls]
                                     : static_cast<int>(random_() % kKindsOfCalls);
      std::string error = Call(call, step);
      if (error.empty() && (step % 4 == 3 || step + 1 == options_.steps)) error = Compare();
      if (!error.empty()) {
        return "step " + std::to_string(step) + ", call " + std::to_string(call) + ": " + error;
      }
    }
    return CompareFiles();
  }

  MonoGpuTable* gpu() const { return gpu_.get(); }

  std::string Compare() {
    const int64_t n = static_cast<int64_t>(ids_.size()), dim = cpu_->dim();
    Array<int64_t> ids(ids_);
    Array<float> out(n * dim);
    Array<uint8_t> found(n);
    MONO_DIFF_CHECK(mono_gpu_table_lookup(gpu_.get(), nullptr, ids.data(), n, out.data(),
                                          found.data()) == MONO_GPU_OK,
                    mono_gpu_last_error());
    const std::vector<float> got = out.Read();
    const std::vector<uint8_t> there = found.Read();
    std::vector<float> want(n * dim);
    std::vector<uint8_t> wanted(n);
    cpu_->Lookup(ids_.data(), n, want.data(), wanted.data());
    for (int64_t i = 0; i < n; ++i) {
      MONO_DIFF_CHECK(there[i] == wanted[i], "id " + std::to_string(ids_[i]) + " is " +
                                                 (there[i] ? "" : "not ") + "in the GPU table");
    }
    for (int64_t i = 0; i < n * dim; ++i) {
      const float bound = options_.tolerance * (1.0f + std::fabs(want[i]));
      const bool equal = std::fabs(got[i] - want[i]) <= bound ||
                         (std::isnan(got[i]) && std::isnan(want[i])) || got[i] == want[i];
      MONO_DIFF_CHECK(equal, "id " + std::to_string(ids_[i / dim]) + ", element " +
                                 std::to_string(i % dim) + ": " + std::to_string(got[i]) +
                                 ", want " + std::to_string(want[i]));
    }
    MonoGpuTableStats stats;
    MONO_DIFF_CHECK(mono_gpu_table_stats(gpu_.get(), &stats) == MONO_GPU_OK, mono_gpu_last_error());
    MONO_DIFF_CHECK(stats.size == cpu_->Size(),
                    std::to_string(stats.size) + ", want " + std::to_string(cpu_->Size()));
    MONO_DIFF_CHECK(stats.nonfinite_gradients == cpu_->Stats().nonfinite_gradients,
                    std::to_string(stats.nonfinite_gradients));
    MONO_DIFF_CHECK(
        stats.filtered == cpu_->Stats().filtered,
        std::to_string(stats.filtered) + ", want " + std::to_string(cpu_->Stats().filtered));
    MONO_DIFF_CHECK(stats.max_update_ts == cpu_->MaxUpdateTs(),
                    std::to_string(stats.max_update_ts));
    return "";
  }

  // GPU -> records -> engine -> records -> GPU: every byte of every row is the same at the end.
  std::string CompareFiles() {
    std::vector<std::string> first, second;
    std::string error = SaveGpu(gpu_.get(), &first);
    if (!error.empty()) return error;
    const std::unique_ptr<engine::EmbeddingTable> loaded = cpu_->NewEmptyTwin();
    std::vector<engine::RecordView> views;
    for (const std::string& record : first) {
      views.push_back({record.data(), static_cast<int64_t>(record.size())});
    }
    engine::LoadStats stats;
    engine::Status status =
        loaded->LoadRecords(views.data(), static_cast<int64_t>(views.size()), &stats);
    MONO_DIFF_CHECK(status.ok(), status.message);
    MONO_DIFF_CHECK(loaded->Size() == cpu_->Size(), "rows after loading the GPU's records");
    MONO_DIFF_CHECK(stats.state_reset == 0, "state that the engine does not know");
    std::vector<const char*> records;
    std::vector<int64_t> sizes;
    std::vector<std::string> pages;
    for (int shard = 0; shard < engine::EmbeddingTable::NumShards(); ++shard) {
      engine::ShardCursor cursor;
      while (!cursor.done) {
        pages.emplace_back();
        std::vector<int64_t> page_sizes;
        int64_t saved = 0;
        status = loaded->SaveShard(shard, nullptr, 1 << 20, false, &cursor, &pages.back(),
                                   &page_sizes, &saved);
        MONO_DIFF_CHECK(status.ok(), status.message);
        sizes.insert(sizes.end(), page_sizes.begin(), page_sizes.end());
      }
    }
    size_t at = 0;
    for (const std::string& page : pages) {
      for (size_t offset = 0; offset < page.size(); offset += static_cast<size_t>(sizes[at++])) {
        records.push_back(page.data() + offset);
      }
    }
    TablePointer back;
    MONO_DIFF_CHECK(CreateTable(config_, &back) == MONO_GPU_OK, mono_gpu_last_error());
    int64_t state_reset = 0;
    MONO_DIFF_CHECK(mono_gpu_table_load_records(back.get(), nullptr, records.data(), sizes.data(),
                                                static_cast<int64_t>(records.size()),
                                                &state_reset) == MONO_GPU_OK,
                    mono_gpu_last_error());
    MONO_DIFF_CHECK(state_reset == 0, "state that the GPU table does not know");
    error = SaveGpu(back.get(), &second);
    if (!error.empty()) return error;
    std::sort(first.begin(), first.end());
    std::sort(second.begin(), second.end());
    MONO_DIFF_CHECK(first == second, "records that went through both tables");
    return "";
  }

 private:
  // The records of all shards, without their frames.
  static std::string SaveGpu(MonoGpuTable* table, std::vector<std::string>* records) {
    std::string all;
    const auto append = [](void* to, const char* bytes, int64_t size) {
      static_cast<std::string*>(to)->append(bytes, static_cast<size_t>(size));
      return 0;
    };
    int64_t saved = 0;
    for (int shard = 0; shard < 64; ++shard) {
      MONO_DIFF_CHECK(
          mono_gpu_table_save_shard(table, nullptr, shard, 0, append, &all, &saved) == MONO_GPU_OK,
          mono_gpu_last_error());
    }
    for (size_t at = 0; at < all.size();) {
      uint64_t size;
      std::memcpy(&size, all.data() + at, sizeof(size));
      records->push_back(all.substr(at + engine::kRecordHeaderBytes, size));
      at += engine::kRecordHeaderBytes + size + engine::kRecordFooterBytes;
    }
    MONO_DIFF_CHECK(static_cast<int64_t>(records->size()) == saved, "number of records");
    return "";
  }

  std::vector<int64_t> SomeIds(bool distinct) {
    const int64_t sizes[] = {0, 1, 31, 33, 64};
    int64_t n = random_() % 3 == 0 ? sizes[random_() % 5] : random_() % options_.max_batch;
    std::vector<int64_t> some;
    if (options_.skewed && !distinct) {
      const uint32_t kind = random_() % 4;
      if (random_() % 4 != 0) n = options_.max_batch - random_() % 3;
      const size_t hot = random_() % ids_.size();
      for (int64_t i = 0; i < n; ++i) {
        const double share = static_cast<double>(random_()) / 4294967296.0;
        const size_t zipf = static_cast<size_t>(std::pow(static_cast<double>(ids_.size()), share));
        some.push_back(kind == 0                         ? ids_[hot]
                       : kind == 1 && random_() % 2 == 0 ? ids_[hot]
                       : kind == 2                       ? ids_[zipf - 1]
                                                         : ids_[random_() % ids_.size()]);
      }
    } else if (distinct) {
      some = ids_;
      std::shuffle(some.begin(), some.end(), random_);
      some.resize(std::min<size_t>(static_cast<size_t>(n), some.size()));
    } else {
      // From a part of the ids, so that they come several times.
      const size_t part = std::max<size_t>(1, ids_.size() / (1 + random_() % 8));
      for (int64_t i = 0; i < n; ++i) some.push_back(ids_[random_() % part]);
    }
    return some;
  }

  std::vector<float> SomeValues(int64_t n) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> values(n);
    for (float& value : values) {
      value = uniform(random_);
      // Sums of many have the same bits in any order: what is compared is what they are used for.
      if (options_.skewed) value = std::round(value * 1024) / 1024;
    }
    return values;
  }

  // Some of the rows are not finite; all of them, of an id that a filter may drop: a filter
  // is asked for every row of such an id where one is finite, which the engine does not ask for.
  void Spoil(const std::vector<int64_t>& ids, std::vector<float>* values) {
    if (options_.bad_rows == 0 || random_() % 4 == 0) return;
    const float kinds[] = {std::numeric_limits<float>::quiet_NaN(),
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity()};
    const uint64_t some = random_();
    const int64_t dim = cpu_->dim();
    for (size_t i = 0; i < ids.size(); ++i) {
      const uint64_t mixed = (static_cast<uint64_t>(ids[i]) + some) * 0x9e3779b97f4a7c15ull >> 32;
      const uint64_t draw = options_.threshold > 0 ? mixed : random_();
      if (draw % options_.bad_rows == 0)
        (*values)[i * dim + random_() % dim] = kinds[random_() % 3];
    }
  }

  // The GPU table tells of the rows that a write of the engine has refused.
  std::string CompareRefused(engine::Status* status) {
    const int code = mono_gpu_table_check(gpu_.get());
    if (status->ok()) {
      MONO_DIFF_CHECK(code == MONO_GPU_OK, mono_gpu_last_error());
      return "";
    }
    MONO_DIFF_CHECK(code == MONO_GPU_REFUSED, status->message);
    const std::string text = mono_gpu_last_error();
    const size_t begin = status->message.find("those of ");
    MONO_DIFF_CHECK(begin != std::string::npos, status->message);
    const std::string rows =
        status->message.substr(begin, status->message.find(':', begin) - begin);
    MONO_DIFF_CHECK(text.find(rows + ":") != std::string::npos, text + ", want " + rows);
    *status = engine::Status::Ok();
    return "";
  }

  std::string Call(int call, int step) {
    const bool distinct = random_() % 2 == 0;
    const std::vector<int64_t> ids = SomeIds(distinct);
    const int64_t n = static_cast<int64_t>(ids.size());
    std::vector<float> values = SomeValues(n * cpu_->dim());
    Spoil(ids, &values);
    Array<int64_t> device_ids(ids);
    Array<float> device_values(values);
    const int64_t time = 1000000000 + step * 86400;
    std::vector<float> rates;
    for (int64_t s = 0; s < cpu_->num_segments(); ++s) {
      rates.push_back(0.01f * static_cast<float>(1 + random_() % 10));
    }
    const bool sum = random_() % 2 == 0;
    MonoGpuWriteOptions gpu_options = {};
    gpu_options.req_time = time;
    gpu_options.global_step = step;
    gpu_options.learning_rates = rates.data();
    gpu_options.num_learning_rates = static_cast<int64_t>(rates.size());
    gpu_options.duplicates = distinct ? MONO_GPU_IDS_ARE_DISTINCT
                             : sum    ? MONO_GPU_SUM_GRADIENTS
                                      : MONO_GPU_STEP_FOR_EACH;
    gpu_options.not_finite = options_.not_finite;
    if (gpu_filter_ != nullptr) {
      gpu_options.filter = [](void* filter, const int64_t* some, const uint32_t* counts,
                              int64_t count, uint8_t* dropped) {
        static_cast<engine::OccurrenceFilter*>(filter)->Filter(some, counts, count, true, dropped);
      };
      gpu_options.filter_context = gpu_filter_.get();
    }
    engine::WriteOptions write;
    write.req_time = time;
    write.filter = cpu_filter_.get();
    write.non_finite = options_.not_finite == MONO_GPU_NOT_FINITE_STOP ? engine::NonFinite::kStop
                       : options_.not_finite == MONO_GPU_NOT_FINITE_SKIP
                           ? engine::NonFinite::kSkip
                           : engine::NonFinite::kWrite;
    engine::Status status;
    int code = MONO_GPU_OK;
    if (call < 6) {
      engine::OptimizeOptions optimize;
      optimize.write = write;
      optimize.learning_rates = rates.data();
      optimize.num_learning_rates = static_cast<int64_t>(rates.size());
      optimize.global_step = step;
      optimize.dedup = !distinct && sum;
      status = cpu_->Optimize({ids.data(), n, values.data()}, optimize);
      code = mono_gpu_table_optimize(gpu_.get(), nullptr, device_ids.data(), n,
                                     device_values.data(), &gpu_options);
    } else if (call == 6) {
      status = cpu_->Assign({ids.data(), n, values.data()}, write);
      code = mono_gpu_table_assign(gpu_.get(), nullptr, device_ids.data(), n, device_values.data(),
                                   &gpu_options);
    } else if (call == 7) {
      status = cpu_->AssignAdd({ids.data(), n, values.data()}, write);
      code = mono_gpu_table_assign_add(gpu_.get(), nullptr, device_ids.data(), n,
                                       device_values.data(), &gpu_options);
    } else if (call == 8) {
      std::vector<int32_t> want(n, -1);
      status = cpu_->Reinitialize(ids.data(), n, time, want.data());
      Array<int32_t> existed(want);
      code = mono_gpu_table_reinitialize(gpu_.get(), nullptr, device_ids.data(), n, time,
                                         existed.data());
      MONO_DIFF_CHECK(existed.Read() == want, "existed");
    } else if (call == 9) {
      cpu_->Erase(ids.data(), n);
      code = mono_gpu_table_erase(gpu_.get(), nullptr, device_ids.data(), n);
    } else if (call == 10) {
      const int64_t want = cpu_->Evict(cpu_->expiry());
      int64_t erased = -1;
      code = mono_gpu_table_evict(gpu_.get(), nullptr, &erased);
      MONO_DIFF_CHECK(code != MONO_GPU_OK || erased == want,
                      std::to_string(erased) + ", want " + std::to_string(want));
    } else if (random_() % 4 == 0) {
      cpu_->Clear();
      code = mono_gpu_table_clear(gpu_.get(), nullptr);
    } else {
      const int64_t rows = static_cast<int64_t>(random_() % 3000);
      status = cpu_->Reserve(rows);
      code = mono_gpu_table_reserve(gpu_.get(), nullptr, rows);
    }
    MONO_DIFF_CHECK(code == MONO_GPU_OK, mono_gpu_last_error());
    const std::string refused = CompareRefused(&status);
    if (!refused.empty()) return refused;
    MONO_DIFF_CHECK(mono_gpu_synchronize(nullptr) == MONO_GPU_OK, mono_gpu_last_error());
    return "";
  }

  const engine::TableConfig config_;
  const DifferentialOptions options_;
  std::mt19937 random_;
  std::vector<int64_t> ids_;
  TablePointer gpu_;
  std::unique_ptr<engine::EmbeddingTable> cpu_;
  std::unique_ptr<engine::SlidingHashFilter> gpu_filter_, cpu_filter_;
};

// A configuration by number: every optimizer alone, in several dims, and mixtures.
inline engine::TableConfig DifferentialConfig(int number) {
  constexpr int kOptimizers = 14;
  std::mt19937 random(static_cast<uint32_t>(number) + 77);
  const int64_t dims[] = {16, 1, 5, 13, 64, 128, 4, 32};
  engine::TableConfig config;
  config.seed = 1234567 + static_cast<uint64_t>(number);
  config.expiry.default_days = 12;
  config.expiry.slots = {{0, 5}, {3, 2}};
  const int segments = number < 2 * kOptimizers ? 1 : 1 + static_cast<int>(random() % 4);
  for (int s = 0; s < segments; ++s) {
    engine::SegmentConfig segment;
    segment.dim_size = dims[(number / kOptimizers + random()) % 8];
    if (number < kOptimizers) segment.dim_size = 16;
    engine::OptimizerConfig& o = segment.optimizer;
    const int kind =
        number < 2 * kOptimizers ? number % kOptimizers : static_cast<int>(random() % kOptimizers);
    o.kind =
        static_cast<engine::OptimizerKind>(static_cast<int>(engine::OptimizerKind::kSgd) + kind);
    if (o.kind == engine::OptimizerKind::kBatchSoftmax) segment.dim_size = 1;
    o.weight_decay = random() % 2 == 0 ? 0.0f : 0.01f;
    o.beta = 0.5f;
    o.l1 = 0.01f;
    o.l2 = 0.02f;
    o.use_nesterov = random() % 2 == 0;
    o.decay_by_step = number / kOptimizers % 2 == 1;  // Adam alone reads it
    o.decouple_weight_decay = random() % 2 == 0;
    segment.initializer.kind = static_cast<engine::InitializerKind>(
        static_cast<int>(engine::InitializerKind::kZeros) + static_cast<int>(random() % 4));
    if (number % 2 == 0) segment.initializer.kind = engine::InitializerKind::kRandomUniform;
    segment.initializer.constant = 0.25f;
    config.entry.segments.push_back(segment);
  }
  return config;
}

constexpr int kDifferentialConfigs = 48;

constexpr int kSkewedConfigs = 28;

// Every optimizer in dims from 1 to 256, for skewed batches.
inline engine::TableConfig SkewedConfig(int number) {
  constexpr int64_t kDims[] = {1, 3, 16, 64, 256, 8, 100};
  engine::TableConfig config = DifferentialConfig(number % 14);
  engine::SegmentConfig& segment = config.entry.segments[0];
  segment.optimizer.decay_by_step = number >= kSkewedConfigs / 2;
  if (segment.optimizer.kind != engine::OptimizerKind::kBatchSoftmax) {
    segment.dim_size = kDims[(number + number / 14) % 7];
  }
  return config;
}

inline DifferentialOptions SkewedOptions(int number) {
  DifferentialOptions options;
  options.seed = static_cast<uint32_t>(number) + 1000;
  options.skewed = true;
  options.steps = Sized(10, 6);
  // Equal ids of more than 4096 are looked for by many blocks.
  options.max_batch = number % 7 == 0 ? Sized(6000, 150) : Sized(300, 100);
  options.distinct_ids = Sized(200, 60);
  return options;
}

// Batches with rows that are not finite: of all configurations, then of the skewed ones, then as
// they are for the two optimizers that have nothing but sums.
constexpr int kBadRowsConfigs = kDifferentialConfigs + kSkewedConfigs + 2;

inline engine::TableConfig BadRowsConfig(int number) {
  if (number < kDifferentialConfigs) return DifferentialConfig(number);
  number -= kDifferentialConfigs;
  return number < kSkewedConfigs ? SkewedConfig(number)
                                 : DifferentialConfig(number - kSkewedConfigs);
}

inline DifferentialOptions BadRowsOptions(int number) {
  DifferentialOptions options;
  const int skewed = number - kDifferentialConfigs;
  if (skewed >= 0 && skewed < kSkewedConfigs) options = SkewedOptions(skewed);
  options.seed = static_cast<uint32_t>(number) + 5000;
  // One row of many equal ids spoils the sum.
  options.bad_rows = options.skewed ? 200 : number % 3 == 0 ? 2 : 20;
  if (number % 4 == 3 && number < kDifferentialConfigs) options.threshold = 3;
  if (skewed >= kSkewedConfigs) options.not_finite = MONO_GPU_NOT_FINITE_WRITE;
  return options;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_DIFFERENTIAL_H_
