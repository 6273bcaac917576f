#include "monolith/native_training/runtime/ops/support/output_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mem.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int64_t kLargeBytes = int64_t{1} << 26;  // so much takes longer to write than to ask for

class SystemAllocator : public Allocator {
 public:
  std::string Name() override { return "system"; }
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    return port::AlignedMalloc(bytes, static_cast<int>(alignment));
  }
  void DeallocateRaw(void* memory) override { port::AlignedFree(memory); }
};

Allocator* TheSystemAllocator() {
  // Tensors may outlive static objects.
  static Allocator* const allocator = std::make_unique<SystemAllocator>().release();
  return allocator;
}

// Limits and strict overcommit let the system refuse less than the machine has.
bool SystemHas(int64_t bytes) {
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  munmap(memory, static_cast<size_t>(bytes));
  return true;
}

// What the system is asked for when the allocator needs another region.
int64_t RegionFor(int64_t bytes) {
  constexpr int64_t kAround = 1 << 16;  // for malloc, and for alignment
  int64_t region = kLargeBytes;
  while (region < bytes) region *= 2;
  return region + kAround;
}

// An allocator keeps what is freed, so it may have again what it has had.
bool HasHad(Allocator* allocator, int64_t bytes) {
  const auto stats = allocator->GetStats();
  return stats.has_value() && stats->largest_alloc_size >= bytes;
}

int64_t MemoryOfMachine() {
  static const int64_t bytes =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return bytes > 0 ? bytes : INT64_MAX / 4;  // of which a region, too, is an int64
}

}  // namespace

Status AllocateOutput(OpKernelContext* ctx, int64_t index, const TensorShape& shape,
                      Tensor** output) {
  const int number = static_cast<int>(index);
  const DataType dtype = ctx->expected_output_dtype(number);
  const int64_t size = DataTypeSize(dtype);
  if (size == 0 || shape.num_elements() <= kLargeBytes / size) {
    return ctx->allocate_output(number, shape, output);
  }
  if (shape.num_elements() > MemoryOfMachine() / size) {
    return errors::ResourceExhausted("an output of shape ", shape.DebugString(),
                                     " does not fit into the ", MemoryOfMachine(),
                                     " bytes of memory that this machine has");
  }
  const int64_t bytes = shape.num_elements() * size;
  if (ctx->op_device_context() != nullptr ||  // then it is memory of another device
      HasHad(ctx->get_allocator(ctx->output_alloc_attr(number)), bytes) ||
      SystemHas(RegionFor(bytes))) {
    return ctx->allocate_output(number, shape, output);
  }
  const Tensor tensor(TheSystemAllocator(), dtype, shape);
  if (!tensor.IsInitialized()) {
    return errors::ResourceExhausted("an output of shape ", shape.DebugString(), " has ", bytes,
                                     " bytes, which this process cannot get");
  }
  ctx->set_output(number, tensor);
  *output = ctx->mutable_output(number);
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
