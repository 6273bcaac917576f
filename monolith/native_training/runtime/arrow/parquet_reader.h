// Reads columns of Parquet files as plain arrays: the C interface of libmonolith_parquet.so.
//
// That library links Arrow as the Python package pyarrow ships it; the op library loads it when a
// Parquet file is first read. Only C crosses the border: Arrow's headers use C++ streams, and its
// wheel may have been built with another C++ ABI than TensorFlow's.
//
// A function that fails writes the reason into `error`, cut to `error_size` bytes including the
// final 0. One thread at a time may use a reader.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The source of a file's bytes. `read` returns how many bytes it wrote to `out`, fewer than
// `size` only at the end, or -1. It must stay valid until the reader is closed.
struct MonolithParquetInput {
  void* context;
  int64_t size;
  int64_t (*read)(void* context, int64_t offset, int64_t size, void* out);
};

enum MonolithParquetKind {
  MONOLITH_PARQUET_OTHER = 0,
  MONOLITH_PARQUET_INTEGER = 1,
  MONOLITH_PARQUET_FLOAT = 2,
  MONOLITH_PARQUET_BYTES = 3,
};

// A requested column. All but `count` mean nothing unless `count` is 1.
struct MonolithParquetColumn {
  int64_t count;  // columns with this name
  int32_t kind;   // MonolithParquetKind
  int32_t is_list;
  int32_t is_unsigned;
  const char* type_name;  // lives as long as the reader
};

// The values of a column in the rows that were read last. They live until the next read.
//
//   rows       [a, b]  []  [c]
//   row_splits 0  2  2  3        values: a b c
struct MonolithParquetValues {
  const int64_t* row_splits;   // rows + 1
  const int64_t* integers;     // if INTEGER; unsigned ones keep their bits
  const double* floats;        // if FLOAT
  const char* bytes;           // if BYTES, one value after the other
  const int64_t* byte_splits;  // values + 1
  int64_t first_null;          // the first row that is or has a null, or -1
};

struct MonolithParquetReader;

// Opens a file to read `num_names` columns. Returns null if it is not a Parquet file.
struct MonolithParquetReader* MonolithParquetOpen(const struct MonolithParquetInput* input,
                                                  const char* const* names, int64_t num_names,
                                                  char* error, int64_t error_size);
void MonolithParquetClose(struct MonolithParquetReader* reader);

// Describes requested column `index`.
void MonolithParquetDescribe(const struct MonolithParquetReader* reader, int64_t index,
                             struct MonolithParquetColumn* column);

// Returns the names of all columns in the file, separated by ", ".
const char* MonolithParquetAllNames(const struct MonolithParquetReader* reader);

int64_t MonolithParquetNumRows(const struct MonolithParquetReader* reader);

// Continues reading at a row, 0 to the number of rows. Returns 0, or -1 on failure.
int MonolithParquetSeek(struct MonolithParquetReader* reader, int64_t row, char* error,
                        int64_t error_size);

// Reads the next rows, up to `rows`; fewer only at the end. Returns how many, or -1. Every column
// must have a count of 1 and a kind other than OTHER.
int64_t MonolithParquetRead(struct MonolithParquetReader* reader, int64_t rows, char* error,
                            int64_t error_size);

// Sets `values` to those of requested column `index`.
void MonolithParquetGetValues(const struct MonolithParquetReader* reader, int64_t index,
                              struct MonolithParquetValues* values);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_
