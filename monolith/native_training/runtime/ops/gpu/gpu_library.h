// libmonolith_cuda.so, which is looked for when the first op runs on a GPU.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_LIBRARY_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_LIBRARY_H_

#include "monolith/native_training/runtime/gpu/c_api.h"
#include "tensorflow/core/platform/status.h"

// Everything that kernels call.
#define MONOLITH_GPU_FUNCTIONS(FUNCTION) \
  FUNCTION(version)                      \
  FUNCTION(last_error)                   \
  FUNCTION(device_count)                 \
  FUNCTION(copy)                         \
  FUNCTION(read)                         \
  FUNCTION(read_now)                     \
  FUNCTION(synchronize)                  \
  FUNCTION(op_scale)                     \
  FUNCTION(op_scale_by)                  \
  FUNCTION(op_sum_of_squares)            \
  FUNCTION(op_clip)                      \
  FUNCTION(op_rmsprop)                   \
  FUNCTION(op_adamom)                    \
  FUNCTION(op_adamom_move)               \
  FUNCTION(op_ffm)                       \
  FUNCTION(op_ffm_grad)                  \
  FUNCTION(op_gather)                    \
  FUNCTION(op_gather_grad)               \
  FUNCTION(op_segment_sum)               \
  FUNCTION(op_reduce_split)              \
  FUNCTION(op_reduce_split_grad)         \
  FUNCTION(op_layout)                    \
  FUNCTION(op_layout_grad)               \
  FUNCTION(table_create)                 \
  FUNCTION(table_destroy)                \
  FUNCTION(table_lookup_many)            \
  FUNCTION(table_assign)                 \
  FUNCTION(table_assign_add)             \
  FUNCTION(table_optimize_many)          \
  FUNCTION(table_reinitialize)           \
  FUNCTION(table_erase)                  \
  FUNCTION(table_evict)                  \
  FUNCTION(table_reserve)                \
  FUNCTION(table_clear)                  \
  FUNCTION(table_stats)                  \
  FUNCTION(table_check)                  \
  FUNCTION(table_save_shard)             \
  FUNCTION(table_save_ids)               \
  FUNCTION(table_load_records)

namespace tensorflow {
namespace monolith_tf {

struct GpuLibrary {
#define MONOLITH_GPU_MEMBER(name) decltype(&mono_gpu_##name) name = nullptr;
  MONOLITH_GPU_FUNCTIONS(MONOLITH_GPU_MEMBER)
#undef MONOLITH_GPU_MEMBER
};

// Loads it once. FailedPrecondition: it is missing or belongs to another version.
Status GetGpuLibrary(const GpuLibrary** library);

// The library's error code as a status, with its text.
Status GpuStatus(const GpuLibrary& library, int code);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_GPU_GPU_LIBRARY_H_
