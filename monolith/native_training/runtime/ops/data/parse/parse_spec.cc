#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"

#include <algorithm>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::FeatureRows;
using ::monolith::engine::FidV1ToV2;

namespace {

// Cheap rows are not worth a thread each.
constexpr int64_t kRowCycles = 200;

Status CheckDtype(const ParseSpec::Column& column) {
  switch (column.kind) {
    case ParseSpec::Kind::kSparse:
      if (column.dtype == DT_INT64) return OkStatus();
      return errors::InvalidArgument("dtype of the row splits of '", column.name, "' is ",
                                     DataTypeString(column.dtype), ", want int64");
    case ParseSpec::Kind::kLabel:
    case ParseSpec::Kind::kWeight:
      if (column.dtype == DT_FLOAT) return OkStatus();
      return errors::InvalidArgument("dtype of '", column.name, "' is ",
                                     DataTypeString(column.dtype), ", want float");
    default:
      if (column.dtype == DT_FLOAT || column.dtype == DT_INT64 || column.dtype == DT_STRING) {
        return OkStatus();
      }
      return errors::InvalidArgument("dtype of '", column.name, "' is ",
                                     DataTypeString(column.dtype), ", want float, int64 or string");
  }
}

}  // namespace

Status ParseSpec::Build(const std::vector<std::string>& names, const std::vector<int64_t>& shapes,
                        const DataTypeVector& dtypes, const std::vector<std::string>& extra_names) {
  TF_RETURN_IF_ERROR(CheckEqual("length of shapes", static_cast<int64_t>(shapes.size()),
                                "length of names", static_cast<int64_t>(names.size())));
  num_sparse = std::count(shapes.begin(), shapes.end(), -1);
  TF_RETURN_IF_ERROR(CheckEqual("length of dtypes", static_cast<int64_t>(dtypes.size()),
                                "names + sparse names",
                                static_cast<int64_t>(names.size()) + num_sparse));
  for (size_t i = 0; i < names.size(); ++i) {
    Column column;
    column.name = names[i];
    column.width = shapes[i];
    column.dtype = dtypes[i];
    const bool sparse = shapes[i] == -1;
    if (sparse != (static_cast<int64_t>(i) < num_sparse)) {
      return errors::InvalidArgument("sparse names must come first, but '", names[i],
                                     "' has shape ", shapes[i], " at position ", i);
    }
    if (!sparse && shapes[i] <= 0) {
      return errors::InvalidArgument("shape of '", names[i], "' is ", shapes[i],
                                     ", want -1 or more than 0");
    }
    if (shapes[i] > kMaxColumnWidth) {
      return errors::InvalidArgument("shape of '", names[i], "' is ", shapes[i], ", want at most ",
                                     kMaxColumnWidth);
    }
    if (sparse) {
      column.kind = Kind::kSparse;
      if (dtypes[names.size() + i] != DT_INT64) {
        return errors::InvalidArgument("dtype of the values of '", names[i], "' is ",
                                       DataTypeString(dtypes[names.size() + i]), ", want int64");
      }
    } else if (std::find(extra_names.begin(), extra_names.end(), names[i]) != extra_names.end()) {
      column.kind = Kind::kLineId;
      DataType field_dtype;
      TF_RETURN_IF_ERROR(FindLineIdField(names[i], &column.field, &field_dtype));
      if (field_dtype != dtypes[i]) {
        return errors::InvalidArgument("dtype of '", names[i], "' is ", DataTypeString(dtypes[i]),
                                       ", want that of the field: ", DataTypeString(field_dtype));
      }
      needs_line_id = true;
    } else if (names[i] == "label") {
      column.kind = Kind::kLabel;
    } else if (names[i] == kWeightName) {
      column.kind = Kind::kWeight;
    }
    TF_RETURN_IF_ERROR(CheckDtype(column));
    if (!index.emplace(names[i], static_cast<int64_t>(i)).second) {
      return errors::InvalidArgument("names has '", names[i], "' twice");
    }
    columns.push_back(column);
  }
  for (const std::string& name : extra_names) {
    if (index.find(name) == index.end()) {
      return errors::InvalidArgument("extra_names has '", name, "', which is not in names");
    }
  }
  return OkStatus();
}

Status WriteSparseColumn(OpKernelContext* ctx, int64_t splits_output, int64_t values_output,
                         const FeatureRows& rows, int64_t repeat, bool convert_v1) {
  const int64_t batch = repeat > 0 ? repeat : rows.num_rows();
  Tensor* splits_tensor;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, splits_output, {batch + 1}, &splits_tensor));
  auto splits = splits_tensor->vec<int64_t>();
  splits(0) = 0;
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t source = repeat > 0 ? 0 : row;
    int64_t size = 0;
    for (int64_t s = rows.row_splits[source]; s < rows.row_splits[source + 1]; ++s) {
      size += rows.spans[s].size;
    }
    splits(row + 1) = splits(row) + size;
  }
  Tensor* values_tensor;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, values_output, {splits(batch)}, &values_tensor));
  int64_t* out = values_tensor->flat<int64_t>().data();
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t source = repeat > 0 ? 0 : row;
    for (int64_t s = rows.row_splits[source]; s < rows.row_splits[source + 1]; ++s) {
      const ::monolith::data::FidSpan& span = rows.spans[s];
      if (span.is_v1 && convert_v1) {
        out = std::transform(span.fids, span.fids + span.size, out,
                             [](uint64_t fid) { return static_cast<int64_t>(FidV1ToV2(fid)); });
      } else {
        out = std::transform(span.fids, span.fids + span.size, out,
                             [](uint64_t fid) { return static_cast<int64_t>(fid); });
      }
    }
  }
  return OkStatus();
}

namespace {

template <typename T>
Status FillRows(OpKernelContext* ctx, int64_t i, int64_t batch, int64_t width,
                const std::function<Status(int64_t, T*)>& row, const DeviceRunner& parallel) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, i, {batch, width}, &tensor));
  T* out = tensor->flat<T>().data();
  FirstError error;
  parallel.For(batch, kRowCycles + width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) error.Update(row(r, out + r * width));
  });
  return error.status();
}

}  // namespace

Status WriteDenseColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t i,
                        int64_t batch, const DenseRow& row, const DeviceRunner& parallel) {
  switch (column.dtype) {
    case DT_FLOAT:
      return FillRows<float>(ctx, i, batch, column.width, row.floats, parallel);
    case DT_INT64:
      return FillRows<int64_t>(ctx, i, batch, column.width, row.ints, parallel);
    default:
      return FillRows<tstring>(ctx, i, batch, column.width, row.strings, parallel);
  }
}

Status WriteLineIdColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t i,
                         int64_t batch, const std::function<const LineId&(int64_t)>& line_id,
                         const DeviceRunner& parallel) {
  const auto copy = [&](int64_t row, auto* out) {
    CopyLineIdField(line_id(row), *column.field, column.width, out);
    return OkStatus();
  };
  return WriteDenseColumn(ctx, column, i, batch, {copy, copy, copy}, parallel);
}

}  // namespace monolith_tf
}  // namespace tensorflow
