// Optimizers, clipping, flat concatenation and FFM of the GPU library against the CPU engine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "monolith/native_training/runtime/dense/dense_kernels.h"
#include "tests/native_training/runtime/gpu/device_buffers.h"

namespace monolith {
namespace gpu {
namespace {

const std::vector<int64_t> kSizes = {0, 1, 3, 4, 5, 255, 256, 1023, 4096, 4097, 20000};

std::vector<Buffer<float>> Scalars(const std::vector<float>& values) {
  std::vector<Buffer<float>> scalars;
  for (const float value : values) scalars.emplace_back(std::vector<float>{value});
  return scalars;
}

std::vector<const float*> ConstPointers(const std::vector<Buffer<float>>& buffers) {
  std::vector<const float*> pointers;
  for (const Buffer<float>& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

TEST(GpuDenseOpsTest, RmspropEqualsTheEngine) {
  std::mt19937 random(1);
  const auto scalars = Scalars({0.1f, 0.9f, 0.99f, 1e-6f, 0.01f});
  for (const int64_t n : kSizes) {
    for (const bool use_v2 : {false, true}) {
      std::vector<float> w = RandomFloats(n, &random), m = RandomFloats(n, &random);
      std::vector<float> v = RandomFloats(n, &random), grad = RandomFloats(n, &random);
      for (float& value : v) value = std::fabs(value);
      Buffer<float> gw(w), gm(m), gv(v), ggrad(grad);

      const dense::RmspropOptions options{0.1f, 0.9f, 0.99f, 1e-6f, 0.01f, use_v2};
      dense::RmspropStep(options, grad.data(), n, w.data(), m.data(), v.data());
      ASSERT_EQ(mono_gpu_op_rmsprop(nullptr, n, ConstPointers(scalars).data(), ggrad.data(),
                                    gw.data(), gm.data(), gv.data(), use_v2),
                MONO_GPU_OK)
          << mono_gpu_last_error();

      ExpectNear(gw.Read(), w, 1e-6f);
      ExpectNear(gm.Read(), m, 1e-6f);
      ExpectNear(gv.Read(), v, 1e-6f);
    }
  }
}

TEST(GpuDenseOpsTest, AdamomEqualsTheEngine) {
  std::mt19937 random(2);
  const auto scalars = Scalars({0.1f, 0.99f, 0.9f, 1e-6f, 0.01f});
  for (const int64_t n : kSizes) {
    for (const bool use_v2 : {false, true}) {
      std::vector<float> w = RandomFloats(n, &random), m = RandomFloats(n, &random);
      std::vector<float> v(n, 0.5f), c(n, 1.0f), grad = RandomFloats(n, &random);
      Buffer<float> gw(w), gm(m), gv(v), gc(c), ggrad(grad);

      const dense::AdamomOptions options{0.1f, 0.99f, 0.9f, 1e-6f, 0.01f, use_v2};
      dense::AdamomStep(options, grad.data(), n, w.data(), m.data(), v.data(), c.data());
      ASSERT_EQ(mono_gpu_op_adamom(nullptr, n, ConstPointers(scalars).data(), ggrad.data(),
                                   gw.data(), gm.data(), gv.data(), gc.data(), use_v2),
                MONO_GPU_OK);
      ExpectNear(gw.Read(), w, 1e-6f);
      ExpectNear(gm.Read(), m, 1e-6f);
      ExpectNear(gv.Read(), v, 1e-6f);
      ExpectNear(gc.Read(), c, 1e-6f);

      dense::AdamomMove(options, m.data(), v.data(), c.data(), n, w.data());
      EXPECT_FALSE(RunAndCheck([&](void* workspace, int64_t* bytes) {
        return mono_gpu_op_adamom_move(nullptr, n, ConstPointers(scalars).data(), gm.data(),
                                       gv.data(), gc.data(), gw.data(), use_v2, workspace, bytes);
      }));
      ExpectNear(gw.Read(), w, 1e-6f);
    }
  }
}

TEST(GpuDenseOpsTest, AdamomMovesWhatIsNotAtItsLimit) {
  std::mt19937 random(4);
  const auto scalars = Scalars({0.1f, 0.5f, 0.9f, 1e-6f, 0.0f});
  const dense::AdamomOptions options{0.1f, 0.5f, 0.9f, 1e-6f, 0.0f, false};
  for (const int64_t n : kSizes) {
    std::vector<float> w = RandomFloats(n, &random), m = RandomFloats(n, &random);
    std::vector<float> v(n, 0.5f), c(n, 2.0f), grad = RandomFloats(n, &random);  // 1 / (1 - 0.5)
    for (int64_t i = 0; i < n; i += 1 + static_cast<int64_t>(random() % 16)) c[i] = 1.0f;
    Buffer<float> gw(w), gm(m), gv(v), gc(c), ggrad(grad);

    for (int step = 0; step < 3; ++step) {
      dense::AdamomStep(options, grad.data(), n, w.data(), m.data(), v.data(), c.data());
      ASSERT_EQ(mono_gpu_op_adamom(nullptr, n, ConstPointers(scalars).data(), ggrad.data(),
                                   gw.data(), gm.data(), gv.data(), gc.data(), 0),
                MONO_GPU_OK);
      EXPECT_EQ(gc.Read(), c);
    }
    ExpectNear(gw.Read(), w, 1e-6f);
  }
}

TEST(GpuDenseOpsTest, AdamomMoveRefusesEmptySlots) {
  const auto scalars = Scalars({0.1f, 0.99f, 0.9f, 1e-6f, 0.01f});
  Buffer<float> w(std::vector<float>{1, 2, 3}), m(std::vector<float>{1, 1, 1});
  Buffer<float> v(std::vector<float>{1, 1, 1}), c(std::vector<float>{1, 0, 1});

  EXPECT_TRUE(RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_adamom_move(nullptr, 3, ConstPointers(scalars).data(), m.data(), v.data(),
                                   c.data(), w.data(), 0, workspace, bytes);
  }));

  EXPECT_EQ(w.Read(), (std::vector<float>{1, 2, 3}));
}

struct Lists {
  std::vector<std::vector<float>> values;
  std::vector<Buffer<float>> buffers;
  std::vector<Buffer<float>> outputs;
  std::vector<int64_t> sizes;
  std::vector<int64_t> padded;
};

Lists MakeLists(std::mt19937* random) {
  Lists lists;
  for (const int64_t n : kSizes) {
    lists.values.push_back(RandomFloats(n, random));
    lists.buffers.emplace_back(lists.values.back());
    lists.sizes.push_back(n);
    lists.padded.push_back((n + 15) / 16 * 16);
    lists.outputs.emplace_back(std::vector<float>(lists.padded.back(), 7.0f));
  }
  return lists;
}

TEST(GpuDenseOpsTest, ScalesAndPads) {
  std::mt19937 random(3);
  const Lists lists = MakeLists(&random);
  const Buffer<float> factor(std::vector<float>{0.25f});
  const int64_t n = static_cast<int64_t>(kSizes.size());

  RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_scale(nullptr, n, ConstPointers(lists.buffers).data(), lists.sizes.data(),
                             Pointers(lists.outputs).data(), lists.padded.data(), factor.data(),
                             workspace, bytes);
  });

  for (int64_t i = 0; i < n; ++i) {
    std::vector<float> want = lists.values[i];
    for (float& value : want) value *= 0.25f;
    want.resize(lists.padded[i], 0.0f);
    EXPECT_EQ(lists.outputs[i].Read(), want);
  }
}

TEST(GpuDenseOpsTest, ClipsByItsOwnNorm) {
  std::mt19937 random(4);
  for (const float clip_norm : {0.0f, 1.0f, 1e6f}) {
    const Lists lists = MakeLists(&random);
    const int64_t n = static_cast<int64_t>(kSizes.size());
    double sum = 0;
    for (const auto& values : lists.values) {
      sum += dense::SumOfSquares(values.data(), static_cast<int64_t>(values.size()));
    }
    Buffer<float> norm(1), squares(1);

    const auto clip = [&](void* workspace, int64_t* bytes) {
      return mono_gpu_op_clip(nullptr, n, ConstPointers(lists.buffers).data(), lists.sizes.data(),
                              Pointers(lists.outputs).data(), clip_norm, norm.data(), workspace,
                              bytes);
    };
    RunAndCheck(clip);
    RunAndCheck([&](void* workspace, int64_t* bytes) {
      return mono_gpu_op_sum_of_squares(nullptr, n, ConstPointers(lists.buffers).data(),
                                        lists.sizes.data(), squares.data(), workspace, bytes);
    });

    const float want_norm = static_cast<float>(std::sqrt(sum));
    ExpectNear(norm.Read(), {want_norm}, 1e-6f);
    ExpectNear(squares.Read(), {static_cast<float>(sum)}, 1e-6f);
    const float factor = want_norm > clip_norm ? clip_norm / want_norm : 1.0f;
    for (int64_t i = 0; i < n; ++i) {
      std::vector<float> got = lists.outputs[i].Read(), want = lists.values[i];
      got.resize(want.size());
      for (float& value : want) value *= factor;
      ExpectNear(got, want, 1e-6f);
    }
    const std::vector<float> first = norm.Read();
    RunAndCheck(clip);
    EXPECT_EQ(norm.Read(), first) << "the order of the sum is fixed";
  }
}

TEST(GpuDenseOpsTest, ANormThatIsNotFiniteMakesNan) {
  const Buffer<float> in(std::vector<float>{1, std::numeric_limits<float>::infinity()});
  const Buffer<float> out(2), norm(1);
  const std::vector<const float*> inputs = {in.data()};
  const std::vector<float*> outputs = {out.data()};
  const std::vector<int64_t> sizes = {2};

  RunAndCheck([&](void* workspace, int64_t* bytes) {
    return mono_gpu_op_clip(nullptr, 1, inputs.data(), sizes.data(), outputs.data(), 1.0f,
                            norm.data(), workspace, bytes);
  });

  EXPECT_TRUE(std::isinf(norm.Read()[0]));
  EXPECT_TRUE(std::isnan(out.Read()[0]) && std::isnan(out.Read()[1]));
}

TEST(GpuDenseOpsTest, FfmAndItsGradient) {
  std::mt19937 random(5);
  for (const int64_t dim : {1, 5, 13, 16, 64}) {
    for (const bool dot : {false, true}) {
      const int64_t batch = 7, left = 3, right = 4, width = left * right * (dot ? 1 : dim);
      const std::vector<float> x = RandomFloats(batch * left * dim, &random);
      const std::vector<float> y = RandomFloats(batch * right * dim, &random);
      const std::vector<float> g = RandomFloats(batch * width, &random);
      std::vector<float> z(batch * width, 0.0f), dx(x.size(), 0.0f), dy(y.size(), 0.0f);
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t l = 0; l < left; ++l) {
          for (int64_t r = 0; r < right; ++r) {
            for (int64_t k = 0; k < dim; ++k) {
              const int64_t pair = (b * left + l) * right + r;
              const int64_t i = (b * left + l) * dim + k, j = (b * right + r) * dim + k;
              const int64_t o = dot ? pair : pair * dim + k;
              z[o] += x[i] * y[j];
              dx[i] += g[o] * y[j];
              dy[j] += g[o] * x[i];
            }
          }
        }
      }
      const Buffer<float> gx(x), gy(y), gg(g), gz(batch * width);
      const Buffer<float> gdx(static_cast<int64_t>(x.size())), gdy(static_cast<int64_t>(y.size()));

      ASSERT_EQ(
          mono_gpu_op_ffm(nullptr, batch, left, right, dim, dot, gx.data(), gy.data(), gz.data()),
          MONO_GPU_OK);
      ASSERT_EQ(mono_gpu_op_ffm_grad(nullptr, batch, left, right, dim, dot, gg.data(), gx.data(),
                                     gy.data(), gdx.data(), gdy.data()),
                MONO_GPU_OK);

      ExpectNear(gz.Read(), z, 1e-5f);
      ExpectNear(gdx.Read(), dx, 1e-5f);
      ExpectNear(gdy.Read(), dy, 1e-5f);
    }
  }
}

}  // namespace
}  // namespace gpu
}  // namespace monolith
