// Buffers for tests of the GPU library's C interface. Linked with the loops that stand for the
// kernels they are ordinary memory, linked with libmonolith_cuda.so they lie on the GPU.
#ifndef MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_BUFFERS_H_
#define MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_BUFFERS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "monolith/native_training/runtime/gpu/c_api.h"

namespace monolith {
namespace gpu {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : size_(size) {
    void* memory = nullptr;
    EXPECT_EQ(mono_gpu_allocate(size * static_cast<int64_t>(sizeof(T)), &memory), MONO_GPU_OK)
        << mono_gpu_last_error();
    memory_.reset(static_cast<T*>(memory));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<int64_t>(values.size())) {
    EXPECT_EQ(mono_gpu_write_now(values.data(), data(), size_ * static_cast<int64_t>(sizeof(T))),
              MONO_GPU_OK)
        << mono_gpu_last_error();
  }

  T* data() const { return memory_.get(); }
  int64_t size() const { return size_; }

  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(mono_gpu_synchronize(nullptr), MONO_GPU_OK) << mono_gpu_last_error();
    EXPECT_EQ(mono_gpu_read_now(data(), values.data(), size_ * static_cast<int64_t>(sizeof(T))),
              MONO_GPU_OK)
        << mono_gpu_last_error();
    return values;
  }

 private:
  struct Free {
    void operator()(T* memory) const { mono_gpu_free(memory); }
  };

  int64_t size_;
  std::unique_ptr<T, Free> memory_;
};

// Runs call(workspace, &bytes) the two times it takes; returns whether it found bad offsets.
template <typename Call>
bool RunAndCheck(const Call& call) {
  int64_t bytes = 0;
  EXPECT_EQ(call(nullptr, &bytes), MONO_GPU_OK) << mono_gpu_last_error();
  Buffer<char> workspace(bytes);
  EXPECT_EQ(call(workspace.data(), &bytes), MONO_GPU_OK) << mono_gpu_last_error();
  const std::vector<char> content = workspace.Read();
  return content[0] != 0;
}

inline std::vector<float> RandomFloats(int64_t n, std::mt19937* random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(*random);
  return values;
}

inline void ExpectNear(const std::vector<float>& got, const std::vector<float>& want,
                       float tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const float bound = tolerance * (1.0f + (want[i] < 0 ? -want[i] : want[i]));
    ASSERT_NEAR(got[i], want[i], bound) << "element " << i;
  }
}

// Pointers to the buffers of a list.
template <typename T>
std::vector<T*> Pointers(const std::vector<Buffer<T>>& buffers) {
  std::vector<T*> pointers;
  for (const Buffer<T>& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_DEVICE_BUFFERS_H_
