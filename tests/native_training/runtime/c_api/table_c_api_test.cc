// Tables through the C interface: what every call does, and that no argument ends the process.
#include "monolith/native_training/runtime/c_api/table_c_api.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "monolith/native_training/runtime/hash_table/table_config.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

struct Destroy {
  void operator()(MonoTable* table) const { mono_table_destroy(table); }
};
using Table = std::unique_ptr<MonoTable, Destroy>;
using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;

struct Config : MonoTableConfig {
  explicit Config(int64_t dim, OptimizerKind kind = OptimizerKind::kSgd) : MonoTableConfig() {
    segment.dim = dim;
    segment.optimizer = static_cast<int32_t>(kind);
    segment.initializer = static_cast<int32_t>(InitializerKind::kZeros);
    segment.compressor = static_cast<int32_t>(CompressorKind::kFp32);
    segment.initial_accumulator_value = 1.0f;
    segments = &segment;
    num_segments = 1;
    initial_capacity = 1;
    seed = 7;
    default_expire_days = 36500;
    admit_capacity = 1000;
  }
  MonoTableSegment segment = {};
};

Table MakeTable(const MonoTableConfig& config) {
  MonoTable* table = nullptr;
  EXPECT_EQ(mono_table_create(&config, &table), MONO_OK) << mono_last_error();
  return Table(table);
}

MonoWriteOptions Options(int64_t req_time = 0) {
  static const float kRate = 1.0f;
  MonoWriteOptions options = {};
  options.req_time = req_time;
  options.learning_rates = &kRate;
  options.num_learning_rates = 1;
  options.sum_duplicates = 1;
  return options;
}

int64_t Size(const Table& table) {
  int64_t rows = -1;
  EXPECT_EQ(mono_table_size(table.get(), &rows), MONO_OK) << mono_last_error();
  return rows;
}

int Assign(const Table& table, const Ids& ids, const Floats& values,
           const MonoWriteOptions& options = Options()) {
  return mono_table_assign(table.get(), ids.data(), static_cast<int64_t>(ids.size()), values.data(),
                           &options);
}

Floats Lookup(const Table& table, const Ids& ids, int64_t dim) {
  Floats out(ids.size() * dim, -1.0f);
  EXPECT_EQ(mono_table_lookup(table.get(), ids.data(), static_cast<int64_t>(ids.size()), out.data(),
                              nullptr),
            MONO_OK)
      << mono_last_error();
  return out;
}

std::string TempPath(const std::string& name) {
  return testing::TempDir() + "/c_api_" + std::to_string(getpid()) + "/" + name;
}

TEST(TableCApiTest, ExtremeIdsAreIds) {
  const Table table = MakeTable(Config(1));
  const Ids ids = {kLeast, -1, 0, 1, kMost};

  ASSERT_EQ(Assign(table, ids, {1, 2, 3, 4, 5}), MONO_OK) << mono_last_error();

  EXPECT_EQ(Lookup(table, ids, 1), Floats({1, 2, 3, 4, 5}));
  EXPECT_EQ(Size(table), 5);
}

TEST(TableCApiTest, EqualIdsTakeOneStepOnTheSum) {
  const Table table = MakeTable(Config(2, OptimizerKind::kAdagrad));
  const Ids ids = {3, 3};
  const Floats gradients = {1, 0, 2, 0};
  const MonoWriteOptions options = Options();

  ASSERT_EQ(mono_table_optimize(table.get(), ids.data(), 2, gradients.data(), &options), MONO_OK)
      << mono_last_error();

  EXPECT_FLOAT_EQ(Lookup(table, {3}, 2)[0], -3.0f / std::sqrt(10.0f));
}

TEST(TableCApiTest, LookupTellsWhatWasFound) {
  const Table table = MakeTable(Config(1));
  ASSERT_EQ(Assign(table, {1}, {5}), MONO_OK);
  const Ids ids = {1, 2};
  Floats out(2);
  std::vector<uint8_t> found(2, 9), contained(2, 9);

  ASSERT_EQ(mono_table_lookup(table.get(), ids.data(), 2, out.data(), found.data()), MONO_OK);
  ASSERT_EQ(mono_table_contains(table.get(), ids.data(), 2, contained.data()), MONO_OK);

  EXPECT_EQ(out, Floats({5, 0}));
  EXPECT_EQ(found, std::vector<uint8_t>({1, 0}));
  EXPECT_EQ(contained, found);
}

TEST(TableCApiTest, EmptyBatchesNeedNoArrays) {
  const Table table = MakeTable(Config(4));
  const MonoWriteOptions options = Options();

  EXPECT_EQ(mono_table_lookup(table.get(), nullptr, 0, nullptr, nullptr), MONO_OK);
  EXPECT_EQ(mono_table_assign(table.get(), nullptr, 0, nullptr, &options), MONO_OK);
  EXPECT_EQ(mono_table_assign_add(table.get(), nullptr, 0, nullptr, &options), MONO_OK);
  EXPECT_EQ(mono_table_optimize(table.get(), nullptr, 0, nullptr, &options), MONO_OK);
  EXPECT_EQ(mono_table_erase(table.get(), nullptr, 0), MONO_OK);
  EXPECT_EQ(mono_table_reinitialize(table.get(), nullptr, 0, 0, nullptr), MONO_OK);
  EXPECT_EQ(mono_table_lookup_many(nullptr, 0), MONO_OK);
  EXPECT_EQ(mono_table_optimize_many(nullptr, 0), MONO_OK);
  EXPECT_EQ(Size(table), 0);
}

TEST(TableCApiTest, BadArgumentsAreErrorsThatNameThem) {
  const Table table = MakeTable(Config(1));
  const int64_t id = 1;
  float value = 1;
  MonoWriteOptions options = Options();
  const auto expect = [](int code, const char* part) {
    EXPECT_EQ(code, MONO_INVALID_ARGUMENT);
    EXPECT_NE(std::string(mono_last_error()).find(part), std::string::npos) << mono_last_error();
  };

  expect(mono_table_lookup(nullptr, &id, 1, &value, nullptr), "table is null");
  expect(mono_table_lookup(table.get(), nullptr, 1, &value, nullptr), "ids is null");
  expect(mono_table_lookup(table.get(), &id, 1, nullptr, nullptr), "out is null");
  expect(mono_table_lookup(table.get(), &id, -1, &value, nullptr), "n is -1");
  expect(mono_table_lookup(table.get(), &id, kMost, &value, nullptr), "more than memory");
  expect(mono_table_assign(table.get(), &id, 1, nullptr, &options), "values is null");
  expect(mono_table_assign(table.get(), &id, 1, &value, nullptr), "options is null");
  expect(mono_table_erase(table.get(), &id, -5), "n is -5");
  expect(mono_table_lookup_many(nullptr, 1), "jobs is null");
  expect(mono_table_save(table.get(), nullptr, -1, nullptr, nullptr), "path is null");
  expect(mono_table_load(table.get(), "", nullptr, nullptr), "path is empty");
  expect(mono_set_num_threads(-1), "threads is -1");
  expect(mono_table_rows(table.get(), nullptr, nullptr), "sink is null");
  expect(mono_table_create(nullptr, nullptr), "config is null");
  options.non_finite = 3;
  expect(mono_table_assign(table.get(), &id, 1, &value, &options), "non_finite is 3");
  options = Options();
  options.num_learning_rates = 2;
  options.learning_rates = nullptr;
  expect(mono_table_optimize(table.get(), &id, 1, &value, &options), "learning_rates is null");
  options.num_learning_rates = 0;
  expect(mono_table_optimize(table.get(), &id, 1, &value, &options), "learning_rate");
  const MonoOptimizeJob twice[] = {{table.get(), &id, 1, &value, &options},
                                   {table.get(), &id, 1, &value, &options}};
  expect(mono_table_optimize_many(twice, 2), "twice");
  EXPECT_EQ(Size(table), 0);
}

TEST(TableCApiTest, BadConfigurationsAreErrors) {
  const auto refused = [](const Config& config) {
    MonoTable* table = nullptr;
    EXPECT_EQ(mono_table_create(&config, &table), MONO_INVALID_ARGUMENT) << mono_last_error();
    EXPECT_EQ(table, nullptr);
    return std::string(mono_last_error());
  };
  for (const int64_t dim : {int64_t{0}, int64_t{-1}, kMost}) refused(Config(dim));
  Config config(1);
  config.segment.optimizer = 99;
  EXPECT_NE(refused(config).find("optimizer is 99"), std::string::npos);
  Config none(1);
  none.num_segments = 0;
  EXPECT_NE(refused(none).find("num_segments is 0"), std::string::npos);
  Config many(1);
  many.num_segments = kMost;
  refused(many);
  Config admit(1);
  admit.admit_after = 16;
  refused(admit);
  Config slots(1);
  slots.num_expire_slots = 1;
  EXPECT_NE(refused(slots).find("expire_slots is null"), std::string::npos);
}

TEST(TableCApiTest, NonFiniteRowsAreRefusedByDefault) {
  const Table table = MakeTable(Config(1));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  MonoWriteOptions options = Options();

  EXPECT_EQ(Assign(table, {8, 9}, {1, nan}), MONO_INVALID_ARGUMENT);
  EXPECT_NE(std::string(mono_last_error()).find("9"), std::string::npos) << mono_last_error();
  EXPECT_EQ(Lookup(table, {9}, 1), Floats({0}));
  options.non_finite = MONO_NON_FINITE_SKIP;
  EXPECT_EQ(Assign(table, {8, 9}, {2, nan}, options), MONO_OK);
  EXPECT_EQ(Lookup(table, {8, 9}, 1), Floats({2, 0}));
  options.non_finite = MONO_NON_FINITE_WRITE;
  EXPECT_EQ(Assign(table, {9}, {nan}, options), MONO_OK);
  EXPECT_TRUE(std::isnan(Lookup(table, {9}, 1)[0]));
}

TEST(TableCApiTest, AdmissionWaits) {
  Config config(1);
  config.admit_after = 2;
  const Table table = MakeTable(config);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(Assign(table, {5}, {1}), MONO_OK);
  EXPECT_EQ(Size(table), 0);
  ASSERT_EQ(Assign(table, {5}, {1}), MONO_OK);
  EXPECT_EQ(Size(table), 1);
}

TEST(TableCApiTest, EvictsAndErases) {
  Config config(1);
  config.default_expire_days = 1;
  const Table table = MakeTable(config);
  ASSERT_EQ(Assign(table, {1}, {1}, Options(0)), MONO_OK);
  ASSERT_EQ(Assign(table, {2, 3}, {1, 1}, Options(86400)), MONO_OK);
  int64_t erased = 0;
  ASSERT_EQ(mono_table_evict(table.get(), &erased), MONO_OK);
  EXPECT_EQ(erased, 1);
  const Ids two = {2, 99};
  ASSERT_EQ(mono_table_erase(table.get(), two.data(), 2), MONO_OK);
  EXPECT_EQ(Size(table), 1);
  ASSERT_EQ(mono_table_clear(table.get()), MONO_OK);
  EXPECT_EQ(Size(table), 0);
}

TEST(TableCApiTest, HandsOutAllRows) {
  const Table table = MakeTable(Config(2));
  Ids ids;
  Floats values;
  for (int64_t i = 0; i < 20000; ++i) {
    ids.push_back(i * 977 - 5000);
    values.push_back(static_cast<float>(i));
    values.push_back(static_cast<float>(-i));
  }
  ASSERT_EQ(Assign(table, ids, values, Options(33)), MONO_OK);
  struct Sum {
    int64_t rows = 0;
    double values = 0;
    bool times = true;
  } sum;
  const MonoRowSink sink = [](void* context, const int64_t*, const uint32_t* times,
                              const float* vectors, int64_t n) {
    Sum* const to = static_cast<Sum*>(context);
    to->rows += n;
    for (int64_t i = 0; i < n; ++i) {
      to->values += vectors[2 * i];
      to->times = to->times && times[i] == 33;
    }
    return 0;
  };
  ASSERT_EQ(mono_table_rows(table.get(), sink, &sum), MONO_OK);
  EXPECT_EQ(sum.rows, 20000);
  EXPECT_EQ(sum.values, 20000.0 * 19999 / 2);
  EXPECT_TRUE(sum.times);
  const MonoRowSink stop = [](void*, const int64_t*, const uint32_t*, const float*, int64_t) {
    return 1;
  };
  EXPECT_EQ(mono_table_rows(table.get(), stop, nullptr), MONO_FAILED_PRECONDITION);
}

TEST(TableCApiTest, ConfigureKeepsRows) {
  const Table table = MakeTable(Config(1, OptimizerKind::kAdagrad));
  ASSERT_EQ(Assign(table, {1, 2}, {3, 4}), MONO_OK);
  const Config other(1, OptimizerKind::kSgd);
  ASSERT_EQ(mono_table_configure(table.get(), &other), MONO_OK) << mono_last_error();
  EXPECT_EQ(Lookup(table, {1, 2}, 1), Floats({3, 4}));
  const Config wider(2);
  EXPECT_EQ(mono_table_configure(table.get(), &wider), MONO_INVALID_ARGUMENT);
  EXPECT_EQ(Lookup(table, {1, 2}, 1), Floats({3, 4}));
}

TEST(TableCApiTest, SavesAndLoads) {
  const Table table = MakeTable(Config(2, OptimizerKind::kAdagrad));
  const Table other = MakeTable(Config(2, OptimizerKind::kAdagrad));
  ASSERT_EQ(Assign(table, {kLeast, kMost}, {1, 2, 3, 4}), MONO_OK);
  int64_t saved = 0, expired = -1, loaded = 0, reset = -1;
  const std::string path = TempPath("saved/table");
  ASSERT_EQ(mono_table_save(table.get(), path.c_str(), -1, &saved, &expired), MONO_OK)
      << mono_last_error();
  ASSERT_EQ(mono_table_load(other.get(), path.c_str(), &loaded, &reset), MONO_OK)
      << mono_last_error();
  EXPECT_EQ(saved, 2);
  EXPECT_EQ(expired, 0);
  EXPECT_EQ(loaded, 2);
  EXPECT_EQ(reset, 0);
  EXPECT_EQ(Lookup(other, {kLeast, kMost}, 2), Floats({1, 2, 3, 4}));

  const Table wider = MakeTable(Config(3));
  ASSERT_EQ(Assign(wider, {7}, {1, 1, 1}), MONO_OK);
  EXPECT_EQ(mono_table_load(wider.get(), path.c_str(), nullptr, nullptr), MONO_INVALID_ARGUMENT);
  EXPECT_EQ(mono_table_load(wider.get(), (path + "x").c_str(), nullptr, nullptr),
            MONO_INVALID_ARGUMENT);
  EXPECT_EQ(Size(wider), 1);
  EXPECT_NE(mono_table_save(table.get(), "/proc/no/table", -1, nullptr, nullptr), MONO_OK);
}

TEST(TableCApiTest, ManyTablesAtOnce) {
  const Table a = MakeTable(Config(1)), b = MakeTable(Config(2));
  const Ids ids = {4, 4, 6};
  const Floats one = {-1, -1, -3}, two = {-1, -2, -1, -2, -5, -6};
  const MonoWriteOptions options = Options();
  const MonoOptimizeJob steps[] = {{a.get(), ids.data(), 3, one.data(), &options},
                                   {b.get(), ids.data(), 3, two.data(), &options}};
  ASSERT_EQ(mono_table_optimize_many(steps, 2), MONO_OK) << mono_last_error();
  Floats out_a(3), out_b(6), again(3);
  const MonoLookupJob lookups[] = {{a.get(), ids.data(), 3, out_a.data(), nullptr},
                                   {b.get(), ids.data(), 3, out_b.data(), nullptr},
                                   {a.get(), ids.data(), 3, again.data(), nullptr}};
  ASSERT_EQ(mono_table_lookup_many(lookups, 3), MONO_OK) << mono_last_error();
  EXPECT_EQ(out_a, Floats({2, 2, 3}));
  EXPECT_EQ(out_b, Floats({2, 4, 2, 4, 5, 6}));
  EXPECT_EQ(again, out_a);
}

TEST(TableCApiTest, ThreadsShareATable) {
  ASSERT_EQ(mono_set_num_threads(3), MONO_OK);
  const Table table = MakeTable(Config(8));
  std::atomic<int> torn{0}, failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Ids ids(3000);
      Floats values(ids.size() * 8), out(ids.size() * 8);
      for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
        for (float& value : values) value = static_cast<float>(t * 100 + round);
        if (Assign(table, ids, values) != MONO_OK) ++failed;
        if (round % 5 == t) {
          const Config config(8);
          if (mono_table_configure(table.get(), &config) != MONO_OK) ++failed;
        }
        if (mono_table_lookup(table.get(), ids.data(), 3000, out.data(), nullptr) != 0) ++failed;
        for (size_t i = 0; i < out.size(); ++i) torn += out[i] != out[i / 8 * 8];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(Size(table), 3000);
  ASSERT_EQ(mono_set_num_threads(0), MONO_OK);
}

#ifndef __SANITIZE_THREAD__
TEST(TableCApiTest, AForkedChildHasThreadsOfItsOwn) {
  ASSERT_EQ(mono_set_num_threads(2), MONO_OK);
  const Table table = MakeTable(Config(8));
  Ids ids(100000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  ASSERT_EQ(Assign(table, ids, Floats(ids.size() * 8, 2.0f)), MONO_OK);

  const pid_t child = fork();
  if (child == 0) {
    const bool same = Lookup(table, ids, 8) == Floats(ids.size() * 8, 2.0f);
    _exit(same ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_EQ(mono_set_num_threads(0), MONO_OK);
}
#endif

}  // namespace
}  // namespace engine
}  // namespace monolith
