// The GPU table against the engine's table: random calls, memory that runs out.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/native_training/runtime/gpu/table_gradients.h"
#include "tests/native_training/runtime/gpu/table_properties.h"

namespace monolith {
namespace gpu {
namespace {

class GpuTableTest : public ::testing::TestWithParam<int> {};

TEST_P(GpuTableTest, EqualsTheEngineAfterRandomCalls) {
  DifferentialOptions options;
  options.seed = static_cast<uint32_t>(GetParam()) + 1;
  Differential differential(DifferentialConfig(GetParam()), options);
  EXPECT_EQ(differential.Run(), "");
}

// Sanitized: each optimizer alone, then a third of the other dims and of the mixtures.
std::vector<int> Configurations() {
  std::vector<int> numbers;
  for (int number = 0; number < kDifferentialConfigs; number += number < 14 ? 1 : Sized(1, 3)) {
    numbers.push_back(number);
  }
  return numbers;
}

INSTANTIATE_TEST_SUITE_P(Configurations, GpuTableTest, ::testing::ValuesIn(Configurations()));

class GpuTableSkewTest : public ::testing::TestWithParam<int> {};

TEST_P(GpuTableSkewTest, EqualsTheEngineHoweverOftenIdsCome) {
  Differential differential(SkewedConfig(GetParam()), SkewedOptions(GetParam()));
  EXPECT_EQ(differential.Run(), "");
}

INSTANTIATE_TEST_SUITE_P(Configurations, GpuTableSkewTest,
                         ::testing::Range(0, Sized(kSkewedConfigs, 14)));

class GpuTableBadRowsTest : public ::testing::TestWithParam<int> {};

TEST_P(GpuTableBadRowsTest, LeavesOutWhatTheEngineLeavesOut) {
  Differential differential(BadRowsConfig(GetParam()), BadRowsOptions(GetParam()));
  EXPECT_EQ(differential.Run(), "");
}

INSTANTIATE_TEST_SUITE_P(Configurations, GpuTableBadRowsTest,
                         ::testing::Range(0, kBadRowsConfigs, Sized(1, 5)));

TEST(GpuTableRefusalTest, TellsWhatItRefuses) { EXPECT_EQ(TellsWhatItRefuses(), ""); }

TEST(GpuTableSumTest, DependsOnTheIdAlone) { EXPECT_EQ(SumsDependOnTheIdAlone(), ""); }

TEST(GpuTableLargeTest, EqualsTheEngineWhileItGrows) {
  DifferentialOptions options;
  options.steps = kKindsOfCalls;
  options.max_batch = Sized(20000, 2000);
  options.distinct_ids = Sized(30000, 3000);
  for (const int number : {1, 40}) {
    Differential differential(DifferentialConfig(number), options);
    EXPECT_EQ(differential.Run(), "");
  }
}

TEST(GpuTableFilterTest, LetsInWhatTheEngineLetsIn) {
  DifferentialOptions options;
  options.threshold = 3;
  for (const int number : {1, 5, 33}) {
    Differential differential(DifferentialConfig(number), options);
    EXPECT_EQ(differential.Run(), "");
  }
}

engine::TableConfig Adagrad16() {
  engine::TableConfig config;
  engine::SegmentConfig segment;
  segment.dim_size = 16;
  segment.optimizer.kind = engine::OptimizerKind::kAdagrad;
  segment.initializer.kind = engine::InitializerKind::kZeros;
  config.entry.segments.push_back(segment);
  return config;
}

TEST(GpuTableManyTest, EqualsSingleCalls) { EXPECT_EQ(ManyTablesEqualSingleOnes(), ""); }

TEST(GpuTableManyTest, ChangesAllTablesOrNone) {
  EXPECT_EQ(ManyTablesChangeTogetherOrNotAtAll(), "");
}

class GpuTableGradientsTest : public ::testing::TestWithParam<NamedOptimizer> {};

TEST_P(GpuTableGradientsTest, StepAlikeInAnyTypeAndWithGaps) {
  EXPECT_EQ(GradientsOfAnyTypeStepAlike(GetParam().kind), "");
}

INSTANTIATE_TEST_SUITE_P(Optimizers, GpuTableGradientsTest,
                         ::testing::ValuesIn(OptimizersWithGradients()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GpuTableGradientsArgumentsTest, OtherTypesAreRefused) {
  EXPECT_EQ(RefusesOtherGradients(), "");
}

TEST(GpuTableFilterTest, LetsInByChance) { EXPECT_EQ(LetsInByChance(), ""); }

TEST(GpuTableOrderTest, SameCallsGiveTheSameTable) {
  EXPECT_EQ(SameCallsGiveTheSameTable(Sized(500, 200), Sized(20, 7)), "");
}

TEST(GpuTableGrowthTest, LosesNothingWhileRowsLeave) {
  EXPECT_EQ(GrowsWhileRowsLeave(Sized(60000, 8000)), "");
}

TEST(GpuTableMemoryTest, KeepsEveryByteWhenItRunsOut) {
  EXPECT_EQ(RunsOutOfMemoryWithoutLoss(int64_t{16} << 20), "");
}

TEST(GpuTableMemoryTest, RefusesWhatDoesNotFitAndStaysAsItWas) {
  ASSERT_EQ(mono_gpu_table_set_budget(int64_t{16} << 20), MONO_GPU_OK);
  TablePointer table;
  ASSERT_EQ(CreateTable(Adagrad16(), &table), MONO_GPU_OK) << mono_gpu_last_error();
  const int64_t n = 10000;
  std::vector<float> values(n * 16, 0.5f);
  Array<float> device_values(values);
  MonoGpuWriteOptions options = {};
  int64_t rows = 0;
  int code = MONO_GPU_OK;
  while (code == MONO_GPU_OK && rows < 1000000) {
    std::vector<int64_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = rows + i;
    Array<int64_t> device_ids(ids);
    code = mono_gpu_table_assign(table.get(), nullptr, device_ids.data(), n, device_values.data(),
                                 &options);
    if (code == MONO_GPU_OK) rows += n;
  }
  const std::string message = mono_gpu_last_error();
  EXPECT_EQ(code, MONO_GPU_OUT_OF_MEMORY);
  EXPECT_NE(message.find("a GPU table of dim 16 has " + std::to_string(rows) + " rows"),
            std::string::npos)
      << message;
  std::vector<int64_t> ids(rows);
  for (int64_t i = 0; i < rows; ++i) ids[i] = i;
  Array<int64_t> device_ids(ids);
  Array<float> out(rows * 16);
  Array<uint8_t> found(rows);
  ASSERT_EQ(mono_gpu_table_lookup(table.get(), nullptr, device_ids.data(), rows, out.data(),
                                  found.data()),
            MONO_GPU_OK);
  EXPECT_EQ(out.Read(), std::vector<float>(rows * 16, 0.5f));
  EXPECT_EQ(found.Read(), std::vector<uint8_t>(rows, 1));
  EXPECT_EQ(mono_gpu_table_set_budget(0), MONO_GPU_OK);
}

TEST(GpuTableFilesTest, LeavesOutWhatOtherTimesCallExpired) {
  TablePointer table;
  ASSERT_EQ(CreateTable(Adagrad16(), &table), MONO_GPU_OK) << mono_gpu_last_error();
  constexpr int64_t kDay = 86400;
  const int64_t slot = 9;
  // Two days old, as old but of a slot that keeps its rows, and new.
  const std::vector<int64_t> ids = {5, slot << 48 | 5, 6};
  Array<float> values(std::vector<float>(16, 1.0f));
  MonoGpuWriteOptions options = {};
  for (size_t i = 0; i < ids.size(); ++i) {
    Array<int64_t> id(std::vector<int64_t>{ids[i]});
    options.req_time = 100 * kDay + (i == 2 ? 2 * kDay : 0);
    ASSERT_EQ(mono_gpu_table_assign(table.get(), nullptr, id.data(), 1, values.data(), &options),
              MONO_GPU_OK);
  }
  const uint32_t slots[] = {static_cast<uint32_t>(slot)}, days[] = {30};
  const auto count = [](void* to, const char*, int64_t) { return ++*static_cast<int*>(to), 0; };
  int64_t saved = 0, expired = 0;
  int calls = 0;
  for (int shard = 0; shard < 64; ++shard) {
    ASSERT_EQ(mono_gpu_table_save_shard_until(table.get(), nullptr, shard, 1, slots, days, 1, count,
                                              &calls, &saved, &expired),
              MONO_GPU_OK)
        << mono_gpu_last_error();
  }
  EXPECT_EQ(saved, 2);
  EXPECT_EQ(expired, 1);
}

TEST(GpuTableArgumentsTest, NamesWhatIsWrong) {
  engine::TableConfig config = Adagrad16();
  config.entry.type = engine::EntryType::kTraining;
  config.entry.segments[0].dim_size = 0;
  TablePointer table;
  EXPECT_EQ(CreateTable(config, &table), MONO_GPU_INVALID_ARGUMENT);
  EXPECT_NE(std::string(mono_gpu_last_error()).find("dim_size is 0"), std::string::npos);

  ASSERT_EQ(CreateTable(Adagrad16(), &table), MONO_GPU_OK) << mono_gpu_last_error();
  Array<int64_t> ids(std::vector<int64_t>{1});
  Array<float> values(std::vector<float>(16, 1.0f));
  MonoGpuWriteOptions options = {};
  EXPECT_EQ(mono_gpu_table_optimize(table.get(), nullptr, ids.data(), 1, values.data(), &options),
            MONO_GPU_INVALID_ARGUMENT);
  EXPECT_STREQ(mono_gpu_last_error(), "learning_rate has 0 elements, the table has 1 segments");
  EXPECT_EQ(mono_gpu_table_lookup(table.get(), nullptr, ids.data(), -1, values.data(), nullptr),
            MONO_GPU_INVALID_ARGUMENT);
  const MonoGpuChanceFilter chance = {};
  options.chance_filter = &chance;
  options.filter = [](void*, const int64_t*, const uint32_t*, int64_t, uint8_t*) {};
  EXPECT_EQ(mono_gpu_table_assign(table.get(), nullptr, ids.data(), 1, values.data(), &options),
            MONO_GPU_INVALID_ARGUMENT);
  EXPECT_STREQ(mono_gpu_last_error(), "a write has filter or chance_filter, not both");
  MonoGpuTableStats stats;
  ASSERT_EQ(mono_gpu_table_stats(table.get(), &stats), MONO_GPU_OK);
  EXPECT_EQ(stats.size, 0);
}

}  // namespace
}  // namespace gpu
}  // namespace monolith
