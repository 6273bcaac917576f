// Holds the columns of the parse ops, resolved once from their attributes, and their outputs.
//
// `names` lists sparse features first (shape -1), then dense ones and fields of LineId. Output i of
// a sparse name is its row splits, output len(names) + i its ids; a dense one is [batch, shape].
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_PARSE_SPEC_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_PARSE_SPEC_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "monolith/native_training/runtime/data/fid_sharding.h"
#include "monolith/native_training/runtime/ops/data/parse/line_id.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace tensorflow {
namespace monolith_tf {

// Values of a dense feature per sample. More could not be stored for two samples.
inline constexpr int64_t kMaxColumnWidth = std::numeric_limits<int32_t>::max();

struct ParseSpec {
  enum class Kind { kSparse, kDense, kLabel, kWeight, kLineId };

  struct Column {
    std::string name;
    Kind kind = Kind::kDense;
    int64_t width = -1;  // -1: sparse
    DataType dtype = DT_INT64;
    const LineIdField* field = nullptr;
  };

  // InvalidArgument: lengths, shapes, dtypes or names contradict each other.
  Status Build(const std::vector<std::string>& names, const std::vector<int64_t>& shapes,
               const DataTypeVector& dtypes, const std::vector<std::string>& extra_names);

  // Reads the attributes names, shapes, dtypes, extra_names.
  template <typename Context>
  Status BuildFromAttrs(Context* ctx) {
    std::vector<std::string> names, extra_names;
    std::vector<int64_t> shapes;
    DataTypeVector dtypes;
    TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names));
    TF_RETURN_IF_ERROR(ctx->GetAttr("shapes", &shapes));
    TF_RETURN_IF_ERROR(ctx->GetAttr("dtypes", &dtypes));
    TF_RETURN_IF_ERROR(ctx->GetAttr("extra_names", &extra_names));
    return Build(names, shapes, dtypes, extra_names);
  }

  int64_t num_columns() const { return static_cast<int64_t>(columns.size()); }

  std::vector<Column> columns;
  int64_t num_sparse = 0;
  bool needs_line_id = false;
  absl::flat_hash_map<std::string, int64_t> index;  // of every name
};

// Row-wise access of one column while it is written: what differs between sample formats.
struct DenseRow {
  std::function<Status(int64_t row, float* out)> floats;
  std::function<Status(int64_t row, int64_t* out)> ints;
  std::function<Status(int64_t row, tstring* out)> strings;
};

// Writes row splits and ids of a sparse column. With `repeat` > 0 the single row is written that
// many times. v1 ids become v2 if `convert_v1`.
Status WriteSparseColumn(OpKernelContext* ctx, int64_t splits_output, int64_t values_output,
                         const ::monolith::data::FeatureRows& rows, int64_t repeat,
                         bool convert_v1);

// Writes a dense column as output i by asking for each of the `batch` rows.
Status WriteDenseColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t i,
                        int64_t batch, const DenseRow& row, const DeviceRunner& parallel);

// LineId column; line_id(row) must stay valid while it is written.
Status WriteLineIdColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t i,
                         int64_t batch, const std::function<const LineId&(int64_t)>& line_id,
                         const DeviceRunner& parallel);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_PARSE_SPEC_H_
