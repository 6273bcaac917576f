#include "monolith/native_training/runtime/ops/support/output_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int64_t kLargeBytes = int64_t{1} << 26;  // so much takes longer to write than to ask for

// Limits and strict overcommit let the system refuse less than the machine has.
bool SystemHas(int64_t bytes) {
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  munmap(memory, static_cast<size_t>(bytes));
  return true;
}

// An allocator keeps what is freed, so it may have again what it has had.
bool HasHad(Allocator* allocator, int64_t bytes) {
  const auto stats = allocator->GetStats();
  return stats.has_value() && stats->largest_alloc_size >= bytes;
}

}  // namespace

Status CheckOutputMemory(OpKernelContext* ctx, int output, const TensorShape& shape) {
  const int64_t size = DataTypeSize(ctx->expected_output_dtype(output));
  if (size == 0 || shape.num_elements() <= kLargeBytes / size) return OkStatus();
  static const int64_t memory =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  if (memory > 0 && shape.num_elements() > memory / size) {
    return errors::ResourceExhausted("an output of shape ", shape.DebugString(),
                                     " does not fit into the ", memory,
                                     " bytes of memory that this machine has");
  }
  if (ctx->op_device_context() != nullptr) return OkStatus();  // memory of another device
  const int64_t bytes = shape.num_elements() * size;
  if (SystemHas(bytes) || HasHad(ctx->get_allocator(ctx->output_alloc_attr(output)), bytes)) {
    return OkStatus();
  }
  return errors::ResourceExhausted("an output of shape ", shape.DebugString(), " has ", bytes,
                                   " bytes, which this process cannot get");
}

}  // namespace monolith_tf
}  // namespace tensorflow
