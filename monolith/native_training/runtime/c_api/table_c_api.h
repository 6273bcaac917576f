// libmonolith_engine.so: tables in main memory behind a C interface, for programs without
// TensorFlow. gpu/c_api.h is its counterpart for tables in the memory of a GPU.
//
// Every function returns MONO_OK or an error code, and mono_last_error then tells the calling
// thread what went wrong. No exception leaves a function, and arguments are checked before anything
// changes. Any mix of calls on one table is safe, but for mono_table_destroy. Arrays belong to the
// caller, who may free them when a call returns.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_TABLE_C_API_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_TABLE_C_API_H_

#include <stdint.h>

#define MONO_VERSION 1
// The first six are those of gpu/c_api.h.
#define MONO_OK 0
#define MONO_INVALID_ARGUMENT 1
#define MONO_INTERNAL 2
#define MONO_OUT_OF_MEMORY 3
#define MONO_UNIMPLEMENTED 4
#define MONO_FAILED_PRECONDITION 5  // of files: they are damaged, too
#define MONO_NOT_FOUND 6
#define MONO_PERMISSION_DENIED 7
#define MONO_UNAVAILABLE 8
#define MONO_DATA_LOSS 9

#if defined(__GNUC__)
#define MONO_API __attribute__((visibility("default")))
#else
#define MONO_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

MONO_API int mono_version(void);

// Returns the text of the calling thread's last error; valid until its next call.
MONO_API const char* mono_last_error(void);

// Sets how many threads one call may use; 0: as many as this process may run on.
MONO_API int mono_set_num_threads(int64_t threads);

// Returns the CRC-32C of `size` bytes (Castagnoli's polynomial, as in TFRecords, unmasked).
MONO_API uint32_t mono_crc32c(const void* data, int64_t size);

typedef struct MonoTable MonoTable;

// The fields are those of engine::SegmentConfig; kinds are the numbers of its enumerations.
typedef struct MonoTableSegment {
  int64_t dim;
  int32_t optimizer;
  int32_t initializer;
  int32_t compressor;
  int32_t use_nesterov;
  int32_t decouple_weight_decay;
  int32_t stochastic_rounding_float16;
  int32_t decay_by_step;
  int32_t enable_dynamic_wd;
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
  int64_t step_size;
} MonoTableSegment;

typedef struct MonoTableConfig {
  const MonoTableSegment* segments;
  int64_t num_segments;
  int64_t initial_capacity;
  uint64_t seed;     // 0: MONOLITH_TABLE_SEED, else random
  const char* name;  // what messages call the table; null: "table"
  uint32_t default_expire_days;
  uint32_t skip_zero_embedding;
  const uint32_t* expire_slots;  // pairs of a slot and its days
  const uint32_t* expire_days;
  int64_t num_expire_slots;
  // An id gets a row once it was written this often; 0: at once.
  uint32_t admit_after;
  uint32_t evict_every_hours;  // in the background; 0: mono_table_evict alone removes rows
  int64_t admit_capacity;      // ids that are counted at the same time
} MonoTableConfig;

// Chooses the fate of rows of values or gradients with a NaN or an infinity.
#define MONO_NON_FINITE_STOP 0  // they are left out, and the call fails with a text that names them
#define MONO_NON_FINITE_SKIP 1  // they are left out, with a warning on standard error
#define MONO_NON_FINITE_WRITE 2  // they are written

typedef struct MonoWriteOptions {
  int64_t req_time;  // seconds, becomes the rows' time
  int64_t global_step;
  const float* learning_rates;  // one per segment; optimize only
  int64_t num_learning_rates;
  int32_t non_finite;
  // optimize: 1: equal ids take one step on the sum of their gradients, and admission counts them
  // once
  int32_t sum_duplicates;
} MonoWriteOptions;

typedef struct MonoTableStats {
  int64_t size;
  int64_t memory;
  int64_t row_memory;
  int64_t index_memory;
  int64_t free_rows;
  int64_t expired;
  int64_t filtered;
  int64_t nonfinite_gradients;
  int64_t max_update_ts;
} MonoTableStats;

MONO_API int mono_table_create(const MonoTableConfig* config, MonoTable** table);
// No other call on the table may be under way. Null is allowed.
MONO_API void mono_table_destroy(MonoTable* table);

// Gives the table another configuration of the same dimension. Rows stay, with their state where
// the optimizer is of the same kind. Counts of occurrences stay, too.
MONO_API int mono_table_configure(MonoTable* table, const MonoTableConfig* config);

MONO_API int mono_table_size(MonoTable* table, int64_t* rows);
MONO_API int mono_table_stats(MonoTable* table, MonoTableStats* stats);

// out row i = the vector of ids[i], zeros where absent; found[i] = 1 where present (or null).
MONO_API int mono_table_lookup(MonoTable* table, const int64_t* ids, int64_t n, float* out,
                               uint8_t* found);
MONO_API int mono_table_contains(MonoTable* table, const int64_t* ids, int64_t n, uint8_t* found);

// Rows that are missing are made. The last of equal ids stays; of assign_add each counts.
MONO_API int mono_table_assign(MonoTable* table, const int64_t* ids, int64_t n, const float* values,
                               const MonoWriteOptions* options);
MONO_API int mono_table_assign_add(MonoTable* table, const int64_t* ids, int64_t n,
                                   const float* values, const MonoWriteOptions* options);
MONO_API int mono_table_optimize(MonoTable* table, const int64_t* ids, int64_t n,
                                 const float* gradients, const MonoWriteOptions* options);

typedef struct MonoLookupJob {
  MonoTable* table;
  const int64_t* ids;
  int64_t n;
  float* out;
  uint8_t* found;  // or null
} MonoLookupJob;

// All lookups at once; a table may come several times.
MONO_API int mono_table_lookup_many(const MonoLookupJob* jobs, int64_t num_jobs);

typedef struct MonoOptimizeJob {
  MonoTable* table;
  const int64_t* ids;
  int64_t n;
  const float* gradients;
  const MonoWriteOptions* options;
} MonoOptimizeJob;

// All steps at once; no table may come twice.
MONO_API int mono_table_optimize_many(const MonoOptimizeJob* jobs, int64_t num_jobs);

// Values and state as new; existed[i] = 1 where ids[i] was present (or null).
MONO_API int mono_table_reinitialize(MonoTable* table, const int64_t* ids, int64_t n, int64_t now,
                                     int32_t* existed);
// Absent ids are ignored.
MONO_API int mono_table_erase(MonoTable* table, const int64_t* ids, int64_t n);
// Removes rows that are expired against the newest time of a write; *erased: how many.
MONO_API int mono_table_evict(MonoTable* table, int64_t* erased);
MONO_API int mono_table_reserve(MonoTable* table, int64_t rows);
MONO_API int mono_table_clear(MonoTable* table);

// Takes n rows; another result than 0 ends the call that hands them out. It must
// not use the table.
typedef int (*MonoRowSink)(void* context, const int64_t* ids, const uint32_t* times,
                           const float* values, int64_t n);
// Hands out all rows, some thousand at a time, in no order.
MONO_API int mono_table_rows(MonoTable* table, MonoRowSink sink, void* context);

// Takes `size` bytes, of record number `i`.
typedef int (*MonoEntrySink)(void* context, int64_t i, const char* bytes, int64_t size);
// Hands out a serialized EntryDump for each of n ids, in order; 0 bytes where there is no row.
MONO_API int mono_table_entries(MonoTable* table, const int64_t* ids, int64_t n, MonoEntrySink sink,
                                void* context);

// Writes `<path>-ddddd-of-ddddd` and a manifest: the files of TensorFlow's tables. They replace
// what was saved there at once, or not at all. num_files -1: by size. Rows that are expired are
// left out. Counts of occurrences are not saved.
MONO_API int mono_table_save(MonoTable* table, const char* path, int64_t num_files, int64_t* saved,
                             int64_t* expired);
// Replaces all rows by what was saved; on an error nothing changes. *state_reset counts segments
// whose state was missing or of another optimizer.
MONO_API int mono_table_load(MonoTable* table, const char* path, int64_t* loaded,
                             int64_t* state_reset);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_C_API_TABLE_C_API_H_
