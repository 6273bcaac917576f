// Every worked number of the per-row optimizers, through a table.
#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/hash_table/optimizer/stochastic_rounding.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

OptimizerConfig Kind(OptimizerKind kind) {
  OptimizerConfig config;
  config.kind = kind;
  return config;
}

// Values after each of a list of gradients, starting from `start`.
class Trainer {
 public:
  Trainer(const OptimizerConfig& optimizer, int64_t dim, float rate) : rate_(rate) {
    SegmentConfig segment = MakeSegment(dim, optimizer.kind);
    segment.optimizer = optimizer;
    table_ = MakeTable(MakeConfig({segment}));
  }
  void Start(const Floats& values) { Assign(table_.get(), {1}, values); }
  Floats Take(const Floats& gradient, int64_t step = 0) {
    Step options;
    options.rates = {rate_};
    options.global_step = step;
    Optimize(table_.get(), {1}, gradient, options);
    return Lookup(*table_, {1});
  }
  EmbeddingTable* table() { return table_.get(); }

 private:
  float rate_;
  std::unique_ptr<EmbeddingTable> table_;
};

TEST(OptimizersTest, Sgd) {
  ExpectNear(Trainer(Kind(OptimizerKind::kSgd), 1, 0.1f).Take({1}), {-0.1f});
}

TEST(OptimizersTest, Adagrad) {
  OptimizerConfig config = Kind(OptimizerKind::kAdagrad);
  config.initial_accumulator_value = 1.0f;
  Trainer trainer(config, 2, 0.1f);
  ExpectNear(trainer.Take({1, 2}), {-0.07071068f, -0.08944272f});
  ExpectNear(trainer.Take({1, 1}), {-0.12844571f, -0.13026755f});

  config.weight_decay = 0.1f;
  Trainer decayed(config, 2, 0.1f);
  decayed.Take({1, 2});
  ExpectNear(decayed.Take({1, 2}), {-0.128173f, -0.155943f});

  config = Kind(OptimizerKind::kAdagrad);
  Trainer defaults(config, 1, 1.0f);
  ExpectNear(defaults.Take({1}), {-0.9534626f});
  ExpectNear(defaults.Take({1}), {-1.6435282f});
}

TEST(OptimizersTest, AdagradWithoutAccumulatorAndGradientStaysFinite) {
  OptimizerConfig config = Kind(OptimizerKind::kAdagrad);
  config.initial_accumulator_value = 0.0f;
  Trainer trainer(config, 3, 0.1f);
  trainer.Start({1, 2, 3});
  EXPECT_EQ(trainer.Take({0, 0, 0}), (Floats{1, 2, 3}));
}

TEST(OptimizersTest, Adadelta) {
  Trainer trainer(Kind(OptimizerKind::kAdadelta), 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.0031607f, -0.0030151f});
  ExpectNear(trainer.Take({10, 1}), {-0.0064035f, -0.0061047f});
}

TEST(OptimizersTest, Adam) {
  Trainer trainer(Kind(OptimizerKind::kAdam), 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.00990099f, -0.00909091f});
  ExpectNear(trainer.Take({10, 1}), {-0.0198306f, -0.01842895f});

  OptimizerConfig nesterov = Kind(OptimizerKind::kAdam);
  nesterov.use_nesterov = true;
  ExpectNear(Trainer(nesterov, 2, 0.01f).Take({10, 1}), {-0.01881188f, -0.01727273f});
}

TEST(OptimizersTest, AdamStateSurvivesSaveAndRestore) {
  Trainer trainer(Kind(OptimizerKind::kAdam), 2, 0.01f);
  trainer.Take({10, 1});
  EXPECT_EQ(Restore(trainer.table(), DumpRecords(*trainer.table())).state_reset, 0);
  ExpectNear(trainer.Take({10, 1}), {-0.0198306f, -0.01842895f});
}

TEST(OptimizersTest, Amsgrad) {
  Trainer trainer(Kind(OptimizerKind::kAmsgrad), 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.00990099f, -0.00909091f});
  ExpectNear(trainer.Take({10, 1}), {-0.0198306f, -0.01842895f});
  ExpectNear(trainer.Take({0, 0}), {-0.02748511f, -0.02562744f});
}

TEST(OptimizersTest, Momentum) {
  OptimizerConfig config = Kind(OptimizerKind::kMomentum);
  Trainer trainer(config, 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.1f, -0.01f});
  ExpectNear(trainer.Take({10, 1}), {-0.29f, -0.029f});
  config.use_nesterov = true;
  Trainer nesterov(config, 2, 0.01f);
  ExpectNear(nesterov.Take({10, 1}), {-0.19f, -0.019f});
  ExpectNear(nesterov.Take({10, 1}), {-0.461f, -0.0461f});
}

TEST(OptimizersTest, MovingAverage) {
  Trainer trainer(Kind(OptimizerKind::kMovingAverage), 2, 0.5f);
  ExpectNear(trainer.Take({10, 1}), {1.0f, 0.1f});
  ExpectNear(trainer.Take({10, 1}), {1.9f, 0.19f});
}

TEST(OptimizersTest, Ftrl) {
  OptimizerConfig config = Kind(OptimizerKind::kFtrl);
  Trainer trainer(config, 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.009995f, -0.00953463f});
  ExpectNear(trainer.Take({10, 1}), {-0.0170643f, -0.0164353f});

  config.beta = 1.0f;
  config.l1 = 1.0f;
  config.l2 = 2.0f;
  ExpectNear(Trainer(config, 3, 0.01f).Take({10, -10, 0.5f}), {-0.00816327f, 0.00816327f, 0});
}

TEST(OptimizersTest, RateZeroLeavesRegularisedOptimizersUnchanged) {
  for (const OptimizerKind kind :
       {OptimizerKind::kFtrl, OptimizerKind::kGroupFtrl, OptimizerKind::kGroupAdagrad}) {
    Trainer trainer(Kind(kind), 2, 0.0f);
    trainer.Start({1, 2});
    EXPECT_EQ(trainer.Take({3, 4}), (Floats{1, 2}));
  }
}

TEST(OptimizersTest, GroupFtrl) {
  OptimizerConfig config = Kind(OptimizerKind::kGroupFtrl);
  config.beta = 1.0f;
  config.initial_accumulator_value = 0.0f;
  Trainer trainer(config, 2, 0.01f);
  ExpectNear(trainer.Take({10, 1}), {-0.00909091f, -0.005f});
  ExpectNear(trainer.Take({10, 1}), {-0.015695f, -0.00914214f});
  config.l1 = 1.0f;
  config.l2 = 0.5f;
  ExpectNear(Trainer(config, 2, 0.01f).Take({10, 1}), {-0.00818261f, -0.00449125f});
  ExpectNear(Trainer(config, 2, 0.01f).Take({0.3f, 0.4f}), {0, 0});
  config.l1 = 0.0f;
  ExpectNear(Trainer(config, 2, 0.01f).Take({0, 0}), {0, 0});
}

TEST(OptimizersTest, GroupAdagrad) {
  OptimizerConfig config = Kind(OptimizerKind::kGroupAdagrad);
  config.beta = 1.0f;
  config.initial_accumulator_value = 0.0f;
  config.l2 = 1.0f;
  Trainer one(config, 1, 0.01f);
  ExpectNear(one.Take({10}), {-0.00818182f});
  ExpectNear(one.Take({10}), {-0.0141255f});
  config.l2 = 0.5f;
  Trainer two(config, 2, 0.01f);
  ExpectNear(two.Take({10, 1}), {-0.00863862f, -0.00086386f});
  ExpectNear(two.Take({1, 5}), {-0.0090962f, -0.00477795f});
  config.l2 = 0.0f;
  ExpectNear(Trainer(config, 2, 0.01f).Take({10, 1}), {-0.00909091f, -0.00090909f});
  ExpectNear(Trainer(config, 2, 0.01f).Take({0, 0}), {0, 0});
  config.l2 = 1000.0f;
  ExpectNear(Trainer(config, 2, 0.01f).Take({10, 1}), {0, 0});
}

TEST(OptimizersTest, Rmsprop) {
  Trainer v1(Kind(OptimizerKind::kRmsprop), 1, 0.01f);
  ExpectNear(v1.Take({10}), {-0.0240253f});
  ExpectNear(v1.Take({10}), {-0.0426859f});
  Trainer v2(Kind(OptimizerKind::kRmspropV2), 2, 0.01f);
  ExpectNear(v2.Take({10, 1}), {-0.0090909f, -0.005f});
  ExpectNear(v2.Take({10, 1}), {-0.0158550f, -0.0092045f});
}

TEST(OptimizersTest, BatchSoftmax) {
  Trainer trainer(Kind(OptimizerKind::kBatchSoftmax), 1, 0.1f);
  ExpectNear(trainer.Take({7}, 1), {0.1f});
  ExpectNear(trainer.Take({7}, 0), {-0.01f});
  for (const int interval : {5, 10}) {
    Trainer averaging(Kind(OptimizerKind::kBatchSoftmax), 1, 0.1f);
    Floats value;
    for (int step = 0; step < 1000; step += interval) value = averaging.Take({0}, step);
    EXPECT_NEAR(1.0f / value[0], 1.0f / static_cast<float>(interval), 1e-3f);
  }
}

TEST(OptimizersTest, BatchSoftmaxKeepsItsStepInTheCheckpoint) {
  Trainer trainer(Kind(OptimizerKind::kBatchSoftmax), 1, 0.1f);
  trainer.Take({0}, int64_t{1} << 40);
  Restore(trainer.table(), DumpRecords(*trainer.table()));
  const Floats before = Lookup(*trainer.table(), {1});
  ExpectNear(trainer.Take({0}, (int64_t{1} << 40) + 3), {0.9f * before[0] + 0.3f},
             before[0] * 1e-6f);
}

TEST(OptimizersTest, NegativeStepIsAnErrorWhereTheStepCounts) {
  Trainer trainer(Kind(OptimizerKind::kBatchSoftmax), 1, 0.1f);
  Step step;
  step.global_step = -1;
  EXPECT_EQ(TryOptimize(trainer.table(), {1}, {1}, step).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(trainer.table()->Size(), 0);
}

TEST(OptimizersTest, DynamicWdAdagradStaticPart) {
  OptimizerConfig config = Kind(OptimizerKind::kDynamicWdAdagrad);
  config.weight_decay = 0.1f;
  Trainer coupled(config, 2, 0.1f);
  coupled.Start({0.5f, -0.5f});
  ExpectNear(coupled.Take({1, 2}), {0.40424824f, -0.59871048f});
  ExpectNear(coupled.Take({1, 2}), {0.3354196f, -0.66877997f});
  config.decouple_weight_decay = true;
  Trainer decoupled(config, 2, 0.1f);
  decoupled.Start({0.5f, -0.5f});
  ExpectNear(decoupled.Take({1, 2}), {0.39965373f, -0.59377295f});
  ExpectNear(decoupled.Take({1, 2}), {0.32665065f, -0.65810806f});
}

TEST(OptimizersTest, CombinationRestoresStatePerSegment) {
  std::vector<SegmentConfig> segments = {MakeSegment(1, OptimizerKind::kAdagrad),
                                         MakeSegment(2, OptimizerKind::kAdagrad)};
  segments[0].optimizer.initial_accumulator_value = 1.0f;
  segments[1].optimizer.initial_accumulator_value = 2.0f;
  const auto table = MakeTable(MakeConfig(segments));
  Step step;
  step.rates = {1, 2};
  Optimize(table.get(), {1}, {1, 2, 3}, step);
  ExpectNear(Lookup(*table, {1}), {-0.70710677f, -1.6329931f, -1.8090681f});
  Restore(table.get(), DumpRecords(*table));
  Assign(table.get(), {1}, {0, 0, 0});
  Optimize(table.get(), {1}, {1, 2, 3}, step);
  ExpectNear(Lookup(*table, {1}), {-0.57735026f, -1.264911f, -1.3416407f});
}

TEST(OptimizersTest, EveryOptimizerRestoresItsState) {
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kAdadelta,
        OptimizerKind::kAdam, OptimizerKind::kAmsgrad, OptimizerKind::kMomentum,
        OptimizerKind::kMovingAverage, OptimizerKind::kFtrl, OptimizerKind::kGroupFtrl,
        OptimizerKind::kGroupAdagrad, OptimizerKind::kRmsprop, OptimizerKind::kRmspropV2,
        OptimizerKind::kBatchSoftmax, OptimizerKind::kDynamicWdAdagrad}) {
    const int64_t dim = kind == OptimizerKind::kBatchSoftmax ? 1 : 5;
    Trainer kept(Kind(kind), dim, 0.1f), restored(Kind(kind), dim, 0.1f);
    const Floats gradient(dim, 0.75f);
    kept.Take(gradient, 3);
    restored.Take(gradient, 3);
    EXPECT_EQ(Restore(restored.table(), DumpRecords(*restored.table())).state_reset, 0);
    EXPECT_EQ(restored.Take(gradient, 4), kept.Take(gradient, 4))
        << "optimizer kind " << static_cast<int>(kind);
  }
}

// Long rows take the vector loop and its rest: every element must get the same as a row of one.
TEST(OptimizersTest, WideRowsEqualNarrowOnes) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdagrad, OptimizerKind::kAdam, OptimizerKind::kFtrl,
        OptimizerKind::kAdadelta, OptimizerKind::kMomentum, OptimizerKind::kRmspropV2}) {
    Trainer wide(Kind(kind), 37, 0.1f), narrow(Kind(kind), 1, 0.1f);
    for (const float g : {1.5f, -0.25f, 2.0f}) {
      const Floats got = wide.Take(Floats(37, g));
      const Floats want = narrow.Take({g});
      for (const float value : got) EXPECT_NEAR(value, want[0], 1e-6f);
    }
  }
}

TEST(OptimizersTest, StochasticRoundingIsUnbiasedAndStaysOnTheGrid) {
  constexpr int kDraws = 20000;
  Floats values(kDraws, 0.1f);
  StochasticRoundToHalf(values.data(), kDraws);
  int high = 0;
  for (const float value : values) {
    ASSERT_TRUE(value == 0.0999755859375f || value == 0.10003662109375f) << value;
    high += value == 0.10003662109375f;
  }
  EXPECT_NEAR(static_cast<double>(high) / kDraws, 0.4000244, 0.02);

  values.assign(kDraws, -0.1f);
  StochasticRoundToHalf(values.data(), kDraws);
  high = 0;
  for (const float value : values) high += value == -0.0999755859375f;
  EXPECT_NEAR(static_cast<double>(high) / kDraws, 0.5999756, 0.02);

  Floats special = {0.0f, 1.0f, -2.5f, 1e6f, -1e6f, 65504.0f};
  StochasticRoundToHalf(special.data(), 6);
  EXPECT_EQ(special, (Floats{0.0f, 1.0f, -2.5f, 65504.0f, -65504.0f, 65504.0f}));
}

TEST(OptimizersTest, StochasticRoundingTouchesItsOwnSegmentOnly) {
  std::vector<SegmentConfig> segments = {MakeSegment(1, OptimizerKind::kSgd),
                                         MakeSegment(1, OptimizerKind::kSgd)};
  segments[0].optimizer.stochastic_rounding_float16 = true;
  const auto table = MakeTable(MakeConfig(segments));
  Step step;
  step.rates = {1, 1};
  Optimize(table.get(), {1}, {-0.1f, -0.1f}, step);
  const Floats got = Lookup(*table, {1});
  EXPECT_NE(got[0], 0.1f);
  EXPECT_NEAR(got[0], 0.1f, 1e-4f);
  EXPECT_EQ(got[1], 0.1f);
}

TEST(OptimizersTest, CreationErrorsNameSegmentAndField) {
  const auto error = [](const TableConfig& config) {
    std::unique_ptr<EmbeddingTable> table;
    const Status status = EmbeddingTable::Create(config, &table);
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    return status.message;
  };
  const auto with = [](void (*change)(SegmentConfig*)) {
    SegmentConfig bad = MakeSegment(2, OptimizerKind::kAdam);
    change(&bad);
    return MakeConfig({MakeSegment(1, OptimizerKind::kSgd), bad});
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
  };
  contains(error(with([](SegmentConfig* s) { s->optimizer.kind = OptimizerKind::kUnset; })),
           "OptimizerConfig must be set type");
  contains(error(with([](SegmentConfig* s) { s->optimizer.kind = OptimizerKind::kDc; })),
           "optimizer is not implemented yet. ");
  contains(error(with([](SegmentConfig* s) {
             s->optimizer.kind = OptimizerKind::kDynamicWdAdagrad;
             s->optimizer.enable_dynamic_wd = true;
           })),
           "optimizer is not implemented yet. ");
  contains(error(with([](SegmentConfig* s) { s->optimizer.kind = OptimizerKind::kAbsent; })),
           "init or opt config is missing from entry config : ");
  contains(error(with([](SegmentConfig* s) { s->initializer.kind = InitializerKind::kUnset; })),
           "InitializerConfig must be set type");
  contains(error(with([](SegmentConfig* s) { s->optimizer.beta1 = 1.0f; })), "segment 1: beta1");
  contains(error(with([](SegmentConfig* s) { s->dim_size = 0; })), "segment 1: dim_size is 0");
  contains(error(with([](SegmentConfig* s) { s->optimizer.initial_accumulator_value = -1.0f; })),
           "segment 1: initial_accumulator_value");
  contains(error(with([](SegmentConfig* s) {
             s->optimizer.epsilon = std::numeric_limits<float>::infinity();
           })),
           "segment 1: epsilon");
  contains(error(with([](SegmentConfig* s) { s->optimizer.kind = OptimizerKind::kBatchSoftmax; })),
           "batch_softmax has dim_size 2");
  contains(error(with([](SegmentConfig* s) {
             s->compressor.kind = CompressorKind::kOneBit;
             s->compressor.step_size = 0;
           })),
           "segment 1: step_size");
  contains(error(MakeConfig({})), "no segments");
  contains(error(MakeConfig({MakeSegment(1, OptimizerKind::kSgd)}, EntryType::kUnknown)),
           "Unknown entry type: ");
  SegmentConfig bare = MakeSegment(1, OptimizerKind::kSgd);
  bare.compressor.kind = CompressorKind::kAbsent;
  contains(error(MakeConfig({bare}, EntryType::kServing)),
           "comp config is missing form entry config: ");
}

}  // namespace
}  // namespace engine
}  // namespace monolith
