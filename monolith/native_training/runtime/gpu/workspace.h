// The device buffer of one call:
//
//   | bad word, 16 bytes | what the host wrote, uploaded in one copy | scratch |
//
// First everything is named (Put, Scratch), then Measure tells whether the caller wants the size or
// the work, then Upload sends what was put, and At gives the device pointers.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_WORKSPACE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_WORKSPACE_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

class Workspace {
 public:
  template <typename T>
  struct Slot {
    int64_t offset;
    bool scratch;
  };

  // Starts with the bad word, which is 0.
  Workspace() : host_(kAlignment, 0) {}

  template <typename T>
  Slot<T> Put(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const int64_t offset = static_cast<int64_t>(host_.size());
    host_.resize(offset + Aligned(static_cast<int64_t>(values.size() * sizeof(T))), 0);
    if (!values.empty()) {
      std::memcpy(host_.data() + offset, values.data(), values.size() * sizeof(T));
    }
    return {offset, false};
  }

  // Room for `count` elements of whatever value.
  template <typename T>
  Slot<T> Scratch(int64_t count) {
    const int64_t offset = scratch_;
    scratch_ += Aligned(count * static_cast<int64_t>(sizeof(T)));
    return {offset, true};
  }

  // True: there is no workspace, and *bytes was set.
  bool Measure(void* workspace, int64_t* bytes) {
    base_ = static_cast<char*>(workspace);
    if (workspace != nullptr) return false;
    *bytes = static_cast<int64_t>(host_.size()) + scratch_;
    return true;
  }

  int Upload(Stream stream) const {
    return CopyToDevice(stream, host_.data(), base_, static_cast<int64_t>(host_.size()));
  }

  template <typename T>
  T* At(Slot<T> slot) const {
    const int64_t start = slot.scratch ? static_cast<int64_t>(host_.size()) : 0;
    return reinterpret_cast<T*>(base_ + start + slot.offset);
  }

  int32_t* bad() const { return reinterpret_cast<int32_t*>(base_); }

 private:
  static constexpr int64_t kAlignment = 16;

  static int64_t Aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::vector<char> host_;
  int64_t scratch_ = 0;
  char* base_ = nullptr;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_WORKSPACE_H_
