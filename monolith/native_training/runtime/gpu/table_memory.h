// Memory of GPU tables: buffers in stream order, rows that never move, and the budget of them all.
// Without nvcc all of it is ordinary memory.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_MEMORY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

// Bytes that the tables of this process have, and may have: MONOLITH_GPU_TABLE_BYTES, else 70 % of
// the card. A test may set it.
int64_t TableBytes();
int TableBudget(int64_t* bytes);
void SetTableBudget(int64_t bytes);

// Device memory, allocated and freed in the order of streams and counted. Calls of one buffer must
// be ordered by the caller.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Waits for the device if there is memory to free; Free is the way for the others.
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DeviceBuffer(DeviceBuffer&& other) noexcept { Swap(&other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    Swap(&other);
    return *this;
  }

  // MONO_GPU_OUT_OF_MEMORY: over the budget, or the card is full. The buffer must be empty.
  int Allocate(Stream stream, int64_t bytes, const char* what);
  void Free(Stream stream);
  void Swap(DeviceBuffer* other) noexcept {
    std::swap(memory_, other->memory_);
    std::swap(bytes_, other->bytes_);
  }

  template <typename T>
  T* As() const {
    return static_cast<T*>(memory_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// Page-locked host memory, cleared.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  int Allocate(int64_t bytes);
  template <typename T>
  T* As() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
};

// One range of addresses, as large as the card, under which memory is put as it is needed: what is
// there never moves. Where the driver has no such addresses, the range is allocated in one piece.
class DeviceArena {
 public:
  DeviceArena() = default;
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // Reserves addresses for `max_bytes`.
  int Reserve(int64_t max_bytes);
  // Puts memory under the first `bytes` bytes at least. It is not cleared.
  int Grow(int64_t bytes);
  // Gives all memory back; no kernel may be using it.
  void Release();

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  int64_t max_bytes() const { return max_bytes_; }

 private:
  int Map(int64_t bytes);

  char* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t max_bytes_ = 0;
  int64_t grain_ = 0;
  struct Piece {
    int64_t offset;
    int64_t bytes;
    unsigned long long handle;
  };
  std::vector<Piece> pieces_;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_MEMORY_H_
