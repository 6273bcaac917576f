// The fused layout of the GPU library against the CPU engine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "monolith/native_training/runtime/distribution/embedding_layout.h"
#include "monolith/native_training/runtime/gpu/layout_plan_view.h"
#include "tests/native_training/runtime/gpu/device_buffers.h"
#include "tests/native_training/runtime/gpu/sanitized.h"

namespace monolith {
namespace gpu {
namespace {

using distribution::LayoutBatch;
using distribution::LayoutConfig;
using distribution::LayoutPlan;
using distribution::LayoutRequest;
using distribution::OutType;
using distribution::Pooling;
using engine::InlineRunner;

constexpr uint32_t kShared = 0x80000000u;

// Widths that are multiples of 4, or not.
LayoutConfig MakeConfig(int64_t unit) {
  LayoutConfig config;
  config.features["fa"] = {"t", Pooling::kSum, 3 * unit, 0};
  config.features["fb"] = {"t", Pooling::kMean, 3 * unit, 0};
  config.features["fc"] = {"u", Pooling::kMean, 2 * unit, 0};
  config.features["fs"] = {"t", Pooling::kFirstN, 2 * unit, 2};
  config.features["unused"] = {"u", Pooling::kSum, 5, 0};
  config.outs["bias"] = {
      OutType::kAddN, {{"fa", 0, unit}, {"fb", 0, unit}, {"fc", unit, 2 * unit}}, {{-1, unit}}};
  config.outs["none"] = {
      OutType::kNone, {{"fb", unit, 3 * unit}, {"fa", 0, unit}}, {{-1, 2 * unit}, {-1, unit}}};
  config.outs["seq"] = {OutType::kNone, {{"fs", 0, 2 * unit}}, {{-1, 2, 2 * unit}}};
  config.outs["stk"] = {
      OutType::kStack, {{"fa", unit, 3 * unit}, {"fc", 0, 2 * unit}}, {{-1, 2, 2 * unit}}};
  config.outs["vec"] = {
      OutType::kConcat, {{"fa", unit, 3 * unit}, {"fb", unit, 3 * unit}}, {{-1, 4 * unit}}};
  return config;
}

// The same where every column is in one slice and all embeddings have one width.
LayoutConfig MakeConfigOfOneWidth(int64_t unit) {
  LayoutConfig config;
  config.features["fa"] = {"t", Pooling::kSum, 2 * unit, 0};
  config.features["fb"] = {"t", Pooling::kMean, 2 * unit, 0};
  config.features["fc"] = {"u", Pooling::kMean, 2 * unit, 0};
  config.features["fs"] = {"t", Pooling::kFirstN, 2 * unit, 2};
  config.outs["bias"] = {
      OutType::kAddN, {{"fa", 0, unit}, {"fb", 0, unit}, {"fc", unit, 2 * unit}}, {{-1, unit}}};
  config.outs["none"] = {OutType::kNone, {{"fc", 0, unit}}, {{-1, unit}}};
  config.outs["seq"] = {OutType::kNone, {{"fs", 0, 2 * unit}}, {{-1, 2, 2 * unit}}};
  config.outs["vec"] = {
      OutType::kConcat, {{"fa", unit, 2 * unit}, {"fb", unit, 2 * unit}}, {{-1, 2 * unit}}};
  return config;
}

// The same where every feature is one slice, and none is a mean.
LayoutConfig MakeConfigOfWholeFeatures(int64_t unit) {
  LayoutConfig config;
  for (const char* const feature : {"fa", "fb", "fc"}) {
    config.features[feature] = {"t", Pooling::kSum, 2 * unit, 0};
  }
  config.features["fs"] = {"u", Pooling::kFirstN, 2 * unit, 2};
  config.features["unused"] = {"u", Pooling::kSum, 2 * unit, 0};
  config.outs["bias"] = {
      OutType::kAddN, {{"fa", 0, 2 * unit}, {"fb", 0, 2 * unit}}, {{-1, 2 * unit}}};
  config.outs["none"] = {OutType::kNone, {{"fc", 0, 2 * unit}}, {{-1, 2 * unit}}};
  config.outs["seq"] = {OutType::kNone, {{"fs", 0, 2 * unit}}, {{-1, 2, 2 * unit}}};
  return config;
}

struct Request {
  std::vector<uint64_t> ids;
  std::vector<int32_t> rows;
  std::vector<uint32_t> starts;
  int64_t batch = 0;
  std::vector<int64_t> block_sizes;

  LayoutRequest View() const {
    LayoutRequest view;
    view.ids = ids.data();
    view.num_ids = static_cast<int64_t>(ids.size());
    view.rows = rows.data();
    view.num_rows = static_cast<int64_t>(rows.size());
    view.starts = starts.data();
    view.num_starts = static_cast<int64_t>(starts.size());
    view.batch_size = batch;
    for (const int64_t size : block_sizes) view.blocks.push_back({1, size});
    return view;
  }
};

// Each feature has rows of its own in its table's block; ids repeat. Of a large batch a few rows
// have more ids than a block reads at once.
Request MakeRequest(const LayoutPlan& plan, int64_t batch, std::mt19937* random) {
  constexpr int64_t kRows = 20;
  Request request;
  request.batch = batch;
  request.block_sizes.assign(plan.tables().size(), 0);
  for (const auto& feature : plan.features()) {
    const bool shared = (*random)() % 3 == 0;
    request.starts.push_back(static_cast<uint32_t>(request.rows.size()) | (shared ? kShared : 0));
    int64_t& size = request.block_sizes[feature.table];
    for (int64_t b = 0; b < (shared ? 1 : batch); ++b) {
      request.rows.push_back(static_cast<int32_t>(request.ids.size()));
      const int64_t count = (*random)() % (batch > 500 && b % 200 == 150 ? 2000 : 6);
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t position = size + (*random)() % kRows * feature.width;
        request.ids.push_back(static_cast<uint64_t>(feature.table) << 32 | position);
      }
    }
    size += kRows * feature.width;
  }
  request.starts.push_back(static_cast<uint32_t>(request.rows.size()));
  request.rows.push_back(static_cast<int32_t>(request.ids.size()));
  return request;
}

// A request whose vectors lie on the device.
class DeviceRequest {
 public:
  explicit DeviceRequest(const Request& from)
      : ids_(from.ids), rows_(from.rows), starts_(from.starts), batch_(from.batch) {}

  MonoGpuLayoutRequest View() const {
    return {ids_.data(),  rows_.data(),   starts_.data(), ids_.size(),
            rows_.size(), starts_.size(), batch_};
  }

 private:
  Buffer<uint64_t> ids_;
  Buffer<int32_t> rows_;
  Buffer<uint32_t> starts_;
  int64_t batch_;
};

// Returns whether bad offsets were found.
bool Forward(const LayoutPlan& plan, const std::vector<Request>& requests,
             const std::vector<std::vector<float>>& blocks,
             std::vector<std::vector<float>>* outputs) {
  const LayoutPlanView view(plan);
  const MonoGpuLayoutPlan c_plan = view.plan();
  std::vector<DeviceRequest> on_device;
  std::vector<MonoGpuLayoutRequest> c_requests;
  std::vector<int64_t> sizes;
  int64_t batch = 0;
  for (const Request& request : requests) {
    on_device.emplace_back(request);
    c_requests.push_back(on_device.back().View());
    sizes.insert(sizes.end(), request.block_sizes.begin(), request.block_sizes.end());
    batch += request.batch;
  }
  std::vector<Buffer<float>> block_buffers, output_buffers;
  std::vector<const float*> block_pointers;
  for (const auto& block : blocks) {
    block_buffers.emplace_back(block);
    block_pointers.push_back(block_buffers.back().data());
  }
  for (const auto& output : plan.outputs()) {
    output_buffers.emplace_back(std::vector<float>(batch * output.row_size, 7.0f));
  }
  const int64_t num_blocks = static_cast<int64_t>(plan.tables().size());
  const bool bad = RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_layout(nullptr, &c_plan, static_cast<int64_t>(requests.size()),
                              c_requests.data(), num_blocks, block_pointers.data(), sizes.data(),
                              Pointers(output_buffers).data(), workspace, bytes);
  });
  for (const auto& buffer : output_buffers) outputs->push_back(buffer.Read());
  return bad;
}

bool Backward(const LayoutPlan& plan, const Request& request,
              const std::vector<std::vector<float>>& output_grads, std::vector<float>* grad) {
  const LayoutPlanView view(plan);
  const MonoGpuLayoutPlan c_plan = view.plan();
  const DeviceRequest on_device(request);
  const MonoGpuLayoutRequest c_request = on_device.View();
  std::vector<Buffer<float>> grad_buffers;
  std::vector<const float*> grad_pointers;
  for (const auto& values : output_grads) {
    grad_buffers.emplace_back(values);
    grad_pointers.push_back(grad_buffers.back().data());
  }
  std::vector<int64_t> offsets;
  int64_t size = 0;
  for (const int64_t block_size : request.block_sizes) {
    offsets.push_back(size);
    size += block_size;
  }
  const Buffer<float> out(std::vector<float>(size, 7.0f));
  const bool bad = RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_layout_grad(
        nullptr, &c_plan, &c_request, static_cast<int64_t>(offsets.size()), offsets.data(),
        request.block_sizes.data(), grad_pointers.data(), out.data(), size, workspace, bytes);
  });
  *grad = out.Read();
  return bad;
}

// Parameters: the unit of widths, and how they are made of it.
class GpuLayoutTest
    : public ::testing::TestWithParam<std::tuple<int64_t, LayoutConfig (*)(int64_t)>> {
 protected:
  GpuLayoutTest() {
    const auto& [unit, make] = GetParam();
    EXPECT_EQ(plan_.Build(make(unit)), "");
  }

  std::vector<std::vector<float>> Outputs(int64_t batch) {
    std::vector<std::vector<float>> outputs;
    for (const auto& output : plan_.outputs()) {
      outputs.push_back(RandomFloats(batch * output.row_size, &random_));
    }
    return outputs;
  }

  // The gradient of all blocks, by the CPU.
  std::vector<float> EngineBackward(const Request& request,
                                    const std::vector<std::vector<float>>& output_grads) {
    std::vector<const float*> grads;
    for (const auto& values : output_grads) grads.push_back(values.data());
    int64_t size = 0;
    for (const int64_t block_size : request.block_sizes) size += block_size;
    std::vector<float> result(size, 0.0f);
    std::vector<float*> data;
    int64_t offset = 0;
    for (const int64_t block_size : request.block_sizes) {
      data.push_back(result.data() + offset);
      offset += block_size;
    }
    const LayoutRequest view = request.View();
    LayoutBatch layout;
    EXPECT_EQ(layout.Build(InlineRunner(), plan_, view), "");
    layout.Backward(InlineRunner(), grads, 0, data);
    return result;
  }

  LayoutPlan plan_;
  std::mt19937 random_{17};
};

TEST_P(GpuLayoutTest, ForwardEqualsTheEngine) {
  for (const std::vector<int64_t>& batches :
       {std::vector<int64_t>{1}, {33}, {0}, {700}, {5, 0, 40, 1}}) {
    std::vector<Request> requests;
    std::vector<std::vector<float>> blocks, got, want = Outputs(0);
    int64_t total = 0;
    for (const int64_t batch : batches) {
      requests.push_back(MakeRequest(plan_, batch, &random_));
      for (const int64_t size : requests.back().block_sizes) {
        blocks.push_back(RandomFloats(size, &random_));
      }
      total += batch;
    }
    want = Outputs(total);
    std::vector<float*> to;
    for (auto& output : want) to.push_back(output.data());
    int64_t first_row = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
      const LayoutRequest request = requests[r].View();
      LayoutBatch batch;
      ASSERT_EQ(batch.Build(InlineRunner(), plan_, request), "");
      const size_t num_blocks = plan_.tables().size();
      std::vector<const float*> data;
      for (size_t b = 0; b < num_blocks; ++b) data.push_back(blocks[r * num_blocks + b].data());
      batch.Forward(InlineRunner(), data, first_row, to);
      first_row += batches[r];
    }

    EXPECT_FALSE(Forward(plan_, requests, blocks, &got));

    EXPECT_EQ(got, want);
  }
}

TEST_P(GpuLayoutTest, BackwardEqualsTheEngine) {
  for (const int64_t batch : {0, 1, 33, 100}) {
    const Request request = MakeRequest(plan_, batch, &random_);
    const auto output_grads = Outputs(batch);
    const std::vector<float> want = EngineBackward(request, output_grads);
    std::vector<float> got, again;

    EXPECT_FALSE(Backward(plan_, request, output_grads, &got));
    EXPECT_FALSE(Backward(plan_, request, output_grads, &again));

    EXPECT_EQ(got, want) << "the order of every sum is the engine's";
    EXPECT_EQ(got, again);
  }
}

// Then ids that no slice takes are sorted together with those of the last place.
TEST_P(GpuLayoutTest, PlacesMayBeAPowerOfTwo) {
  const int64_t width = 2 * std::get<0>(GetParam());
  Request request = MakeRequest(plan_, 60, &random_);
  int64_t size = 0, rounded = width;
  for (const int64_t block_size : request.block_sizes) size += block_size;
  while (rounded < size) rounded *= 2;
  request.block_sizes.back() += rounded - size;
  const uint64_t last_block = request.block_sizes.size() - 1;
  for (uint64_t& id : request.ids) {
    if (id >> 32 == last_block && random_() % 3 == 0) {
      id = last_block << 32 | (request.block_sizes.back() - width);
    }
  }
  const auto output_grads = Outputs(60);
  std::vector<float> got;

  EXPECT_FALSE(Backward(plan_, request, output_grads, &got));

  EXPECT_EQ(got, EngineBackward(request, output_grads));
}

TEST_P(GpuLayoutTest, EmbeddingsThatOverlapAreAddedToo) {
  Request request = MakeRequest(plan_, 40, &random_);
  for (uint64_t& id : request.ids) id = (id >> 32) << 32 | random_() % 50;
  const auto output_grads = Outputs(40);
  std::vector<float> got;

  EXPECT_FALSE(Backward(plan_, request, output_grads, &got));

  ExpectNear(got, EngineBackward(request, output_grads), 1e-5f);
}

// All ids of a feature, or a tenth of them, are one. Whole numbers add up to the same in any order;
// means may differ by a share of what all terms are without signs, which is less than one of them.
TEST_P(GpuLayoutTest, HotEmbeddingsAreAddedUp) {
  constexpr int64_t kBatch = 2000;
  for (const int share : {1, 10}) {
    Request request = MakeRequest(plan_, kBatch, &random_);
    size_t feature = 0;
    for (size_t r = 0; r + 1 < request.rows.size(); ++r) {
      while ((request.starts[feature + 1] & ~kShared) <= r) ++feature;
      const int32_t first = request.rows[request.starts[feature] & ~kShared];
      for (int32_t i = request.rows[r]; i < request.rows[r + 1]; ++i) {
        if (random_() % share == 0) request.ids[i] = request.ids[first];
      }
    }
    auto output_grads = Outputs(kBatch), without_signs = output_grads;
    for (size_t o = 0; o < output_grads.size(); ++o) {
      for (size_t i = 0; i < output_grads[o].size(); ++i) {
        output_grads[o][i] = std::round(10 * output_grads[o][i]);
        without_signs[o][i] = std::abs(output_grads[o][i]);
      }
    }
    const std::vector<float> want = EngineBackward(request, output_grads);
    const std::vector<float> terms = EngineBackward(request, without_signs);
    std::vector<float> got, again;

    EXPECT_FALSE(Backward(plan_, request, output_grads, &got));
    EXPECT_FALSE(Backward(plan_, request, output_grads, &again));

    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 2e-5f * terms[i]) << "element " << i;
    }
    EXPECT_EQ(got, again);
  }
}

TEST_P(GpuLayoutTest, FindsWhatTheEngineFinds) {
  int accepted = 0;
  const int trials = Sized(100, 10);
  for (int trial = 0; trial < trials; ++trial) {
    Request request = MakeRequest(plan_, 1 + random_() % 5, &random_);
    for (int change = random_() % 3; change > 0; --change) {
      const uint32_t value = random_() % 4 == 0 ? random_() : random_() % 40;
      switch (random_() % 4) {
        case 0:
          if (!request.ids.empty()) {
            request.ids[random_() % request.ids.size()] =
                random_() % 2 ? value : uint64_t{value} << 32;
          }
          break;
        case 1:
          request.rows[random_() % request.rows.size()] = static_cast<int32_t>(value);
          break;
        case 2:
          request.starts[random_() % request.starts.size()] = value;
          break;
        default:
          request.batch = value % 8;
      }
    }
    std::vector<std::vector<float>> blocks, outputs;
    for (const int64_t size : request.block_sizes) blocks.push_back(RandomFloats(size, &random_));
    const LayoutRequest view = request.View();
    LayoutBatch layout;
    const std::string error = layout.Build(InlineRunner(), plan_, view);
    accepted += error.empty();
    std::vector<float> grad;

    EXPECT_EQ(Forward(plan_, {request}, blocks, &outputs), !error.empty()) << error;
    EXPECT_EQ(Backward(plan_, request, Outputs(request.batch), &grad), !error.empty()) << error;
  }
  EXPECT_GT(accepted, trials / 10);
}

// Each of the rows that go forth would have all ids: many times more than there are.
TEST_P(GpuLayoutTest, RowsThatGoBackAndForthAreFound) {
  const int64_t batch = Sized(1000, 300);
  Request request = MakeRequest(plan_, batch, &random_);
  for (size_t r = 0; r + 1 < request.rows.size(); ++r) {
    request.rows[r] = r % 2 == 0 ? 0 : static_cast<int32_t>(request.ids.size());
  }
  std::vector<std::vector<float>> blocks, outputs;
  for (const int64_t size : request.block_sizes) blocks.push_back(RandomFloats(size, &random_));
  std::vector<float> grad;

  EXPECT_TRUE(Forward(plan_, {request}, blocks, &outputs));
  EXPECT_TRUE(Backward(plan_, request, Outputs(batch), &grad));
}

INSTANTIATE_TEST_SUITE_P(Widths, GpuLayoutTest,
                         ::testing::Combine(::testing::Values(1, 4, 5, 16),
                                            ::testing::Values(&MakeConfig, &MakeConfigOfOneWidth,
                                                              &MakeConfigOfWholeFeatures)));

}  // namespace
}  // namespace gpu
}  // namespace monolith
