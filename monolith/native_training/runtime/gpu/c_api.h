// libmonolith_cuda.so: the GPU side of Monolith's ops, free of TensorFlow.
//
// Calls enqueue work on `stream`, a cudaStream_t of the current device, and return at once. Unless
// a comment says "host", pointers to data are device pointers; arrays of pointers, counts and sizes
// are host arrays of which the call keeps nothing. Every function returns MONO_GPU_OK or an error
// code, and mono_gpu_last_error then tells the calling thread what went wrong.
//
// Functions with a workspace are called twice: with a null workspace they only set
// *workspace_bytes, then they run in a device buffer of that many bytes, aligned to 256, which must
// live until the stream has passed. Where a comment says "checked", offsets that lie on the device
// are compared with their bounds there: the first int32 of the workspace is 0 afterwards, or 1 if
// one was wrong, and then the outputs hold no meaningful values; nothing outside the buffers is
// touched either way.
//
// Sums have one order, which depends on the arguments alone: the same call gives the same bits.
//
// The same sources compile as plain C++ with loops instead of launches; there device pointers are
// ordinary ones and the stream is ignored.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_C_API_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_C_API_H_

#include <stdint.h>

#define MONO_GPU_VERSION 3
#define MONO_GPU_OK 0
#define MONO_GPU_INVALID_ARGUMENT 1
#define MONO_GPU_CUDA_ERROR 2
#define MONO_GPU_OUT_OF_MEMORY 3
#define MONO_GPU_UNIMPLEMENTED 4
#define MONO_GPU_FAILED_PRECONDITION 5
#define MONO_GPU_REFUSED 6  // what an earlier call had was not finite and not written

#if defined(__GNUC__)
#define MONO_GPU_API __attribute__((visibility("default")))
#else
#define MONO_GPU_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

MONO_GPU_API int mono_gpu_version(void);

// Returns the text of the calling thread's last error; valid until its next call.
MONO_GPU_API const char* mono_gpu_last_error(void);

// Sets *count to the number of CUDA devices.
MONO_GPU_API int mono_gpu_device_count(int32_t* count);

// Copies between device buffers.
MONO_GPU_API int mono_gpu_copy(void* stream, const void* from, void* to, int64_t bytes);

// Copies to the host, in the order of the stream; `to` is host memory, best page-locked.
MONO_GPU_API int mono_gpu_read(void* stream, const void* from, void* to, int64_t bytes);

// Copies to the host now; nothing on the device may be writing `from`.
MONO_GPU_API int mono_gpu_read_now(const void* from, void* to, int64_t bytes);

// For tests and benchmarks that have no other library at hand.
MONO_GPU_API int mono_gpu_allocate(int64_t bytes, void** memory);
MONO_GPU_API int mono_gpu_free(void* memory);
MONO_GPU_API int mono_gpu_write_now(const void* from, void* to, int64_t bytes);
MONO_GPU_API int mono_gpu_synchronize(void* stream);

// outputs[i][k] = inputs[i][k] * *factor for k < sizes[i], and 0 for sizes[i] <= k < padded[i].
MONO_GPU_API int mono_gpu_op_scale(void* stream, int64_t n, const float* const* inputs,
                                   const int64_t* sizes, float* const* outputs,
                                   const int64_t* padded, const float* factor, void* workspace,
                                   int64_t* workspace_bytes);

// The same, with a factor that the host knows.
MONO_GPU_API int mono_gpu_op_scale_by(void* stream, int64_t n, const float* const* inputs,
                                      const int64_t* sizes, float* const* outputs,
                                      const int64_t* padded, float factor, void* workspace,
                                      int64_t* workspace_bytes);

// *sum = the sum of the squares of all elements, accumulated in double.
MONO_GPU_API int mono_gpu_op_sum_of_squares(void* stream, int64_t n, const float* const* inputs,
                                            const int64_t* sizes, float* sum, void* workspace,
                                            int64_t* workspace_bytes);

// *norm = the root of that sum; outputs are the inputs times clip_norm / *norm if *norm >
// clip_norm, times 1 if not, and NaN if *norm is not finite.
MONO_GPU_API int mono_gpu_op_clip(void* stream, int64_t n, const float* const* inputs,
                                  const int64_t* sizes, float* const* outputs, float clip_norm,
                                  float* norm, void* workspace, int64_t* workspace_bytes);

// One step of dense_kernels.h's Rmsprop. scalars: learning rate, beta1, beta2, epsilon, weight
// decay, each one float on the device.
MONO_GPU_API int mono_gpu_op_rmsprop(void* stream, int64_t n, const float* const* scalars,
                                     const float* grad, float* w, float* m, float* v,
                                     int32_t use_v2);

// One step of dense_kernels.h's Adamom. scalars: learning rate, ada decay, mom decay, epsilon,
// weight decay.
MONO_GPU_API int mono_gpu_op_adamom(void* stream, int64_t n, const float* const* scalars,
                                    const float* grad, float* w, float* m, float* v, float* c,
                                    int32_t use_v2);

// Moves w by what the slots hold. Checked: c must not hold 0; w stays as it is where it does.
MONO_GPU_API int mono_gpu_op_adamom_move(void* stream, int64_t n, const float* const* scalars,
                                         const float* m, const float* v, const float* c, float* w,
                                         int32_t use_v2, void* workspace, int64_t* workspace_bytes);

// FFM: every left feature of an example with every right one, `dim` floats each.
MONO_GPU_API int mono_gpu_op_ffm(void* stream, int64_t batch, int64_t num_left, int64_t num_right,
                                 int64_t dim, int32_t dot, const float* left, const float* right,
                                 float* out);
MONO_GPU_API int mono_gpu_op_ffm_grad(void* stream, int64_t batch, int64_t num_left,
                                      int64_t num_right, int64_t dim, int32_t dot,
                                      const float* grad, const float* left, const float* right,
                                      float* left_grad, float* right_grad);

// outputs[m][j] = fused[offsets[m][j] : + dims[m]]. Checked: offsets.
MONO_GPU_API int mono_gpu_op_gather(void* stream, int64_t tables, const float* fused,
                                    int64_t fused_size, const int32_t* const* offsets,
                                    const int64_t* counts, const int64_t* dims,
                                    float* const* outputs, void* workspace,
                                    int64_t* workspace_bytes);

// out, of out_size floats, is 0 plus *scale * grads[m][j] at offsets[m][j], in the order of m and j
// where two rows start at the same offset, else in the order of the offsets. Checked: offsets.
MONO_GPU_API int mono_gpu_op_gather_grad(void* stream, int64_t tables, const float* const* grads,
                                         const int32_t* const* offsets, const int64_t* counts,
                                         const int64_t* dims, const float* scale, float* out,
                                         int64_t out_size, void* workspace,
                                         int64_t* workspace_bytes);

// out holds a matrix [rows[i], dims[i]] from out_offsets[i] on for every i; its row r is the sum of
// the rows of updates[i] whose index is r. index_bytes: 4 or 8. Checked: indices lie in
// [0, rows[i]) and never decrease.
MONO_GPU_API int mono_gpu_op_segment_sum(void* stream, int64_t n, int32_t index_bytes,
                                         const void* const* indices, const int64_t* counts,
                                         const float* const* updates, const int64_t* rows,
                                         const int64_t* dims, float* out,
                                         const int64_t* out_offsets, void* workspace,
                                         int64_t* workspace_bytes);

// Tables of [rows[i], sum of their slice_dims] floats. `splits` holds batch + 1 row splits for
// each. slices[s], [batch, slice_dims[s]], is the sum of the columns of slice s between two splits;
// the first num_slices[0] slices are table 0's. Checked: splits.
MONO_GPU_API int mono_gpu_op_reduce_split(void* stream, int64_t tables, int64_t batch,
                                          const int32_t* splits, const float* const* updates,
                                          const int64_t* rows, const int64_t* num_slices,
                                          const int64_t* slice_dims, float* const* slices,
                                          void* workspace, int64_t* workspace_bytes);

// The way back: each row of outputs[i] receives the gradient of its segment. Checked: splits.
MONO_GPU_API int mono_gpu_op_reduce_split_grad(void* stream, int64_t tables, int64_t batch,
                                               const int32_t* splits, const float* const* slices,
                                               const int64_t* rows, const int64_t* num_slices,
                                               const int64_t* slice_dims, float* const* outputs,
                                               void* workspace, int64_t* workspace_bytes);

// The fused layout of distribution/embedding_layout.h, whose terms these are. Targets are those of
// LayoutPlan, feature after feature.
typedef struct MonoGpuLayoutFeature {
  int64_t width;
  int64_t positions;
  int64_t num_targets;
  int32_t mean;
  int32_t first_n;
} MonoGpuLayoutFeature;

typedef struct MonoGpuLayoutTarget {
  int64_t output;
  int64_t column;
  int64_t step;
  int64_t start;
  int64_t width;
  int32_t add;
} MonoGpuLayoutTarget;

typedef struct MonoGpuLayoutPlan {
  const MonoGpuLayoutFeature* features;
  const MonoGpuLayoutTarget* targets;
  const int64_t* row_sizes;  // floats of one batch row of each output
  int64_t num_features;
  int64_t num_outputs;
} MonoGpuLayoutPlan;

// The vectors of one request, which lie on the device.
typedef struct MonoGpuLayoutRequest {
  const uint64_t* ids;
  const int32_t* rows;
  const uint32_t* starts;
  int64_t num_ids;
  int64_t num_rows;
  int64_t num_starts;  // num_features, or 1 more
  int64_t batch_size;
} MonoGpuLayoutRequest;

// The requests' rows of every output, one request after the other. Block b of request r starts at
// blocks[r * num_blocks + b] and has block_sizes[r * num_blocks + b] floats. Checked: ids, rows and
// starts.
MONO_GPU_API int mono_gpu_op_layout(void* stream, const MonoGpuLayoutPlan* plan,
                                    int64_t num_requests, const MonoGpuLayoutRequest* requests,
                                    int64_t num_blocks, const float* const* blocks,
                                    const int64_t* block_sizes, float* const* outputs,
                                    void* workspace, int64_t* workspace_bytes);

// The gradient of one request: out, of out_size floats, is 0 plus what every id receives. Block b
// starts block_offsets[b] floats into out. Checked: ids, rows and starts.
MONO_GPU_API int mono_gpu_op_layout_grad(void* stream, const MonoGpuLayoutPlan* plan,
                                         const MonoGpuLayoutRequest* request, int64_t num_blocks,
                                         const int64_t* block_offsets, const int64_t* block_sizes,
                                         const float* const* output_grads, float* out,
                                         int64_t out_size, void* workspace,
                                         int64_t* workspace_bytes);

// -- Tables (gpu_table.h). Ids, values and results lie on the device unless a comment says "host".

typedef struct MonoGpuTable MonoGpuTable;

// The fields are those of engine::SegmentConfig; kinds are the numbers of its enumerations.
typedef struct MonoGpuTableSegment {
  int64_t dim;
  int32_t optimizer;
  int32_t initializer;
  int32_t compressor;
  int32_t use_nesterov;
  int32_t decouple_weight_decay;
  int32_t stochastic_rounding_float16;
  float initial_accumulator_value;
  float weight_decay;
  float beta;
  float l1;
  float l2;
  float averaging_ratio;
  float epsilon;
  float beta1;
  float beta2;
  float momentum;
  float constant;
  float minval;
  float maxval;
  float range;
  float init_scale;
  float max_scale;
  float amplitude;
  int32_t decay_by_step;  // of Adam
  int64_t step_size;
} MonoGpuTableSegment;

typedef struct MonoGpuTableConfig {
  const MonoGpuTableSegment* segments;
  int64_t num_segments;
  int64_t initial_capacity;
  uint64_t seed;  // 0: MONOLITH_TABLE_SEED, else random
  uint32_t default_expire_days;
  uint32_t reserved;
  const uint32_t* expire_slots;  // pairs of a slot and its days
  const uint32_t* expire_days;
  int64_t num_expire_slots;
  const char* name;  // for messages, or null
} MonoGpuTableConfig;

// Sets dropped[i] to 1 for ids that must not enter the table yet. Called on the host.
typedef void (*MonoGpuFilter)(void* context, const int64_t* ids, const uint32_t* counts, int64_t n,
                              uint8_t* dropped);

// Lets absent ids in by chance, without asking the host: with P = min(1, count / threshold), or
// with 1 - 0.05^(count / threshold). The same seed, number of the batch, id and occurrence give the
// same draw.
typedef struct MonoGpuChanceFilter {
  uint64_t seed;
  uint64_t batch;
  const uint32_t* thresholds;  // 32768, one for each slot of ids; null: all have the default
  uint32_t default_threshold;  // 0: always
  int32_t equal_probability;   // 1: the second rule
} MonoGpuChanceFilter;

#define MONO_GPU_IDS_ARE_DISTINCT 0
#define MONO_GPU_STEP_FOR_EACH 1  // of equal ids, in the order of the batch
#define MONO_GPU_SUM_GRADIENTS 2  // of equal ids, and one step

// Says how a row of values or (summed) gradients with a NaN or an infinity is treated. The first
// two leave it out, as if its id were not in the batch, and count and name it; the host knows when
// the device has told it, for which no call waits. The next call that assigns, adds or optimizes,
// or mono_gpu_table_check, then fails with MONO_GPU_REFUSED before it does anything, or a warning
// is written to standard error.
#define MONO_GPU_NOT_FINITE_STOP 0
#define MONO_GPU_NOT_FINITE_SKIP 1
#define MONO_GPU_NOT_FINITE_WRITE 2  // as it is; gradients are counted

typedef struct MonoGpuWriteOptions {
  int64_t req_time;
  int64_t global_step;
  const float* learning_rates;  // host, one per segment; optimize only
  int64_t num_learning_rates;
  int32_t duplicates;
  int32_t not_finite;
  MonoGpuFilter filter;  // or null
  void* filter_context;
  const MonoGpuChanceFilter* chance_filter;  // host, or null; not beside `filter`
} MonoGpuWriteOptions;

typedef struct MonoGpuTableStats {
  int64_t size;
  int64_t row_bytes;
  int64_t index_bytes;
  int64_t other_bytes;
  int64_t slots;
  int64_t free_rows;
  int64_t spilled;
  int64_t nonfinite_gradients;
  int64_t filtered;
  int64_t expired;
  int64_t max_update_ts;
  int64_t rebuilds;
  int64_t waits;
} MonoGpuTableStats;

// Tables belong to the device that is current when they are made.
MONO_GPU_API int mono_gpu_table_create(const MonoGpuTableConfig* config, MonoGpuTable** table);
MONO_GPU_API void mono_gpu_table_destroy(MonoGpuTable* table);
MONO_GPU_API int64_t mono_gpu_table_dim(const MonoGpuTable* table);

// out row i = the vector of ids[i], zeros where absent; found[i] = 1 where present (or null).
MONO_GPU_API int mono_gpu_table_lookup(MonoGpuTable* table, void* stream, const int64_t* ids,
                                       int64_t n, float* out, uint8_t* found);
MONO_GPU_API int mono_gpu_table_assign(MonoGpuTable* table, void* stream, const int64_t* ids,
                                       int64_t n, const float* values,
                                       const MonoGpuWriteOptions* options);
MONO_GPU_API int mono_gpu_table_assign_add(MonoGpuTable* table, void* stream, const int64_t* ids,
                                           int64_t n, const float* values,
                                           const MonoGpuWriteOptions* options);
MONO_GPU_API int mono_gpu_table_optimize(MonoGpuTable* table, void* stream, const int64_t* ids,
                                         int64_t n, const float* gradients,
                                         const MonoGpuWriteOptions* options);

typedef struct MonoGpuLookupJob {
  MonoGpuTable* table;
  const int64_t* ids;
  int64_t n;
  float* out;
  uint8_t* found;      // or null
  int64_t out_stride;  // floats from one vector in `out` to the next; 0: the table's dim
} MonoGpuLookupJob;

// All lookups in one launch; a table may come several times. Jobs lie on the host.
MONO_GPU_API int mono_gpu_table_lookup_many(void* stream, const MonoGpuLookupJob* jobs,
                                            int64_t num_jobs);

// Types of gradients. Sums and steps are in 32 bits whatever they are.
#define MONO_GPU_FLOAT32 0
#define MONO_GPU_FLOAT16 1
#define MONO_GPU_BFLOAT16 2

typedef struct MonoGpuOptimizeJob {
  MonoGpuTable* table;
  const int64_t* ids;
  int64_t n;
  const void* gradients;
  const MonoGpuWriteOptions* options;
  int64_t gradient_stride;  // elements from one gradient to the next; 0: the table's dim
  int32_t gradient_type;
  int32_t reserved;
} MonoGpuOptimizeJob;

// Steps of several tables, as many launches as one table needs for tables alike. The jobs of one
// table have the same options and are one batch, joined in the order of the jobs. On an error no
// table has changed. Jobs lie on the host.
MONO_GPU_API int mono_gpu_table_optimize_many(void* stream, const MonoGpuOptimizeJob* jobs,
                                              int64_t num_jobs);

// Promises that a stream is there as long as there are tables: then calls on it record no events.
MONO_GPU_API int mono_gpu_keep_stream(void* stream);

// existed[i] = 1 where ids[i] was present, else 0 (or null).
MONO_GPU_API int mono_gpu_table_reinitialize(MonoGpuTable* table, void* stream, const int64_t* ids,
                                             int64_t n, int64_t now, int32_t* existed);
MONO_GPU_API int mono_gpu_table_erase(MonoGpuTable* table, void* stream, const int64_t* ids,
                                      int64_t n);

// These wait for the device.
MONO_GPU_API int mono_gpu_table_evict(MonoGpuTable* table, void* stream, int64_t* erased);
MONO_GPU_API int mono_gpu_table_reserve(MonoGpuTable* table, void* stream, int64_t rows);
MONO_GPU_API int mono_gpu_table_clear(MonoGpuTable* table, void* stream);
MONO_GPU_API int mono_gpu_table_stats(MonoGpuTable* table, MonoGpuTableStats* stats);
// MONO_GPU_REFUSED, once, where a call since the last that told so had to stop.
MONO_GPU_API int mono_gpu_table_check(MonoGpuTable* table);

// Takes `size` bytes; another result than 0 ends the call that hands them out.
typedef int (*MonoGpuSink)(void* context, const char* bytes, int64_t size);

// Hands out the rows of one of the 64 shards as framed records, those of the CPU's tables. Rows
// that are expired are left out if asked for. *num_records counts on.
MONO_GPU_API int mono_gpu_table_save_shard(MonoGpuTable* table, void* stream, int32_t shard,
                                           int32_t leave_out_expired, MonoGpuSink sink,
                                           void* context, int64_t* num_records);
// The same with other expiry times than the table's: default_days, and those of some slots.
// *num_expired counts the rows that were left out.
MONO_GPU_API int mono_gpu_table_save_shard_until(MonoGpuTable* table, void* stream, int32_t shard,
                                                 uint32_t default_days, const uint32_t* slots,
                                                 const uint32_t* days, int64_t num_slots,
                                                 MonoGpuSink sink, void* context,
                                                 int64_t* num_records, int64_t* num_expired);
// Hands out one record, without a frame, for each of n ids, in order; 0 bytes where there is no
// row.
MONO_GPU_API int mono_gpu_table_save_ids(MonoGpuTable* table, void* stream, const int64_t* ids,
                                         int64_t n, MonoGpuSink sink, void* context);
// numbers[i], on the host, is where the row of ids[i] lies, 0 where there is none. The same calls
// give the same numbers.
MONO_GPU_API int mono_gpu_table_row_numbers(MonoGpuTable* table, void* stream, const int64_t* ids,
                                            int64_t n, uint32_t* numbers);
// Stores the rows of n records, without frames, all of them on the host; the last of equal ids
// stays. *state_reset counts segments whose state was missing or of another optimizer. On an error
// some rows are stored.
MONO_GPU_API int mono_gpu_table_load_records(MonoGpuTable* table, void* stream,
                                             const char* const* records, const int64_t* sizes,
                                             int64_t n, int64_t* state_reset);
// The same for framed records, as files have them, whose checksums are compared. *consumed: bytes
// of the records that `bytes` holds whole.
MONO_GPU_API int mono_gpu_table_load(MonoGpuTable* table, void* stream, const char* bytes,
                                     int64_t size, int64_t* consumed, int64_t* num_records,
                                     int64_t* state_reset);

// Bytes that all tables of the process may have; 0: MONOLITH_GPU_TABLE_BYTES, else 70 % of the
// card.
MONO_GPU_API int mono_gpu_table_set_budget(int64_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_C_API_H_
