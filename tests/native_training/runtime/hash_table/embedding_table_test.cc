// A table's promises: lookups, writes, filters, serving tables, fused calls.
#include "monolith/native_training/runtime/hash_table/embedding_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "monolith/native_training/runtime/concurrency/thread_pool.h"
#include "monolith/native_training/runtime/hash_filter/probabilistic_filter.h"
#include "monolith/native_training/runtime/hash_filter/sliding_hash_filter.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(EmbeddingTableTest, AssignAddThenLookupGivesZerosForAbsentIds) {
  const auto table = SgdTable(1);

  AssignAdd(table.get(), {0, 1}, {1, 1});

  EXPECT_EQ(Lookup(*table, {0, 1, 2}), (Floats{1, 1, 0}));
  EXPECT_EQ(table->Size(), 2);
  Assign(table.get(), {1}, {5});
  EXPECT_EQ(Lookup(*table, {0, 1, 2}), (Floats{1, 5, 0}));
}

TEST(EmbeddingTableTest, LookupInsertsNothing) {
  const auto table = SgdTable(3);
  EXPECT_EQ(Lookup(*table, {7, 7}), (Floats{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(table->Size(), 0);
}

TEST(EmbeddingTableTest, DuplicatesAreAppliedOneAfterAnother) {
  const auto table = SgdTable(1);
  Optimize(table.get(), {0, 0, 1}, {-1, -1, -1});
  ExpectNear(Lookup(*table, {0, 1}), {0.2f, 0.1f});
}

TEST(EmbeddingTableTest, DedupSumsGradients) {
  const auto table = SgdTable(10);
  Step step;
  step.dedup = true;
  Optimize(table.get(), {0, 1, 0, 1, 0}, Floats(50, -1.0f), step);
  Floats want(10, 0.3f);
  want.insert(want.end(), 10, 0.2f);
  ExpectNear(Lookup(*table, {0, 1}), want);
}

TEST(EmbeddingTableTest, DedupTakesOneOptimizerStepPerId) {
  SegmentConfig segment = MakeSegment(1, OptimizerKind::kAdagrad);
  segment.optimizer.initial_accumulator_value = 0.0f;
  const auto once = MakeTable(MakeConfig({segment}));
  const auto twice = MakeTable(MakeConfig({segment}));
  Step step;
  step.dedup = true;

  Optimize(once.get(), {5, 5}, {1, 2}, step);
  Optimize(twice.get(), {5, 5}, {1, 2});

  ExpectNear(Lookup(*once, {5}), {-0.1f});
  ExpectNear(Lookup(*twice, {5}), {-0.1f - 0.2f / std::sqrt(5.0f)});
}

TEST(EmbeddingTableTest, EverySegmentHasItsOwnRate) {
  const auto table = MakeTable(
      MakeConfig({MakeSegment(1, OptimizerKind::kSgd), MakeSegment(2, OptimizerKind::kSgd)}));
  Step step;
  step.rates = {1, 2};
  Optimize(table.get(), {9}, {1, 2, 3}, step);
  EXPECT_EQ(Lookup(*table, {9}), (Floats{-1, -4, -6}));
}

TEST(EmbeddingTableTest, NeighbouringSegmentsWithOneRateGiveTheSameAsApart) {
  std::vector<SegmentConfig> segments;
  for (int i = 0; i < 20; ++i) segments.push_back(MakeSegment(1 + i % 3, OptimizerKind::kAdagrad));
  const auto fused = MakeTable(MakeConfig(segments));
  for (int i = 0; i < 20; i += 2)
    segments[i].optimizer.weight_decay = 1e-30f;  // differs, but acts not
  const auto apart = MakeTable(MakeConfig(segments));
  Step step;
  step.rates.assign(20, 0.5f);
  Floats grads(fused->dim());
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = 0.25f * static_cast<float>(i) - 2.0f;

  for (int round = 0; round < 3; ++round) {
    Optimize(fused.get(), {1}, grads, step);
    Optimize(apart.get(), {1}, grads, step);
  }

  EXPECT_EQ(Lookup(*fused, {1}), Lookup(*apart, {1}));
}

TEST(EmbeddingTableTest, TooFewLearningRatesChangeNothing) {
  const auto table = MakeTable(
      MakeConfig({MakeSegment(1, OptimizerKind::kSgd), MakeSegment(2, OptimizerKind::kSgd)}));
  const Status status = TryOptimize(table.get(), {9}, {1, 2, 3}, Step());
  EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
  EXPECT_NE(status.message.find("1 elements"), std::string::npos) << status.message;
  EXPECT_NE(status.message.find("2 segments"), std::string::npos) << status.message;
  EXPECT_EQ(table->Size(), 0);
}

TEST(EmbeddingTableTest, EmptyBatchesAreLegal) {
  const auto table = SgdTable(4);
  Assign(table.get(), {}, {});
  AssignAdd(table.get(), {}, {});
  Optimize(table.get(), {}, {});
  EXPECT_TRUE(Lookup(*table, {}).empty());
  EXPECT_EQ(table->Size(), 0);
}

TEST(EmbeddingTableTest, EveryInt64IsAnId) {
  const auto table = SgdTable(1);
  const Ids ids = {
      0, 1, -1, 2, kMin, kMax, kMin + 1, kMax - 1, int64_t{1} << 48, -(int64_t{1} << 48)};
  EXPECT_EQ(Lookup(*table, ids), Floats(ids.size(), 0.0f));
  Floats values;
  for (size_t i = 0; i < ids.size(); ++i) values.push_back(static_cast<float>(i + 1));

  Assign(table.get(), ids, values);

  EXPECT_EQ(Lookup(*table, ids), values);
  EXPECT_EQ(table->Size(), static_cast<int64_t>(ids.size()));
  table->Erase(ids.data(), static_cast<int64_t>(ids.size()));
  EXPECT_EQ(Lookup(*table, ids), Floats(ids.size(), 0.0f));
  EXPECT_EQ(table->Size(), 0);
}

TEST(EmbeddingTableTest, AdversarialIdsKeepTheirRows) {
  for (const int shift : {0, 20, 32, 48, 58}) {
    const auto table = SgdTable(1);
    const int64_t n = int64_t{1} << std::min(15, 63 - shift);
    Ids ids;
    Floats values;
    for (int64_t i = 0; i < n; ++i) {
      ids.push_back(static_cast<int64_t>(static_cast<uint64_t>(i) << shift));
      values.push_back(static_cast<float>(i));
    }
    Assign(table.get(), ids, values);
    EXPECT_EQ(table->Size(), n);
    EXPECT_EQ(Lookup(*table, ids), values) << "ids are multiples of 2^" << shift;
  }
}

TEST(EmbeddingTableTest, WideAndNarrowVectors) {
  for (const int64_t dim : {1, 3, 16, 17, 1024, 5000}) {
    const auto table = MakeTable(MakeConfig({MakeSegment(dim, OptimizerKind::kAdagrad)}));
    Ids ids;
    Floats values;
    for (int64_t i = 0; i < 300; ++i) {
      ids.push_back(i * i);
      for (int64_t k = 0; k < dim; ++k) values.push_back(static_cast<float>(i * dim + k));
    }
    Assign(table.get(), ids, values);
    EXPECT_EQ(Lookup(*table, ids), values) << "dim " << dim;
    Optimize(table.get(), ids, Floats(values.size(), 0.0f));
    EXPECT_EQ(Lookup(*table, ids), values) << "dim " << dim;
  }
}

TEST(EmbeddingTableTest, ManyRowsSurviveGrowth) {
  const auto table = MakeTable(MakeConfig({MakeSegment(2, OptimizerKind::kAdagrad)}));
  constexpr int64_t kRows = 300000;
  Ids ids;
  Floats values;
  for (int64_t i = 0; i < kRows; ++i) {
    ids.push_back(i * 7919 - 1000000);
    values.push_back(static_cast<float>(i));
    values.push_back(static_cast<float>(-i));
  }
  for (int64_t begin = 0; begin < kRows; begin += 50000) {
    Assign(table.get(), Ids(ids.begin() + begin, ids.begin() + begin + 50000),
           Floats(values.begin() + 2 * begin, values.begin() + 2 * (begin + 50000)));
  }
  EXPECT_EQ(table->Size(), kRows);
  EXPECT_EQ(Lookup(*table, ids), values);
}

TEST(EmbeddingTableTest, AssignKeepsOptimizerState) {
  SegmentConfig segment = MakeSegment(1, OptimizerKind::kAdagrad);
  segment.optimizer.initial_accumulator_value = 0.0f;
  const auto table = MakeTable(MakeConfig({segment}));
  Optimize(table.get(), {3}, {2});
  Assign(table.get(), {3}, {0});
  Optimize(table.get(), {3}, {1});
  ExpectNear(Lookup(*table, {3}), {-0.1f / std::sqrt(5.0f)});
}

TEST(EmbeddingTableTest, NanIsStoredAndCounted) {
  const auto table = SgdTable(2);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Optimize(table.get(), {1, 2}, {nan, 1, 1, 1});
  const Floats got = Lookup(*table, {1, 2});
  EXPECT_TRUE(std::isnan(got[0]));
  ExpectNear({got[1], got[2], got[3]}, {-0.1f, -0.1f, -0.1f});
  EXPECT_NE(table->DebugString().find("\"nonfinite_gradients\": 1"), std::string::npos);
}

// Dimensions that the compiler knows, and others.
TEST(EmbeddingTableTest, NonFiniteGradientsOfAdagradAreCountedOnce) {
  for (const int64_t dim : {2, 7, 8, 16, 32, 64}) {
    SegmentConfig segment = MakeSegment(dim, OptimizerKind::kAdagrad);
    segment.optimizer.initial_accumulator_value = 0.5f;
    const auto table = MakeTable(MakeConfig({segment}));
    Ids ids(100);
    std::iota(ids.begin(), ids.end(), 0);
    Optimize(table.get(), ids, Floats(100 * dim, 1.0f));
    Floats grads(100 * dim, 2.0f);
    grads[7 * dim + dim - 1] = std::numeric_limits<float>::infinity();
    grads[60 * dim] = std::numeric_limits<float>::quiet_NaN();
    grads[61 * dim] = 0.0f;
    Optimize(table.get(), ids, grads);
    EXPECT_NE(table->DebugString().find("\"nonfinite_gradients\": 2"), std::string::npos) << dim;
    // New ids count like old ones.
    grads[7 * dim + dim - 1] = 2.0f;
    ids[60] = 1000;
    Optimize(table.get(), ids, grads);
    EXPECT_NE(table->DebugString().find("\"nonfinite_gradients\": 3"), std::string::npos) << dim;
    const Floats got = Lookup(*table, {60, 61, 1000});
    EXPECT_TRUE(std::isnan(got[0])) << dim;
    const float once = -0.1f / std::sqrt(1.5f);
    EXPECT_NEAR(got[dim], once, 1e-6f) << dim;
    const float thrice = once - 0.2f / std::sqrt(5.5f) - 0.2f / std::sqrt(9.5f);
    EXPECT_NEAR(got[dim + 1], thrice, 1e-6f) << dim;
    EXPECT_TRUE(std::isnan(got[2 * dim])) << dim;
    EXPECT_NEAR(got[2 * dim + 1], -0.2f / std::sqrt(4.5f), 1e-6f) << dim;
  }
}

// A table of one Adagrad segment may have a pipeline of its own, one with another segment has not.
TEST(EmbeddingTableTest, AdagradRoundsTheSameInEveryPipeline) {
  for (const int64_t dim : {1, 5, 16, 33, 64}) {
    SegmentConfig adagrad = MakeSegment(dim, OptimizerKind::kAdagrad);
    adagrad.optimizer.initial_accumulator_value = 0.1f;
    adagrad.optimizer.weight_decay = 0.03f;
    const auto plain = MakeTable(MakeConfig({adagrad}));
    const auto mixed = MakeTable(MakeConfig({adagrad, MakeSegment(1, OptimizerKind::kSgd)}));
    Ids ids(50);
    std::iota(ids.begin(), ids.end(), 0);
    Step step;
    step.rates = {0.07f, 0.07f};
    for (int round = 0; round < 5; ++round) {
      Floats grads, mixed_grads;
      for (size_t i = 0; i < ids.size(); ++i) {
        for (int64_t k = 0; k < dim; ++k) {
          grads.push_back(std::sin(static_cast<float>(i * dim + k + 7 * round)));
          mixed_grads.push_back(grads.back());
        }
        mixed_grads.push_back(1.0f);
      }
      Optimize(plain.get(), ids, grads, step);
      Optimize(mixed.get(), ids, mixed_grads, step);
    }
    const Floats got = Lookup(*plain, ids), want = Lookup(*mixed, ids);
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int64_t k = 0; k < dim; ++k) EXPECT_EQ(got[i * dim + k], want[i * (dim + 1) + k]);
    }
  }
}

// Ids of one batch that are near and far apart in the pipeline, new ones and old ones.
TEST(EmbeddingTableTest, DuplicatesAtAnyDistanceAreAppliedInOrder) {
  for (const int64_t dim : {3, 16}) {
    SegmentConfig segment = MakeSegment(dim, OptimizerKind::kAdagrad);
    segment.optimizer.initial_accumulator_value = 0.1f;
    for (int64_t distance = 1; distance <= 40; ++distance) {
      const auto table = MakeTable(MakeConfig({segment}));
      const auto one_by_one = MakeTable(MakeConfig({segment}));
      Ids ids;
      Floats grads;
      for (int64_t i = 0; i < 200; ++i) {
        ids.push_back(i % distance);
        for (int64_t k = 0; k < dim; ++k) {
          grads.push_back(static_cast<float>(i + 1) / static_cast<float>(k + 1));
        }
      }
      Optimize(table.get(), ids, grads);
      for (int64_t i = 0; i < 200; ++i) {
        Optimize(one_by_one.get(), {ids[i]},
                 Floats(grads.begin() + i * dim, grads.begin() + (i + 1) * dim));
      }
      EXPECT_EQ(Lookup(*table, ids), Lookup(*one_by_one, ids)) << dim << " " << distance;
    }
  }
}

TEST(EmbeddingTableTest, ReinitializeTellsWhatExisted) {
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kAdagrad);
  segment.initializer.kind = InitializerKind::kConstants;
  segment.initializer.constant = 3.0f;
  const auto table = MakeTable(MakeConfig({segment}));
  Assign(table.get(), {2, 3}, {4, 4, 8, 8});
  const Ids ids = {1, 2, 3};
  std::vector<int32_t> existed(3, -5);

  ASSERT_TRUE(table->Reinitialize(ids.data(), 3, 1000, existed.data()).ok());

  EXPECT_EQ(existed, (std::vector<int32_t>{0, 1, 1}));
  EXPECT_EQ(Lookup(*table, ids), Floats(6, 3.0f));
  EXPECT_EQ(table->MaxUpdateTs(), 1000);
}

TEST(EmbeddingTableTest, TouchedIdsComeFromOptimizeOnly) {
  const auto table = SgdTable(1);
  std::vector<int64_t> touched;
  table->SetTouchedCallback(
      [&](const int64_t* ids, int64_t n) { touched.insert(touched.end(), ids, ids + n); });
  Assign(table.get(), {1}, {1});
  AssignAdd(table.get(), {2}, {1});
  EXPECT_TRUE(touched.empty());
  Optimize(table.get(), {3, 4}, {1, 1});
  std::sort(touched.begin(), touched.end());
  EXPECT_EQ(touched, (std::vector<int64_t>{3, 4}));
  int32_t existed;
  const int64_t id = 9;
  ASSERT_TRUE(table->Reinitialize(&id, 1, 0, &existed).ok());
  EXPECT_EQ(touched.size(), 3u);
}

TEST(EmbeddingTableTest, SlidingFilterLetsAnIdInAfterItsThreshold) {
  const auto table = SgdTable(1);
  std::unique_ptr<SlidingHashFilter> filter;
  ASSERT_TRUE(SlidingHashFilter::Create(1000, 7, {3, {}}, &filter).ok());
  Step step;
  step.write.filter = filter.get();
  const std::vector<Floats> want = {{0, 0}, {0.1f, 0}, {0.3f, 0}, {0.5f, 0.1f}};
  for (const Floats& values : want) {
    Optimize(table.get(), {0, 0, 1}, {-1, -1, -1}, step);
    ExpectNear(Lookup(*table, {0, 1}), values);
  }
}

TEST(EmbeddingTableTest, DedupAsksTheFilterOnceWithTheCount) {
  const auto table = SgdTable(1);
  std::unique_ptr<SlidingHashFilter> filter;
  ASSERT_TRUE(SlidingHashFilter::Create(1000, 7, {2, {}}, &filter).ok());
  Step step;
  step.dedup = true;
  step.write.filter = filter.get();
  Optimize(table.get(), {5, 5, 5}, {1, 1, 1}, step);
  EXPECT_EQ(table->Size(), 0);
  EXPECT_EQ(filter->Get(5), 3u);
  Optimize(table.get(), {5}, {1}, step);
  EXPECT_EQ(table->Size(), 1);
}

TEST(EmbeddingTableTest, DedupMayCountAnIdOnce) {
  ThreadPool pool(2);
  for (ParallelRunner* runner :
       {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
    const auto table = SgdTable(1);
    std::unique_ptr<SlidingHashFilter> filter;
    ASSERT_TRUE(SlidingHashFilter::Create(10000, 7, {2, {}}, &filter).ok());
    Step step;
    step.rates = {1.0f};
    step.dedup = true;
    step.count_once = true;
    step.write.filter = filter.get();
    step.write.runner = runner;
    const Ids ids(2000, 5);  // enough for several threads
    const Floats grads(2000, -1.0f);
    Optimize(table.get(), ids, grads, step);
    EXPECT_EQ(filter->Get(5), 1u);
    Optimize(table.get(), ids, grads, step);
    EXPECT_EQ(table->Size(), 0);
    Optimize(table.get(), ids, grads, step);
    EXPECT_EQ(Lookup(*table, {5}), (Floats{2000}));
  }
}

TEST(EmbeddingTableTest, OnceAnIdPassesLaterOccurrencesOfTheBatchPass) {
  // With probability 1/2 per occurrence; an id that is in must take all its later steps.
  std::unique_ptr<ProbabilisticFilter> filter;
  ASSERT_TRUE(ProbabilisticFilter::Create(false, {2, {}}, &filter).ok());
  const auto table = SgdTable(1);
  Step step;
  step.rates = {1.0f};
  step.write.filter = filter.get();
  Ids ids;
  for (int i = 0; i < 64; ++i) ids.insert(ids.end(), 20, i);
  Floats grads;
  for (int i = 0; i < 64; ++i) {
    // Powers of two: the sum shows which occurrences were applied.
    for (int k = 0; k < 20; ++k) grads.push_back(-static_cast<float>(1 << k));
  }
  Optimize(table.get(), ids, grads, step);
  for (int i = 0; i < 64; ++i) {
    const int applied = static_cast<int>(Lookup(*table, {i})[0]);
    const int suffix = applied == 0 ? 0 : applied & -applied;
    EXPECT_EQ(applied, applied == 0 ? 0 : (1 << 20) - suffix) << "id " << i;
  }
}

TEST(EmbeddingTableTest, ClearEmptiesAndTheTableGoesOn) {
  const auto table = SgdTable(1);
  Assign(table.get(), {1, 2, 3}, {1, 2, 3});
  table->Clear();
  EXPECT_EQ(table->Size(), 0);
  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{0, 0, 0}));
  Assign(table.get(), {2}, {5});
  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{0, 5, 0}));
}

TEST(EmbeddingTableTest, ReserveAndInitialCapacity) {
  TableConfig config = MakeConfig({MakeSegment(1, OptimizerKind::kSgd)});
  config.initial_capacity = 100000;
  const auto table = MakeTable(config);
  Assign(table.get(), {5}, {6});
  ASSERT_TRUE(table->Reserve(200000).ok());
  EXPECT_EQ(Lookup(*table, {5}), (Floats{6}));
  EXPECT_EQ(table->Reserve(-1).code, StatusCode::kInvalidArgument);
}

TEST(EmbeddingTableTest, ServingTablesCompressAndRefuseTraining) {
  SegmentConfig half = MakeSegment(2, OptimizerKind::kAbsent);
  half.compressor.kind = CompressorKind::kFp16;
  half.initializer.kind = InitializerKind::kAbsent;
  SegmentConfig byte = half;
  byte.compressor.kind = CompressorKind::kFixedR8;
  byte.compressor.range = 5.0f;
  const auto table = MakeTable(MakeConfig({half, byte}, EntryType::kServing));

  Assign(table.get(), {1}, {0.1f, 10000.0f, 3.5f, 100.0f});

  ExpectNear(Lookup(*table, {1}), {0.0999755859f, 10000.0f, 3.515625f, 4.9609375f});
  AssignAdd(table.get(), {1, 2}, {0, 1, 0, 0, 1, 0, 0.5f, 0});
  ExpectNear(Lookup(*table, {2}), {1, 0, 0.5f, 0}, 0.03f);
  EXPECT_FALSE(TryOptimize(table.get(), {1}, {1, 1, 1, 1}, {{0.1f, 0.1f}}).ok());
  ShardCursor cursor;
  std::string buffer;
  int64_t count = 0;
  EXPECT_FALSE(table->SaveShard(0, nullptr, 100, true, &cursor, &buffer, nullptr, &count).ok());
  std::vector<std::string> entries;
  const int64_t id = 1;
  EXPECT_FALSE(table->LookupEntries(&id, 1, &entries).ok());
}

TEST(EmbeddingTableTest, ServingTableRestoresTrainingRecords) {
  const auto training = MakeTable(MakeConfig({MakeSegment(2, OptimizerKind::kAdagrad)}));
  Assign(training.get(), {1, 2}, {0.1f, 0.2f, 3, 4});
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kAbsent);
  segment.compressor.kind = CompressorKind::kFp16;
  const auto serving = MakeTable(MakeConfig({segment}, EntryType::kServing));

  Restore(serving.get(), DumpRecords(*training));

  ExpectNear(Lookup(*serving, {1, 2, 3}), {0.0999755859f, 0.1999511719f, 3, 4, 0, 0});
}

TEST(EmbeddingTableTest, SkipZeroEmbedding) {
  TableConfig config = MakeConfig({MakeSegment(2, OptimizerKind::kSgd)});
  config.skip_zero_embedding = true;
  std::unique_ptr<EmbeddingTable> table;
  const Status status = EmbeddingTable::Create(config, &table);
  EXPECT_EQ(status.message, "Only EntryConfig_EntryType_SERVING supports skip_zero_embedding!");
  config.entry.type = EntryType::kServing;
  table = MakeTable(config);

  // In one batch: set, erase, set again, another id into the free row; and set, then erase.
  Assign(table.get(), {1, 1, 1, 2, 3, 3}, {1, 1, 0, 0, 2, 2, 3, 3, 4, 4, 0, 0});
  EXPECT_EQ(Lookup(*table, {1, 2, 3}), (Floats{2, 2, 3, 3, 0, 0}));
  EXPECT_EQ(table->Size(), 2);
  Assign(table.get(), {2, 9}, {1e-30f, 0, 0, 0});
  EXPECT_EQ(table->Size(), 1);

  const auto training = SgdTable(2);
  Assign(training.get(), {4, 5}, {0, 0, 1, 0});
  const LoadStats stats = Restore(table.get(), DumpRecords(*training));
  EXPECT_EQ(stats.skipped_zero, 1);
  EXPECT_EQ(table->Size(), 1);
}

TEST(EmbeddingTableTest, FusedLookupAndOptimizeOfManyTables) {
  ThreadPool pool(3);
  for (ParallelRunner* runner :
       {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
    const auto one = SgdTable(1);
    const auto two = SgdTable(2);
    Assign(one.get(), {0, 1}, {1, 1});
    const float rates[] = {0.1f};
    const Ids ids_a = {0}, ids_b = {4}, ids_c = {1}, ids_d = {3};
    const Floats grads = {-1, -2, -2, -1, -2, -2};
    const WriteSpan first[] = {{ids_a.data(), 1, &grads[0]}, {ids_c.data(), 1, &grads[3]}};
    const WriteSpan second[] = {{ids_b.data(), 1, &grads[1]}, {ids_d.data(), 1, &grads[4]}};
    std::vector<OptimizeRequest> requests(2);
    requests[0].table = one.get();
    requests[0].spans = first;
    requests[1].table = two.get();
    requests[1].spans = second;
    for (OptimizeRequest& request : requests) {
      request.num_spans = 2;
      request.options.learning_rates = rates;
      request.options.num_learning_rates = 1;
    }

    ASSERT_TRUE(EmbeddingTable::OptimizeMany(requests.data(), 2, runner).ok());

    Floats out(6);
    const std::vector<LookupRequest> lookups = {{one.get(), ids_a.data(), 1, &out[0]},
                                                {two.get(), ids_b.data(), 1, &out[1]},
                                                {one.get(), ids_c.data(), 1, &out[3]},
                                                {two.get(), ids_d.data(), 1, &out[4]}};
    EmbeddingTable::LookupMany(lookups.data(), 4, runner);
    ExpectNear(out, {1.1f, 0.2f, 0.2f, 1.1f, 0.2f, 0.2f});
  }
}

// Tables of different widths and codecs, parts from nothing to more than a tile, absent ids.
TEST(EmbeddingTableTest, LookupsOfManyTablesEqualSingleOnes) {
  const int64_t dims[] = {16, 16, 16, 5, 5, 1, 64, 16};
  const int64_t sizes[] = {0, 1, 7, 8, 150, 3, 9000, 2};
  std::vector<std::unique_ptr<EmbeddingTable>> tables;
  std::vector<Ids> ids;
  std::vector<Floats> wanted, out;
  for (int64_t t = 0; t < 40; ++t) {
    const EntryType type = t % 11 == 10 ? EntryType::kServing : EntryType::kTraining;
    tables.push_back(
        MakeTable(MakeConfig({MakeSegment(dims[t % 8], OptimizerKind::kAdagrad)}, type)));
    Ids known(3000);
    Floats values;
    for (int64_t i = 0; i < 3000; ++i) {
      known[i] = i * 7 + t;
      values.insert(values.end(), dims[t % 8], static_cast<float>(i + t));
    }
    Assign(tables.back().get(), known, values);
    ids.emplace_back();
    for (int64_t i = 0; i < sizes[t * 5 % 8]; ++i) ids.back().push_back(i * 37 % 21000);
    wanted.push_back(Lookup(*tables.back(), ids.back()));
    out.emplace_back(wanted.back().size(), -777.0f);
  }
  ThreadPool pool(3);
  for (ParallelRunner* runner :
       {static_cast<ParallelRunner*>(nullptr), static_cast<ParallelRunner*>(&pool)}) {
    std::vector<LookupRequest> requests;
    for (size_t t = 0; t < tables.size(); ++t) {
      std::fill(out[t].begin(), out[t].end(), -777.0f);
      requests.push_back(
          {tables[t].get(), ids[t].data(), static_cast<int64_t>(ids[t].size()), out[t].data()});
    }
    EmbeddingTable::LookupMany(requests.data(), static_cast<int64_t>(requests.size()), runner);
    EXPECT_EQ(out, wanted);
  }
  for (const Floats& values : wanted) {
    EXPECT_EQ(std::count(values.begin(), values.end(), -777.0f), 0);
  }
}

TEST(EmbeddingTableTest, FusedErrorChangesNoTable) {
  const auto good = SgdTable(1);
  const auto bad = MakeTable(
      MakeConfig({MakeSegment(1, OptimizerKind::kSgd), MakeSegment(1, OptimizerKind::kSgd)}));
  const float rates[] = {0.1f};
  const Ids ids = {1};
  const Floats grads = {1, 1};
  const WriteSpan span{ids.data(), 1, grads.data()};
  std::vector<OptimizeRequest> requests(2);
  requests[0].table = good.get();
  requests[1].table = bad.get();
  for (OptimizeRequest& request : requests) {
    request.spans = &span;
    request.num_spans = 1;
    request.options.learning_rates = rates;
    request.options.num_learning_rates = 1;
  }
  EXPECT_FALSE(EmbeddingTable::OptimizeMany(requests.data(), 2, nullptr).ok());
  EXPECT_EQ(good->Size(), 0);
}

TEST(EmbeddingTableTest, DedupOverSpansSumsInOrder) {
  const auto table = SgdTable(1);
  const float rates[] = {1.0f};
  const Ids ids = {1};
  const Floats a = {1}, b = {2};
  const WriteSpan spans[] = {{ids.data(), 1, a.data()}, {ids.data(), 1, b.data()}};
  OptimizeRequest request;
  request.table = table.get();
  request.spans = spans;
  request.num_spans = 2;
  request.options.learning_rates = rates;
  request.options.num_learning_rates = 1;
  request.options.dedup = true;
  ASSERT_TRUE(EmbeddingTable::OptimizeMany(&request, 1, nullptr).ok());
  EXPECT_EQ(Lookup(*table, {1}), (Floats{-3}));
}

TEST(EmbeddingTableTest, ContainsAnswersPerId) {
  const auto table = SgdTable(1);
  Assign(table.get(), {1, 3}, {0, 0});
  const Ids ids = {0, 1, 2, 3, 1};
  std::vector<uint8_t> found(5, 9);
  table->Contains(ids.data(), 5, found.data());
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 1, 0, 1, 1}));
}

}  // namespace
}  // namespace engine
}  // namespace monolith
