#include "monolith/native_training/runtime/distribution/embedding_layout.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "monolith/native_training/runtime/distribution/layout_plan.h"
#include "monolith/native_training/runtime/distribution/row_scatter.h"
#include "tests/native_training/runtime/concurrency/test_threads.h"

namespace monolith {
namespace distribution {
namespace {

constexpr uint32_t kShared = 0x80000000u;

// Two examples with a SUM, a shared MEAN and a FIRSTN feature.
class LayoutTest : public ::testing::Test {
 protected:
  LayoutTest() {
    config_.features["fa"] = {"t", Pooling::kSum, 3, 0};
    config_.features["fb"] = {"t", Pooling::kMean, 3, 0};
    config_.features["fs"] = {"t", Pooling::kFirstN, 2, 2};
    config_.outs["bias"] = {OutType::kAddN, {{"fa", 0, 1}, {"fb", 0, 1}}, {{-1, 1}}};
    config_.outs["none"] = {OutType::kNone, {{"fb", 1, 3}, {"fa", 0, 1}}, {{-1, 2}, {-1, 1}}};
    config_.outs["seq"] = {OutType::kNone, {{"fs", 0, 2}}, {{-1, 2, 2}}};
    config_.outs["stk"] = {OutType::kStack, {{"fa", 1, 3}, {"fb", 1, 3}}, {{-1, 2, 2}}};
    config_.outs["vec"] = {OutType::kConcat, {{"fa", 1, 3}, {"fb", 1, 3}}, {{-1, 4}}};
    request_.ids = ids_.data();
    request_.num_ids = static_cast<int64_t>(ids_.size());
    request_.rows = rows_.data();
    request_.num_rows = static_cast<int64_t>(rows_.size());
    request_.starts = starts_.data();
    request_.num_starts = static_cast<int64_t>(starts_.size());
    request_.batch_size = 2;
    request_.blocks = {{1, 18}};
  }

  std::string Build(const engine::ParallelRunner& parallel = engine::InlineRunner()) {
    LayoutPlan plan;
    EXPECT_EQ(plan.Build(config_), "");
    LayoutBatch batch;
    return batch.Build(parallel, plan, request_);
  }

  LayoutConfig config_;
  std::vector<uint64_t> ids_ = {0, 3, 3, 6, 9, 12, 14, 16, 16};
  std::vector<int32_t> rows_ = {0, 2, 3, 5, 8, 9};
  std::vector<uint32_t> starts_ = {0, 2 | kShared, 3, 5};
  std::vector<float> embeddings_ = {1, 10, 11, 2,   20,  21,  4,   40,  41,
                                    6, 60, 61, 100, 101, 200, 201, 300, 301};
  LayoutRequest request_;
};

TEST_F(LayoutTest, WorkedExampleForwardAndBackward) {
  LayoutPlan plan;
  ASSERT_EQ(plan.Build(config_), "");
  LayoutBatch batch;
  ASSERT_EQ(batch.Build(engine::InlineRunner(), plan, request_), "");

  std::vector<std::vector<float>> outputs;
  std::vector<float*> to;
  for (const auto& output : plan.outputs()) outputs.emplace_back(2 * output.row_size, -1.0f);
  for (auto& output : outputs) to.push_back(output.data());
  batch.Forward(engine::InlineRunner(), {embeddings_.data()}, 0, to);
  const std::vector<std::vector<float>> want = {
      {8, 7},
      {50, 51, 50, 51},
      {3, 2},
      {100, 101, 200, 201, 300, 301, 0, 0},
      {30, 32, 50, 51, 20, 21, 50, 51},
      {30, 32, 50, 51, 20, 21, 50, 51},
  };
  EXPECT_EQ(outputs, want);

  std::vector<const float*> ones;
  for (auto& output : outputs) {
    std::fill(output.begin(), output.end(), 1.0f);
    ones.push_back(output.data());
  }
  std::vector<float> grad(18, 0.0f);
  batch.Backward(engine::InlineRunner(), ones, 0, {grad.data()});
  EXPECT_EQ(grad, (std::vector<float>{2, 2, 2, 4, 4, 4, 1, 3, 3, 1, 3, 3, 1, 1, 1, 1, 1, 1}));
}

TEST_F(LayoutTest, EveryBrokenOffsetIsNamed) {
  EXPECT_EQ(Build(), "");
  ids_[0] = 16;
  EXPECT_NE(Build().find("fid_offset[0]"), std::string::npos);
  ids_[0] = uint64_t{1} << 32;
  EXPECT_NE(Build().find("beyond the last of 1"), std::string::npos);
  ids_[0] = std::numeric_limits<uint64_t>::max();
  EXPECT_NE(Build().find("fid_offset[0]"), std::string::npos);
  ids_[0] = 0;
  rows_[2] = 1;
  EXPECT_NE(Build().find("feature_offset[2] is 1"), std::string::npos);
  rows_[2] = 10;
  EXPECT_NE(Build().find("feature_offset[2] is 10"), std::string::npos);
  rows_[2] = 3;
  starts_[2] = 1;
  EXPECT_NE(Build().find("nfl_offset[2] is 1"), std::string::npos);
  starts_[2] = 3;
  request_.batch_size = 3;
  EXPECT_NE(Build().find("'fa' has 2 rows, want batch_size = 3"), std::string::npos);
}

TEST_F(LayoutTest, RandomOffsetsAreRefusedOrSafe) {
  // Whatever the offsets hold, either building names a fault or the kernels stay inside their
  // tensors; the address sanitizer watches the latter.
  std::mt19937_64 random(1);
  LayoutPlan plan;
  ASSERT_EQ(plan.Build(config_), "");
  int accepted = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<uint64_t> ids(random() % 12);
    for (uint64_t& id : ids) id = random() % 20 == 0 ? random() : random() % 17;
    std::vector<int32_t> rows(random() % 8);
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r] = static_cast<int32_t>((r == 0 ? 0 : rows[r - 1]) + random() % 3);
    }
    std::vector<uint32_t> starts(3 + random() % 2);
    for (size_t f = 0; f < starts.size(); ++f) {
      starts[f] = static_cast<uint32_t>(((f == 0 ? 0 : starts[f - 1] & ~kShared) + random() % 3) |
                                        (random() % 2 ? kShared : 0));
    }
    LayoutRequest request = request_;
    request.ids = ids.data();
    request.num_ids = static_cast<int64_t>(ids.size());
    request.rows = rows.data();
    request.num_rows = static_cast<int64_t>(rows.size());
    request.starts = starts.data();
    request.num_starts = static_cast<int64_t>(starts.size());
    request.batch_size = static_cast<int64_t>(random() % 3);
    LayoutBatch batch;
    if (!batch.Build(engine::InlineRunner(), plan, request).empty()) continue;
    ++accepted;
    std::vector<std::vector<float>> outputs;
    std::vector<float*> to;
    std::vector<const float*> from;
    for (const auto& output : plan.outputs()) {
      outputs.emplace_back(request.batch_size * output.row_size);
    }
    for (auto& output : outputs) {
      to.push_back(output.data());
      from.push_back(output.data());
    }
    batch.Forward(engine::InlineRunner(), {embeddings_.data()}, 0, to);
    std::vector<float> grad(18, 0.0f);
    batch.Backward(engine::InlineRunner(), from, 0, {grad.data()});
  }
  EXPECT_GT(accepted, 100);
}

TEST_F(LayoutTest, ThreadsDoNotChangeABit) {
  const int64_t batch_size = 3000;
  std::mt19937_64 random(2);
  std::vector<uint64_t> ids;
  std::vector<int32_t> rows = {0};
  std::vector<uint32_t> starts;
  const int64_t base[3] = {0, 3000, 6000};
  for (int f = 0; f < 3; ++f) {
    starts.push_back(static_cast<uint32_t>(f * batch_size));
    const int64_t width = f == 2 ? 2 : 3;
    for (int64_t b = 0; b < batch_size; ++b) {
      for (uint64_t k = random() % 6; k > 0; --k) ids.push_back(base[f] + random() % 1000 * width);
      rows.push_back(static_cast<int32_t>(ids.size()));
    }
  }
  std::vector<float> embeddings(8000);
  for (float& value : embeddings) value = static_cast<float>(random() % 1000) / 7;
  request_.ids = ids.data();
  request_.num_ids = static_cast<int64_t>(ids.size());
  request_.rows = rows.data();
  request_.num_rows = static_cast<int64_t>(rows.size());
  request_.starts = starts.data();
  request_.num_starts = 3;
  request_.batch_size = batch_size;
  request_.blocks = {{1, 8000}};
  LayoutPlan plan;
  ASSERT_EQ(plan.Build(config_), "");

  std::vector<std::vector<std::vector<float>>> results;
  for (const int threads : {1, 4}) {
    const engine::TestThreads parallel(threads);
    LayoutBatch batch;
    ASSERT_EQ(batch.Build(parallel, plan, request_), "");
    std::vector<std::vector<float>> outputs;
    std::vector<float*> to;
    std::vector<const float*> from;
    for (const auto& output : plan.outputs()) outputs.emplace_back(batch_size * output.row_size);
    for (auto& output : outputs) {
      to.push_back(output.data());
      from.push_back(output.data());
    }
    batch.Forward(parallel, {embeddings.data()}, 0, to);
    std::vector<float> grad(8000, 0.0f);
    batch.Backward(parallel, from, 0, {grad.data()});
    outputs.push_back(grad);
    results.push_back(outputs);
  }
  EXPECT_EQ(results[0], results[1]);
}

// Compares every width up to two blocks of columns and beyond, both kinds of stride and several
// blocks with the definition, forward and backward.
TEST(LayoutWidthTest, EqualsTheDefinition) {
  std::mt19937_64 random(4);
  const int64_t batch_size = 300;
  for (const bool unit_stride : {true, false}) {
    for (int64_t width = 1; width <= 75; width += width < 40 ? 1 : 7) {
      const int64_t left = width / 3;
      LayoutConfig config;
      for (const char* name : {"mean", "sum"}) {
        config.features[name] = {"t", name[0] == 'm' ? Pooling::kMean : Pooling::kSum, width, 0};
      }
      config.outs["add"] = {OutType::kAddN, {{"mean", 0, width}, {"sum", 0, width}}, {{-1, width}}};
      config.outs["cat"] = {OutType::kConcat,
                            {{"sum", left, width}, {"mean", left, width}},
                            {{-1, 2 * (width - left)}}};
      LayoutPlan plan;
      ASSERT_EQ(plan.Build(config), "");

      const int64_t num_rows = 50, size = num_rows * width;  // per block
      std::vector<std::vector<float>> data(2, std::vector<float>(size));
      for (auto& block : data) {
        for (float& value : block) value = static_cast<float>(random() % 64) / 4;
      }
      std::vector<uint64_t> ids;
      std::vector<int32_t> rows = {0};
      for (int64_t r = 0; r < 2 * batch_size; ++r) {
        for (uint64_t k = random() % 5; k > 0; --k) {
          const uint64_t row = random() % num_rows;
          ids.push_back((random() % 2) << 32 | (unit_stride ? row * width : row));
        }
        rows.push_back(static_cast<int32_t>(ids.size()));
      }
      const std::vector<uint32_t> starts = {0, batch_size, 2 * batch_size};
      LayoutRequest request;
      request.ids = ids.data();
      request.num_ids = static_cast<int64_t>(ids.size());
      request.rows = rows.data();
      request.num_rows = static_cast<int64_t>(rows.size());
      request.starts = starts.data();
      request.num_starts = 3;
      request.batch_size = batch_size;
      request.blocks.assign(2, {unit_stride ? 1 : width, size});
      LayoutBatch batch;
      ASSERT_EQ(batch.Build(engine::TestThreads(3), plan, request), "");

      const auto position = [&](uint64_t id) {
        return static_cast<int64_t>(id & 0xffffffffu) * (unit_stride ? 1 : width);
      };
      std::vector<float> add(batch_size * width, 7), cat(batch_size * 2 * (width - left), 7);
      batch.Forward(engine::TestThreads(3), {data[0].data(), data[1].data()}, 0,
                    {add.data(), cat.data()});
      std::vector<std::vector<float>> got_grad(2, std::vector<float>(size, 0.0f));
      batch.Backward(engine::TestThreads(3), {add.data(), cat.data()}, 0,
                     {got_grad[0].data(), got_grad[1].data()});

      std::vector<std::vector<double>> want_grad(2, std::vector<double>(size, 0));
      for (int64_t b = 0; b < batch_size; ++b) {
        for (int64_t c = 0; c < width; ++c) {
          double pooled[2] = {0, 0};
          for (int f = 0; f < 2; ++f) {
            const int32_t begin = rows[f * batch_size + b], end = rows[f * batch_size + b + 1];
            const double count = f == 0 ? std::max(1, end - begin) : 1;
            const int64_t cat_at = b * 2 * (width - left) + (1 - f) * (width - left) + c - left;
            for (int32_t i = begin; i < end; ++i) {
              pooled[f] += data[ids[i] >> 32][position(ids[i]) + c] / count;
              want_grad[ids[i] >> 32][position(ids[i]) + c] +=
                  (add[b * width + c] + (c >= left ? cat[cat_at] : 0)) / count;
            }
            if (c < left) continue;
            ASSERT_NEAR(cat[cat_at], pooled[f], 1e-3) << width << " " << b;
          }
          ASSERT_NEAR(add[b * width + c], pooled[0] + pooled[1], 1e-3) << width << " " << b;
        }
      }
      for (int block = 0; block < 2; ++block) {
        for (int64_t i = 0; i < size; ++i) {
          ASSERT_NEAR(got_grad[block][i], want_grad[block][i], 1e-5 * (1 + want_grad[block][i]))
              << width << " " << i;
        }
      }
    }
  }
}

TEST_F(LayoutTest, ConfigurationFaultsAreNamed) {
  const auto error = [](const LayoutConfig& config) { return LayoutPlan().Build(config); };
  LayoutConfig config = config_;
  config.outs["vec"].shapes = {{-1, 5}};
  EXPECT_NE(error(config).find("'vec'"), std::string::npos);
  config = config_;
  config.outs["vec"].slices[0].end = 4;
  EXPECT_NE(error(config).find("[1, 4) of feature 'fa'"), std::string::npos);
  config = config_;
  config.outs["bias"].slices[0] = {"fs", 0, 1};
  EXPECT_NE(error(config).find("ADDN cannot hold FIRSTN feature 'fs'"), std::string::npos);
  config = config_;
  config.features["fs"].max_sequence_length = 0;
  EXPECT_NE(error(config).find("'fs' is 0"), std::string::npos);
  config = config_;
  config.outs["seq"].shapes.clear();
  EXPECT_NE(error(config).find("0 shapes, want 1"), std::string::npos);
}

TEST(ScatterAddRowsTest, SumsInInputOrderOverSeveralTensors) {
  std::mt19937_64 random(3);
  const std::vector<int64_t> num_rows = {400, 0, 700};
  const int64_t n = 20000, dim = 9;
  std::vector<int64_t> targets(n);
  std::vector<float> grads(n * dim);
  for (int64_t& target : targets) {
    const int64_t tensor = random() % 2 * 2;
    target = PackRow(tensor, static_cast<int64_t>(random() % num_rows[tensor]));
  }
  for (float& grad : grads) grad = static_cast<float>(random() % 1000) / 9;
  std::vector<std::vector<float>> want, got;
  for (const int64_t rows : num_rows) {
    want.emplace_back(rows * dim, 0.0f);
    got.emplace_back(rows * dim, 5.0f);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < dim; ++j) {
      want[TensorOf(targets[i])][RowOf(targets[i]) * dim + j] += grads[i * dim + j];
    }
  }
  ScatterAddRows(engine::TestThreads(4), targets.data(), n, grads.data(), dim,
                 {got[0].data(), got[1].data(), got[2].data()}, num_rows);
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
