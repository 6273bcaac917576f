// Columns of a Parquet file as columns of an ExampleBatch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_COLUMNS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_COLUMNS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/data/parquet/parquet_file.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Says which column of a file to read, and what it becomes.
class ParquetColumns {
 public:
  // `names` are columns: __LABEL__ is the label, another __XXX__ field xxx of LineId, any other the
  // feature of its name. `types` are int, fid_v1, fid_v2, float, or for byte arrays bytes or
  // string. InvalidArgument: the lists do not fit, a name comes twice or is no field, a type is
  // unknown.
  Status Init(const std::vector<std::string>& names, const std::vector<std::string>& types);

  const std::vector<std::string>& names() const { return names_; }

  // InvalidArgument: the file lacks a column, or one cannot become what is wanted.
  Status CheckFile(const ParquetFile& file) const;

  // Makes a batch of the `num_rows` rows that were read last; `first_row` is the number of the
  // first one, for errors. InvalidArgument: a row has a null, or a value that does not fit.
  Status MakeBatch(const ParquetFile& file, int64_t num_rows, int64_t first_row,
                   ExampleBatch* batch) const;

 private:
  enum class Type { kInt, kFidV1, kFidV2, kFloat, kBytes };
  struct Column {
    Type type;
    std::string type_name;
    const ::google::protobuf::FieldDescriptor* line_id_field = nullptr;
  };

  bool Accepts(size_t i, int32_t kind) const;
  Status FillFeatures(const ParquetFile& file, size_t i, int64_t num_rows, int64_t first_row,
                      ExampleBatch* batch) const;
  Status FillLineIds(const ParquetFile& file, size_t i, int64_t first_row,
                     std::vector<LineId>* line_ids) const;
  Status ValueError(const ParquetFile& file, size_t i, int64_t row, const std::string& text) const;

  std::vector<std::string> names_;
  std::vector<Column> columns_;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARQUET_PARQUET_COLUMNS_H_
