// Columns of a Parquet file, read by libmonolith_parquet.so, which is loaded when first needed.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_FILE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/arrow/parquet_reader.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

struct ParquetApi;

// Not thread-safe.
class ParquetFile {
 public:
  // Opens a file of any file system that TensorFlow knows. FailedPrecondition: the library, or the
  // Arrow it needs, is not there. InvalidArgument: it is no Parquet file.
  static Status Open(Env* env, const std::string& file_name,
                     const std::vector<std::string>& column_names,
                     std::unique_ptr<ParquetFile>* file);
  ~ParquetFile();

  ParquetFile(const ParquetFile&) = delete;
  ParquetFile& operator=(const ParquetFile&) = delete;

  const std::string& name() const { return name_; }

  // For these see arrow/parquet_reader.h. Columns are those asked for.
  MonolithParquetColumn Describe(int64_t column) const;
  std::string AllNames() const;
  Status Seek(int64_t row);
  Status Read(int64_t rows, int64_t* num_read);
  MonolithParquetValues Values(int64_t column) const;

 private:
  struct Input;

  ParquetFile(const ParquetApi* api, std::string name);

  Status Error(const char* reason) const;

  const ParquetApi* const api_;
  const std::string name_;
  std::unique_ptr<Input> input_;
  MonolithParquetReader* reader_ = nullptr;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_FILE_H_
