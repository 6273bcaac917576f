#include "monolith/native_training/runtime/ops/support/tensor_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "monolith/native_training/runtime/ops/support/shared_tensors.h"
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

// Returns how much the system is asked for when the allocator needs another region.
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

// Sets *tensor if it is so large that the allocator must not be asked for it.
Status AllocateOutside(OpKernelContext* ctx, AllocatorAttributes attributes, DataType dtype,
                       const TensorShape& shape, std::optional<Tensor>* tensor) {
  const int64_t size = DataTypeSize(dtype);
  if (size == 0 || shape.num_elements() <= kLargeBytes / size) return OkStatus();
  if (shape.num_elements() > MemoryOfMachine() / size) {
    return errors::ResourceExhausted("a tensor of shape ", shape.DebugString(),
                                     " does not fit into the ", MemoryOfMachine(),
                                     " bytes of memory that this machine has");
  }
  if (ctx->op_device_context() != nullptr) return OkStatus();  // memory of another device
  const int64_t bytes = shape.num_elements() * size;
  if (HasHad(ctx->get_allocator(attributes), bytes) || SystemHas(RegionFor(bytes))) {
    return OkStatus();
  }
  tensor->emplace(TheSystemAllocator(), dtype, shape);
  if ((*tensor)->IsInitialized()) return OkStatus();
  return errors::ResourceExhausted("a tensor of shape ", shape.DebugString(), " has ", bytes,
                                   " bytes, which this process cannot get");
}

}  // namespace

Status AllocateOutput(OpKernelContext* ctx, int64_t index, const TensorShape& shape,
                      Tensor** output) {
  const int number = static_cast<int>(index);
  if (ctx->op_device_context() == nullptr && WantsSharedOutputs(ctx)) {
    Tensor shared;
    if (AllocateShared(ctx->expected_output_dtype(number), shape, &shared)) {
      ctx->set_output(number, shared);
      *output = ctx->mutable_output(number);
      return OkStatus();
    }
  }
  std::optional<Tensor> outside;
  TF_RETURN_IF_ERROR(AllocateOutside(ctx, ctx->output_alloc_attr(number),
                                     ctx->expected_output_dtype(number), shape, &outside));
  if (!outside.has_value()) return ctx->allocate_output(number, shape, output);
  ctx->set_output(number, *outside);
  *output = ctx->mutable_output(number);
  return OkStatus();
}

Status AllocateTemp(OpKernelContext* ctx, DataType dtype, const TensorShape& shape, Tensor* temp) {
  std::optional<Tensor> outside;
  TF_RETURN_IF_ERROR(AllocateOutside(ctx, AllocatorAttributes(), dtype, shape, &outside));
  if (!outside.has_value()) return ctx->allocate_temp(dtype, shape, temp);
  *temp = *std::move(outside);
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
