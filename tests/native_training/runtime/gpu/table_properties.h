// A GPU table's promises beside being equal to the engine's: calls for many tables equal single
// ones, the same calls give the same table, growth and memory that runs out lose nothing. Each
// function returns an empty text, or what is wrong. Needs no test library.
#ifndef MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_PROPERTIES_H_
#define MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_PROPERTIES_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/random_bits.h"
#include "tests/native_training/runtime/gpu/table_differential.h"

namespace monolith {
namespace gpu {

#define MONO_DIFF_CALL(call) MONO_DIFF_CHECK((call) == MONO_GPU_OK, mono_gpu_last_error())

inline engine::TableConfig OneSegment(
    int64_t dim, engine::OptimizerKind kind,
    engine::InitializerKind initializer = engine::InitializerKind::kRandomUniform) {
  engine::TableConfig config;
  engine::SegmentConfig segment;
  segment.dim_size = dim;
  segment.optimizer.kind = kind;
  segment.initializer.kind = initializer;
  config.entry.segments.push_back(segment);
  config.seed = 99;
  return config;
}

// All records of a table, in the order of their bytes, and where the rows lie.
inline std::string Dump(MonoGpuTable* table, const std::vector<int64_t>& ids,
                        std::vector<std::string>* records, std::vector<uint32_t>* numbers) {
  Array<int64_t> device_ids(ids);
  const int64_t n = static_cast<int64_t>(ids.size());
  numbers->assign(ids.size(), 0);
  MONO_DIFF_CALL(mono_gpu_table_row_numbers(table, nullptr, device_ids.data(), n, numbers->data()));
  const auto append = [](void* to, const char* bytes, int64_t size) {
    static_cast<std::vector<std::string>*>(to)->emplace_back(bytes, static_cast<size_t>(size));
    return 0;
  };
  records->clear();
  MONO_DIFF_CALL(mono_gpu_table_save_ids(table, nullptr, device_ids.data(), n, append, records));
  return "";
}

inline std::string LookUp(MonoGpuTable* table, const std::vector<int64_t>& ids,
                          std::vector<float>* values, std::vector<uint8_t>* found) {
  const int64_t n = static_cast<int64_t>(ids.size());
  Array<int64_t> device_ids(ids);
  Array<float> out(n * mono_gpu_table_dim(table));
  Array<uint8_t> there(n);
  MONO_DIFF_CALL(
      mono_gpu_table_lookup(table, nullptr, device_ids.data(), n, out.data(), there.data()));
  *values = out.Read();
  *found = there.Read();
  return "";
}

// The jobs of many tables in one call give the bits that one call for each table gives.
inline std::string ManyTablesEqualSingleOnes() {
  using engine::OptimizerKind;
  std::vector<engine::TableConfig> configs;
  for (const int64_t dim : {16, 16, 64, 8, 5, 1}) {
    configs.push_back(OneSegment(dim, OptimizerKind::kAdagrad));
  }
  configs.push_back(OneSegment(16, OptimizerKind::kSgd));
  configs.push_back(OneSegment(16, OptimizerKind::kAdam));
  configs.push_back(OneSegment(6, OptimizerKind::kAdam));
  configs.push_back(OneSegment(16, OptimizerKind::kAdagrad));
  configs.back().entry.segments[0].compressor.kind = engine::CompressorKind::kFixedR8;
  // Each number of lanes of a row, and of floats that a lane copies at once.
  for (const int64_t dim : {32, 128, 6, 10, 18, 34, 13, 33}) {
    configs.push_back(OneSegment(dim, OptimizerKind::kSgd));
  }
  // More than the parameters of a kernel hold.
  for (int i = 0; i < Sized(66, 20); ++i) configs.push_back(OneSegment(4, OptimizerKind::kSgd));
  std::vector<TablePointer> many(configs.size()), single(configs.size());
  for (size_t t = 0; t < configs.size(); ++t) {
    MONO_DIFF_CALL(CreateTable(configs[t], &many[t]));
    MONO_DIFF_CALL(CreateTable(configs[t], &single[t]));
  }
  std::mt19937 random(5);
  const float rate = 0.1f;
  for (int step = 0; step < 6; ++step) {
    // 10 tables in every second step: those go to the kernel as parameters.
    const size_t tables = step % 2 == 0 ? 9 : configs.size();
    MonoGpuWriteOptions options = {};
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    options.req_time = 1000 + step;
    options.global_step = step;
    options.duplicates = step % 3 == 0   ? MONO_GPU_SUM_GRADIENTS
                         : step % 3 == 1 ? MONO_GPU_STEP_FOR_EACH
                                         : MONO_GPU_IDS_ARE_DISTINCT;
    std::vector<std::unique_ptr<Array<int64_t>>> ids;
    std::vector<std::unique_ptr<Array<float>>> values;
    std::vector<MonoGpuOptimizeJob> jobs;
    std::vector<std::vector<int64_t>> all_ids(tables);
    std::vector<std::vector<float>> all_values(tables);
    // Spans of a table, with those of others in between.
    for (int span = 0; span < 3; ++span) {
      for (size_t t = 0; t < tables; ++t) {
        const int64_t dim = mono_gpu_table_dim(many[t].get());
        const int64_t n = span == 1 ? 0 : static_cast<int64_t>(random() % 150);
        std::vector<int64_t> some(n);
        std::vector<float> gradients(n * dim);
        for (int64_t i = 0; i < n; ++i) {
          some[i] = options.duplicates == MONO_GPU_IDS_ARE_DISTINCT
                        ? span * 1000 + i
                        : static_cast<int64_t>(random() % 100);
        }
        for (float& g : gradients) g = static_cast<float>(random() % 1000) / 1000 - 0.5f;
        all_ids[t].insert(all_ids[t].end(), some.begin(), some.end());
        all_values[t].insert(all_values[t].end(), gradients.begin(), gradients.end());
        ids.push_back(std::make_unique<Array<int64_t>>(some));
        values.push_back(std::make_unique<Array<float>>(gradients));
        jobs.push_back({many[t].get(), ids.back()->data(), n, values.back()->data(), &options, 0,
                        MONO_GPU_FLOAT32, 0});
      }
    }
    MONO_DIFF_CALL(
        mono_gpu_table_optimize_many(nullptr, jobs.data(), static_cast<int64_t>(jobs.size())));
    for (size_t t = 0; t < tables; ++t) {
      Array<int64_t> joined(all_ids[t]);
      Array<float> gradients(all_values[t]);
      MONO_DIFF_CALL(mono_gpu_table_optimize(single[t].get(), nullptr, joined.data(),
                                             static_cast<int64_t>(all_ids[t].size()),
                                             gradients.data(), &options));
    }
    // Each table twice, once without telling what was found and with gaps between the vectors.
    std::vector<int64_t> looked;
    for (int64_t i = -3; i < 170; ++i) looked.push_back(i);
    Array<int64_t> device_looked(looked);
    const int64_t n = static_cast<int64_t>(looked.size());
    std::vector<std::unique_ptr<Array<float>>> outs;
    std::vector<std::unique_ptr<Array<uint8_t>>> founds;
    std::vector<MonoGpuLookupJob> lookups;
    for (int twice = 0; twice < 2; ++twice) {
      for (size_t t = 0; t < tables; ++t) {
        const int64_t stride = mono_gpu_table_dim(many[t].get()) + 4 * twice;
        outs.push_back(std::make_unique<Array<float>>(std::vector<float>(n * stride, -7.0f)));
        founds.push_back(std::make_unique<Array<uint8_t>>(n));
        lookups.push_back({many[t].get(), device_looked.data(), n, outs.back()->data(),
                           twice == 0 ? founds.back()->data() : nullptr, twice == 0 ? 0 : stride});
      }
    }
    MONO_DIFF_CALL(
        mono_gpu_table_lookup_many(nullptr, lookups.data(), static_cast<int64_t>(lookups.size())));
    for (size_t t = 0; t < tables; ++t) {
      std::vector<float> want;
      std::vector<uint8_t> there;
      const std::string error = LookUp(single[t].get(), looked, &want, &there);
      if (!error.empty()) return error;
      const std::string where = "step " + std::to_string(step) + ", table " + std::to_string(t);
      MONO_DIFF_CHECK(outs[t]->Read() == want, where);
      const int64_t dim = mono_gpu_table_dim(many[t].get());
      const std::vector<float> with_gaps = outs[tables + t]->Read();
      std::vector<float> vectors;
      for (int64_t i = 0; i < n; ++i) {
        const auto begin = with_gaps.begin() + i * (dim + 4);
        vectors.insert(vectors.end(), begin, begin + dim);
        // The gaps belong to others.
        MONO_DIFF_CHECK(std::count(begin + dim, begin + dim + 4, -7.0f) == 4, where);
      }
      MONO_DIFF_CHECK(vectors == want, where);
      MONO_DIFF_CHECK(founds[t]->Read() == there, where);
      if (IsSanitized() && step != 5) continue;
      std::vector<std::string> first, second;
      std::vector<uint32_t> first_rows, second_rows;
      std::string dump = Dump(many[t].get(), looked, &first, &first_rows);
      if (dump.empty()) dump = Dump(single[t].get(), looked, &second, &second_rows);
      if (!dump.empty()) return dump;
      MONO_DIFF_CHECK(first == second && first_rows == second_rows, where);
    }
  }
  return "";
}

// A call for many tables of which one has no room changes none; other options are refused.
inline std::string ManyTablesChangeTogetherOrNotAtAll() {
  MONO_DIFF_CALL(mono_gpu_table_set_budget(int64_t{48} << 20));
  TablePointer small, large;
  MONO_DIFF_CALL(CreateTable(OneSegment(4, engine::OptimizerKind::kSgd), &small));
  MONO_DIFF_CALL(CreateTable(OneSegment(64, engine::OptimizerKind::kAdagrad), &large));
  const int64_t n = 100000;
  std::vector<int64_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = i;
  Array<int64_t> device_ids(ids);
  Array<float> gradients(std::vector<float>(n * 64, 0.5f));
  const float rate = 0.1f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  MonoGpuOptimizeJob jobs[] = {
      {small.get(), device_ids.data(), 1000, gradients.data(), &options, 0, 0, 0},
      {large.get(), device_ids.data(), n, gradients.data(), &options, 0, 0, 0}};
  const int code = mono_gpu_table_optimize_many(nullptr, jobs, 2);
  const std::string message = mono_gpu_last_error();
  MONO_DIFF_CALL(mono_gpu_table_set_budget(0));
  MONO_DIFF_CHECK(code == MONO_GPU_OUT_OF_MEMORY, message);
  for (MonoGpuTable* const table : {small.get(), large.get()}) {
    MonoGpuTableStats stats;
    MONO_DIFF_CALL(mono_gpu_table_stats(table, &stats));
    MONO_DIFF_CHECK(stats.size == 0, std::to_string(stats.size));
  }
  MonoGpuWriteOptions other = options;
  jobs[1] = {small.get(), device_ids.data(), 5, gradients.data(), &other, 0, 0, 0};
  MONO_DIFF_CHECK(mono_gpu_table_optimize_many(nullptr, jobs, 2) == MONO_GPU_INVALID_ARGUMENT,
                  "two options for one table");
  MONO_DIFF_CHECK(std::string(mono_gpu_last_error()) ==
                      "job 1 has other options than the one before it of the same table",
                  mono_gpu_last_error());
  return "";
}

// Ids that are let in by chance: as many as the rule says, the same for the same draws, and what is
// dropped is counted.
inline std::string LetsInByChance() {
  const int64_t num_ids = Sized(20000, 3000);
  struct Outcome {
    std::vector<float> values;
    int64_t size, filtered;
  };
  const auto run = [num_ids](int copies, int32_t duplicates, MonoGpuChanceFilter chance,
                             Outcome* outcome) -> std::string {
    TablePointer table;
    MONO_DIFF_CALL(CreateTable(
        OneSegment(1, engine::OptimizerKind::kSgd, engine::InitializerKind::kZeros), &table));
    std::vector<int64_t> ids, distinct;
    for (int64_t i = 0; i < num_ids; ++i) distinct.push_back(i * 7919 - 5);
    for (int copy = 0; copy < copies; ++copy) {
      ids.insert(ids.end(), distinct.begin(), distinct.end());
    }
    const int64_t n = static_cast<int64_t>(ids.size());
    Array<int64_t> device_ids(ids);
    Array<float> gradients(std::vector<float>(n, -1.0f));
    const float rate = 1.0f;
    MonoGpuWriteOptions options = {};
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    options.duplicates = duplicates;
    options.chance_filter = &chance;
    MONO_DIFF_CALL(mono_gpu_table_optimize(table.get(), nullptr, device_ids.data(), n,
                                           gradients.data(), &options));
    MonoGpuTableStats stats;
    MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
    outcome->size = stats.size;
    outcome->filtered = stats.filtered;
    std::vector<uint8_t> found;
    std::string error = LookUp(table.get(), distinct, &outcome->values, &found);
    if (!error.empty()) return error;
    MONO_DIFF_CHECK(std::count(found.begin(), found.end(), 1) == stats.size, "rows that are there");
    // Present rows stay without being asked.
    Array<int64_t> again(distinct);
    chance.default_threshold = 0xffffffffu;
    const int64_t before = stats.size;
    MONO_DIFF_CALL(mono_gpu_table_optimize(table.get(), nullptr, again.data(), num_ids,
                                           gradients.data(), &options));
    MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
    MONO_DIFF_CHECK(stats.size == before && stats.filtered == outcome->filtered + num_ids - before,
                    std::to_string(stats.size) + " rows, " + std::to_string(stats.filtered));
    return "";
  };
  const auto near = [num_ids](int64_t count, double share) {
    return std::fabs(static_cast<double>(count) / num_ids - share) < Sized(0.02, 0.04);
  };
  MonoGpuChanceFilter chance = {17, 3, nullptr, 4, 0};
  Outcome once, same, other, summed, steps, equal;
  std::string error = run(1, MONO_GPU_IDS_ARE_DISTINCT, chance, &once);
  if (error.empty()) error = run(1, MONO_GPU_IDS_ARE_DISTINCT, chance, &same);
  if (error.empty()) error = run(3, MONO_GPU_STEP_FOR_EACH, chance, &steps);
  if (error.empty()) error = run(4, MONO_GPU_SUM_GRADIENTS, chance, &summed);
  chance.batch = 4;
  if (error.empty()) error = run(1, MONO_GPU_IDS_ARE_DISTINCT, chance, &other);
  chance.equal_probability = 1;
  if (error.empty()) error = run(4, MONO_GPU_SUM_GRADIENTS, chance, &equal);
  if (!error.empty()) return error;
  MONO_DIFF_CHECK(near(once.size, 0.25), std::to_string(once.size));
  MONO_DIFF_CHECK(once.filtered == num_ids - once.size, std::to_string(once.filtered));
  MONO_DIFF_CHECK(once.values == same.values, "the same draws");
  MONO_DIFF_CHECK(once.values != other.values, "another batch");
  // Four of four occurrences: certainly in, and none dropped.
  MONO_DIFF_CHECK(summed.size == num_ids && summed.filtered == 0, std::to_string(summed.size));
  MONO_DIFF_CHECK(near(equal.size, 0.95), std::to_string(equal.size));
  // Every occurrence draws; steps before the first that gets in are left out.
  MONO_DIFF_CHECK(near(steps.size, 1 - 0.75 * 0.75 * 0.75), std::to_string(steps.size));
  int64_t made = 0;
  for (const float value : steps.values) made += static_cast<int64_t>(value);
  MONO_DIFF_CHECK(steps.filtered == 3 * num_ids - made, std::to_string(steps.filtered));
  return "";
}

// The sum of `count` rows as table_sums.h adds them: in chunks of 32, and these in chunks of 32.
inline std::vector<float> SumInChunks(std::vector<std::vector<float>> rows) {
  while (rows.size() > 1) {
    std::vector<std::vector<float>> sums;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i % 32 == 0) {
        sums.push_back(rows[i]);
        continue;
      }
      for (size_t c = 0; c < rows[i].size(); ++c) sums.back()[c] += rows[i][c];
    }
    rows = std::move(sums);
  }
  return rows[0];
}

// The sum of an id's gradients has the bits that its own gradients decide, however often it comes
// and whatever comes beside it, in rows that are stepped in either way.
inline std::string SumsDependOnTheIdAlone(int64_t dim, engine::OptimizerKind kind,
                                          const std::vector<int64_t>& counts) {
  std::vector<int64_t> ids;
  for (size_t i = 0; i < counts.size(); ++i) {
    ids.insert(ids.end(), static_cast<size_t>(counts[i]), static_cast<int64_t>(i) * 7 - 3);
  }
  std::mt19937 random(11);
  std::shuffle(ids.begin(), ids.end(), random);
  const int64_t n = static_cast<int64_t>(ids.size());
  std::vector<float> gradients(n * dim);
  for (float& g : gradients) g = static_cast<float>(random()) / 4294967296.0f - 0.5f;
  TablePointer table;
  MONO_DIFF_CALL(CreateTable(OneSegment(dim, kind, engine::InitializerKind::kZeros), &table));
  Array<int64_t> device_ids(ids);
  Array<float> device_gradients(gradients);
  const float rate = 1.0f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  options.duplicates = MONO_GPU_SUM_GRADIENTS;
  // The second time rows are there.
  for (int step = 1; step <= 2; ++step) {
    MONO_DIFF_CALL(mono_gpu_table_optimize(table.get(), nullptr, device_ids.data(), n,
                                           device_gradients.data(), &options));
    std::vector<int64_t> distinct;
    for (size_t i = 0; i < counts.size(); ++i) distinct.push_back(static_cast<int64_t>(i) * 7 - 3);
    std::vector<float> values;
    std::vector<uint8_t> found;
    const std::string error = LookUp(table.get(), distinct, &values, &found);
    if (!error.empty()) return error;
    std::map<int64_t, std::vector<std::vector<float>>> rows;
    for (int64_t i = 0; i < n; ++i) {
      rows[ids[i]].emplace_back(gradients.begin() + i * dim, gradients.begin() + (i + 1) * dim);
    }
    for (size_t i = 0; i < counts.size(); ++i) {
      const std::vector<float> sum = SumInChunks(rows[distinct[i]]);
      for (int64_t c = 0; c < dim; ++c) {
        float want = -sum[c];
        if (step == 2) want = want - sum[c];
        MONO_DIFF_CHECK(values[i * dim + c] == want,
                        "dim " + std::to_string(dim) + ", step " + std::to_string(step) +
                            ", an id that comes " + std::to_string(counts[i]) + " times");
      }
    }
  }
  return "";
}

inline std::string SumsDependOnTheIdAlone() {
  for (const int64_t dim : {1, 3, 4, 16, 30, 64, 100, 128, 256}) {
    for (const std::vector<int64_t>& counts :
         {std::vector<int64_t>{1}, std::vector<int64_t>{2, 1, 3, 4, 5, 31, 32, 33, 64, 65},
          std::vector<int64_t>{1, 1023, 1, 1024, 1025, 2049, 7, 2, 2, 2},
          std::vector<int64_t>{3000}, std::vector<int64_t>(40, 1),
          // As many as one block looks through, and one more.
          std::vector<int64_t>{4060, 17, 16, 3}, std::vector<int64_t>{4060, 17, 16, 4}}) {
      if (IsSanitized() && counts.size() != 10 && dim > 4) continue;
      const std::string error = SumsDependOnTheIdAlone(dim, engine::OptimizerKind::kSgd, counts);
      if (!error.empty()) return error;
    }
  }
  if (IsSanitized()) return "";
  // Four levels of chunks.
  return SumsDependOnTheIdAlone(1, engine::OptimizerKind::kSgd, {40000, 5, 33000, 1});
}

// Two tables that get the same calls hold the same bytes in the same rows.
inline std::string SameCallsGiveTheSameTable(int64_t max_batch, int steps) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < max_batch * 2; ++i) {
    ids.push_back(static_cast<int64_t>(engine::SplitMix64(static_cast<uint64_t>(i))));
  }
  std::vector<std::string> records[2];
  std::vector<uint32_t> numbers[2];
  for (int run = 0; run < 2; ++run) {
    engine::TableConfig config = OneSegment(16, engine::OptimizerKind::kAdagrad);
    config.expiry.default_days = 3;
    TablePointer table;
    MONO_DIFF_CALL(CreateTable(config, &table));
    std::mt19937 random(7);
    for (int step = 0; step < steps; ++step) {
      const int64_t n = 1 + random() % max_batch;
      std::vector<int64_t> some(n);
      for (int64_t& id : some) id = ids[random() % 3 == 0 ? 0 : random() % ids.size()];
      std::vector<float> values(n * 16);
      for (float& value : values) value = static_cast<float>(random() % 1000) / 1000 - 0.5f;
      Array<int64_t> device_ids(some);
      Array<float> device_values(values);
      const float rate = 0.05f;
      MonoGpuWriteOptions options = {};
      options.learning_rates = &rate;
      options.num_learning_rates = 1;
      options.req_time = 1000000 + step * 86400;
      options.duplicates = step % 2 == 0 ? MONO_GPU_SUM_GRADIENTS : MONO_GPU_STEP_FOR_EACH;
      MONO_DIFF_CALL(mono_gpu_table_optimize(table.get(), nullptr, device_ids.data(), n,
                                             device_values.data(), &options));
      if (step % 5 == 2) {
        MONO_DIFF_CALL(mono_gpu_table_erase(table.get(), nullptr, device_ids.data(), n / 3));
      }
      if (step % 7 == 5) {
        int64_t erased = 0;
        MONO_DIFF_CALL(mono_gpu_table_evict(table.get(), nullptr, &erased));
      }
    }
    const std::string error = Dump(table.get(), ids, &records[run], &numbers[run]);
    if (!error.empty()) return error;
  }
  MONO_DIFF_CHECK(records[0] == records[1], "records of the same calls");
  MONO_DIFF_CHECK(numbers[0] == numbers[1], "rows of the same calls");
  MONO_DIFF_CHECK(*std::max_element(numbers[0].begin(), numbers[0].end()) > 0, "no row at all");
  return "";
}

// From one row to `rows`, while older rows are erased and evicted: what should be there is, with
// its value, and nothing else.
inline std::string GrowsWhileRowsLeave(int64_t rows) {
  constexpr int64_t kDim = 4;
  engine::TableConfig config = OneSegment(kDim, engine::OptimizerKind::kSgd);
  config.expiry.default_days = 2;
  TablePointer table;
  MONO_DIFF_CALL(CreateTable(config, &table));
  const auto id_of = [](int64_t i) {
    return static_cast<int64_t>(engine::SplitMix64(static_cast<uint64_t>(i) + 1));
  };
  const auto value_of = [](int64_t i) { return static_cast<float>(i % 1000003); };
  // A quarter of every batch is erased later, and an eighth has a time that lets it be evicted.
  const auto fate_of = [](int64_t i) { return i % 8 < 2 ? 1 : i % 8 == 2 ? 2 : 0; };
  int64_t begin = 0, erased_to = 0;
  int64_t batch = 1;
  for (int step = 0; begin < rows; ++step) {
    const int64_t n = std::min(batch, rows - begin);
    for (const bool old : {true, false}) {
      std::vector<int64_t> ids;
      std::vector<float> values;
      for (int64_t i = begin; i < begin + n; ++i) {
        if ((fate_of(i) == 2) != old) continue;
        ids.push_back(id_of(i));
        for (int64_t c = 0; c < kDim; ++c) values.push_back(value_of(i));
      }
      Array<int64_t> device_ids(ids);
      Array<float> device_values(values);
      MonoGpuWriteOptions options = {};
      options.req_time = old ? 1000 : 1000 + 86400 * 3;
      options.duplicates = MONO_GPU_IDS_ARE_DISTINCT;
      MONO_DIFF_CALL(mono_gpu_table_assign(table.get(), nullptr, device_ids.data(),
                                           static_cast<int64_t>(ids.size()), device_values.data(),
                                           &options));
    }
    begin += n;
    batch = std::min<int64_t>(batch * 3, 1 << 20);
    if (step % 4 == 3 || begin == rows) {
      std::vector<int64_t> gone;
      for (int64_t i = erased_to; i < begin; ++i) {
        if (fate_of(i) == 1) gone.push_back(id_of(i));
      }
      erased_to = begin;
      Array<int64_t> device_gone(gone);
      MONO_DIFF_CALL(mono_gpu_table_erase(table.get(), nullptr, device_gone.data(),
                                          static_cast<int64_t>(gone.size())));
      int64_t evicted = 0;
      MONO_DIFF_CALL(mono_gpu_table_evict(table.get(), nullptr, &evicted));
    }
  }
  int64_t live = 0;
  const int64_t piece = 1 << 20;
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t n = std::min(piece, rows - first);
    std::vector<int64_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = id_of(first + i);
    std::vector<float> values;
    std::vector<uint8_t> found;
    const std::string error = LookUp(table.get(), ids, &values, &found);
    if (!error.empty()) return error;
    for (int64_t i = 0; i < n; ++i) {
      const bool there = fate_of(first + i) == 0;
      live += there;
      MONO_DIFF_CHECK(found[i] == there, "row " + std::to_string(first + i));
      for (int64_t c = 0; c < kDim; ++c) {
        MONO_DIFF_CHECK(values[i * kDim + c] == (there ? value_of(first + i) : 0.0f),
                        "row " + std::to_string(first + i));
      }
    }
  }
  MonoGpuTableStats stats;
  MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
  MONO_DIFF_CHECK(stats.size == live, std::to_string(stats.size));
  return "";
}

// Filled to nine tenths of a budget, then asked for more than the rest: an error, and every byte is
// as it was; what fits still goes in.
inline std::string RunsOutOfMemoryWithoutLoss(int64_t budget) {
  MONO_DIFF_CALL(mono_gpu_table_set_budget(budget));
  TablePointer table;
  MONO_DIFF_CALL(CreateTable(OneSegment(16, engine::OptimizerKind::kAdagrad), &table));
  const float rate = 0.1f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  const int64_t most = budget / 128;
  Array<float> gradients(std::vector<float>(most * 16, 0.25f));
  const auto step = [&](int64_t begin, int64_t n) {
    std::vector<int64_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = begin + i;
    Array<int64_t> device_ids(ids);
    const int code = mono_gpu_table_optimize(table.get(), nullptr, device_ids.data(), n,
                                             gradients.data(), &options);
    if (mono_gpu_synchronize(nullptr) != MONO_GPU_OK) return -1;
    return code;
  };
  int64_t rows = 0;
  MonoGpuTableStats stats = {};
  do {
    MONO_DIFF_CALL(step(rows, 2000));
    rows += 2000;
    MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
  } while (stats.row_bytes + stats.index_bytes + stats.other_bytes < budget * 85 / 100);
  std::vector<int64_t> ids(rows);
  for (int64_t i = 0; i < rows; ++i) ids[i] = i;
  // Saving needs memory, too: beyond the budget, which is for what stays.
  MONO_DIFF_CALL(mono_gpu_table_set_budget(2 * budget));
  std::vector<std::string> before, after;
  std::vector<uint32_t> rows_before, rows_after;
  std::string error = Dump(table.get(), ids, &before, &rows_before);
  if (!error.empty()) return error;
  MONO_DIFF_CALL(mono_gpu_table_set_budget(budget));
  const int code = step(rows, most / 2);
  const std::string message = mono_gpu_last_error();
  MONO_DIFF_CHECK(code == MONO_GPU_OUT_OF_MEMORY, std::to_string(code) + " " + message);
  MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
  MONO_DIFF_CHECK(stats.size == rows, std::to_string(stats.size));
  MONO_DIFF_CALL(mono_gpu_table_set_budget(2 * budget));
  error = Dump(table.get(), ids, &after, &rows_after);
  if (!error.empty()) return error;
  MONO_DIFF_CHECK(before == after && rows_before == rows_after, "the table after an error");
  MONO_DIFF_CALL(step(0, rows));
  MONO_DIFF_CALL(step(rows, 1000));
  MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
  MONO_DIFF_CHECK(stats.size == rows + 1000, std::to_string(stats.size));
  MONO_DIFF_CALL(mono_gpu_table_set_budget(0));
  return "";
}

// The words of a call that fails because of an earlier one, of a check, and what a table has then.
inline std::string TellsWhatItRefuses() {
  constexpr int64_t kDim = 192;  // more than a warp takes at once
  constexpr int64_t kIds = 100;
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity()};
  for (const auto kind : {engine::OptimizerKind::kAdagrad, engine::OptimizerKind::kAdam}) {
    TablePointer table, other;
    for (TablePointer* const one : {&table, &other}) {
      MONO_DIFF_CALL(CreateTable(OneSegment(kDim, kind), one));
    }
    std::vector<int64_t> ids(kIds);
    for (int64_t i = 0; i < kIds; ++i) ids[i] = i;
    const std::vector<float> good(kIds * kDim, 0.5f);
    std::vector<float> some(good);
    some[7 * kDim + 191] = bad_values[0];
    some[70 * kDim] = bad_values[1];
    Array<int64_t> device_ids(ids);
    Array<float> all_good(good), with_bad(some);
    const float rate = 0.01f;
    MonoGpuWriteOptions options = {};
    options.learning_rates = &rate;
    options.num_learning_rates = 1;
    const auto optimize = [&](MonoGpuTable* to, const Array<float>& gradients) {
      return mono_gpu_table_optimize(to, nullptr, device_ids.data(), kIds, gradients.data(),
                                     &options);
    };
    Array<int64_t> refused(std::vector<int64_t>{7, 70});
    const auto records = [&] {
      std::string all;
      const auto append = [](void* to, const char* bytes, int64_t size) {
        static_cast<std::string*>(to)->append(bytes, static_cast<size_t>(size));
        return 0;
      };
      if (mono_gpu_table_save_ids(table.get(), nullptr, refused.data(), 2, append, &all) != 0) {
        all = mono_gpu_last_error();
      }
      return all;
    };
    const auto size = [](MonoGpuTable* of) {
      MonoGpuTableStats stats = {};
      return mono_gpu_table_stats(of, &stats) == MONO_GPU_OK ? stats.size : -1;
    };
    MONO_DIFF_CALL(optimize(table.get(), with_bad));
    MONO_DIFF_CHECK(size(table.get()) == kIds - 2, "absent ids that were refused");  // and waits
    const MonoGpuOptimizeJob jobs[] = {
        {other.get(), device_ids.data(), kIds, all_good.data(), &options, 0, 0, 0},
        {table.get(), device_ids.data(), kIds, all_good.data(), &options, 0, 0, 0}};
    const int code = mono_gpu_table_optimize_many(nullptr, jobs, 2);
    const std::string text = mono_gpu_last_error();
    MONO_DIFF_CHECK(code == MONO_GPU_REFUSED, std::to_string(code));
    MONO_DIFF_CHECK(text.rfind("Table 'user': values or gradients with NaN or infinity were not "
                               "written, those of 2 rows: ids 7, 70. An earlier call",
                               0) == 0,
                    text);
    MONO_DIFF_CHECK(size(table.get()) == kIds - 2 && size(other.get()) == 0,
                    "the call that fails does nothing");
    MONO_DIFF_CALL(mono_gpu_table_optimize_many(nullptr, jobs, 2));
    MONO_DIFF_CHECK(size(table.get()) == kIds && size(other.get()) == kIds,
                    "the next call goes on");
    MONO_DIFF_CALL(mono_gpu_table_check(table.get()));

    // Rows that are there stay as they are.
    const std::string before = records();
    options.req_time = 5;
    MONO_DIFF_CALL(optimize(table.get(), with_bad));
    MONO_DIFF_CHECK(mono_gpu_table_check(table.get()) == MONO_GPU_REFUSED, "check");
    MONO_DIFF_CALL(mono_gpu_table_assign(table.get(), nullptr, device_ids.data(), kIds,
                                         with_bad.data(), &options));
    MONO_DIFF_CHECK(mono_gpu_table_check(table.get()) == MONO_GPU_REFUSED, "check of values");
    MONO_DIFF_CHECK(records() == before, "rows and times of refused gradients and values");

    // One that is told of skips; one that writes has them.
    options.not_finite = MONO_GPU_NOT_FINITE_SKIP;
    MONO_DIFF_CALL(optimize(table.get(), with_bad));
    MONO_DIFF_CALL(mono_gpu_table_check(table.get()));
    MONO_DIFF_CHECK(records() == before, "rows of skipped gradients");
    options.not_finite = MONO_GPU_NOT_FINITE_WRITE;
    MONO_DIFF_CALL(optimize(table.get(), with_bad));
    MONO_DIFF_CALL(mono_gpu_table_check(table.get()));
    MONO_DIFF_CHECK(records() != before, "rows of gradients that are written");
    MonoGpuTableStats stats = {};
    MONO_DIFF_CALL(mono_gpu_table_stats(table.get(), &stats));
    MONO_DIFF_CHECK(stats.nonfinite_gradients == 10, std::to_string(stats.nonfinite_gradients));
    options.not_finite = 3;
    MONO_DIFF_CHECK(optimize(table.get(), with_bad) == MONO_GPU_INVALID_ARGUMENT,
                    "a wrong setting");
  }
  return "";
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_PROPERTIES_H_
