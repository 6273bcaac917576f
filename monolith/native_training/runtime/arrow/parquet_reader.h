// Columns of Parquet files as plain arrays: the C interface of libmonolith_parquet.so.
//
// That library links Arrow, as the Python package pyarrow ships it; the op library loads it when a
// Parquet file is first read. Nothing but C crosses the border: Arrow's headers use C++ streams,
// and its wheel may have been built with another C++ ABI than TensorFlow's.
//
// A function that can fail writes its reason into `error`, cut to `error_size` bytes with the final
// 0. A reader may be used by one thread at a time.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Where the bytes of a file come from. `read` returns how many bytes it wrote to `out`, fewer than
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

// A column that was asked for. All but `count` mean nothing unless `count` is 1.
struct MonolithParquetColumn {
  int64_t count;  // columns of that name
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
  const int64_t* integers;     // of an INTEGER column; unsigned ones keep their bits
  const double* floats;        // of a FLOAT column
  const char* bytes;           // of a BYTES column, one value after the other
  const int64_t* byte_splits;  // values + 1
  int64_t first_null;          // the first row that is or has a null, or -1
};

struct MonolithParquetReader;

// Opens a file to read `num_names` columns. Null: it is no Parquet file.
struct MonolithParquetReader* MonolithParquetOpen(const struct MonolithParquetInput* input,
                                                  const char* const* names, int64_t num_names,
                                                  char* error, int64_t error_size);
void MonolithParquetClose(struct MonolithParquetReader* reader);

// Describes column `index` of those asked for.
void MonolithParquetDescribe(const struct MonolithParquetReader* reader, int64_t index,
                             struct MonolithParquetColumn* column);

// The names of all columns of the file, separated by ", ".
const char* MonolithParquetAllNames(const struct MonolithParquetReader* reader);

int64_t MonolithParquetNumRows(const struct MonolithParquetReader* reader);

// Goes on reading at a row, 0 to the number of rows. Returns 0, or -1.
int MonolithParquetSeek(struct MonolithParquetReader* reader, int64_t row, char* error,
                        int64_t error_size);

// Reads the next rows, up to `rows`; fewer only at the end. Returns how many, or -1. Every column
// must have a count of 1 and a kind other than OTHER.
int64_t MonolithParquetRead(struct MonolithParquetReader* reader, int64_t rows, char* error,
                            int64_t error_size);

// The values of column `index` of those asked for.
void MonolithParquetGetValues(const struct MonolithParquetReader* reader, int64_t index,
                              struct MonolithParquetValues* values);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ARROW_PARQUET_READER_H_
