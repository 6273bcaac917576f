// Kernels of ParseExamples, ParseExampleBatch (and V2) and ParseExampleBatchList.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/data/data_op_config.pb.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/ops/data/parse/example_columns.h"
#include "monolith/native_training/runtime/ops/data/parse/parse_spec.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::FeatureRows;
using ::monolith::io::proto::NamedFeature;
using ::monolith::io::proto::NamedFeatureList;
using ::monolith::native_training::data::config::LabelConf;

template <typename CellFn>
DenseRow DenseCells(const ParseSpec::Column& column, CellFn cell) {
  const auto copy = [&column, cell](int64_t row, auto* out) {
    return CopyDense(column.name, cell(row), column.width, out);
  };
  return {copy, copy, copy};
}

// cells[row * columns + column]: the last feature of that name, or null.
class ExampleTable {
 public:
  ExampleTable(const SampleBatch<Example>& batch, const ParseSpec& spec,
               const DeviceRunner& parallel)
      : spec_(spec), cells_(static_cast<size_t>(batch.size() * spec.num_columns())) {
    parallel.For(batch.size(), kIndexCycles, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (const NamedFeature& named : batch[row].named_feature()) {
          const auto it = spec.index.find(named.name());
          if (it != spec.index.end()) {
            cells_[row * spec.num_columns() + it->second] = &named.feature();
          }
        }
      }
    });
  }

  const ExampleFeature* cell(int64_t column, int64_t row) const {
    return cells_[row * spec_.num_columns() + column];
  }

 private:
  const ParseSpec& spec_;
  std::vector<const ExampleFeature*> cells_;
};

Status WriteExamples(OpKernelContext* ctx, const SampleBatch<Example>& batch, const ParseSpec& spec,
                     const DeviceRunner& parallel) {
  const ExampleTable table(batch, spec, parallel);
  for (int64_t i = 0; i < spec.num_columns(); ++i) {
    const ParseSpec::Column& column = spec.columns[i];
    const auto cell = [&table, i](int64_t row) { return table.cell(i, row); };
    DenseRow rows = DenseCells(column, cell);
    switch (column.kind) {
      case ParseSpec::Kind::kSparse: {
        FeatureRows sparse;
        for (int64_t row = 0; row < batch.size(); ++row) {
          TF_RETURN_IF_ERROR(AppendFids(column.name, cell(row), &sparse));
          sparse.AddRow();
        }
        TF_RETURN_IF_ERROR(WriteSparseColumn(ctx, i, spec.num_columns() + i, sparse, /*repeat=*/0,
                                             /*convert_v1=*/true));
        continue;
      }
      case ParseSpec::Kind::kLineId: {
        const auto line_id = [&batch](int64_t row) -> const LineId& {
          return batch[row].line_id();
        };
        TF_RETURN_IF_ERROR(WriteLineIdColumn(ctx, column, i, batch.size(), line_id, parallel));
        continue;
      }
      case ParseSpec::Kind::kLabel:
        rows.floats = [&, cell](int64_t row, float* out) {
          if (cell(row) != nullptr) return CopyDense(column.name, cell(row), column.width, out);
          CutOrPad(batch[row].label(), column.width, kInvalidLabel, out);
          return OkStatus();
        };
        break;
      case ParseSpec::Kind::kWeight:
        rows.floats = [&](int64_t row, float* out) {
          const float weight = batch[row].instance_weight();
          out[0] = weight > 0 ? weight : 1.0f;
          std::fill(out + 1, out + column.width, 0.0f);
          return OkStatus();
        };
        break;
      case ParseSpec::Kind::kDense:
        break;
    }
    TF_RETURN_IF_ERROR(WriteDenseColumn(ctx, column, i, batch.size(), rows, parallel));
  }
  return OkStatus();
}

// The columns of one or several batches of the same rows.
class BatchTable {
 public:
  // Later batches and later columns of the same name win.
  Status Add(const ExampleBatch& batch, const ParseSpec& spec) {
    columns_.resize(static_cast<size_t>(spec.num_columns()));
    for (const NamedFeatureList& column : batch.named_feature_list()) {
      const auto it = spec.index.find(column.name());
      const bool reserved = column.name() == kLabelName || column.name() == kLineIdName ||
                            column.name() == kWeightName;
      if (it == spec.index.end() && !reserved) continue;
      TF_RETURN_IF_ERROR(CheckColumn(batch, column));
      if (it != spec.index.end()) columns_[it->second] = &column;
      if (column.name() == kLabelName) label_ = &column;
      if (column.name() == kLineIdName) line_id_ = &column;
    }
    return OkStatus();
  }

  const NamedFeatureList* column(int64_t i) const { return columns_[i]; }
  const NamedFeatureList* label() const { return label_; }

  static const ExampleFeature* Cell(const NamedFeatureList* column, int64_t row) {
    return column == nullptr ? nullptr : &column->feature(IsShared(*column) ? 0 : row);
  }

  // One LineId per row; a batch without the column has default ones.
  Status ParseLineIds(int64_t rows, std::vector<LineId>* line_ids) const {
    line_ids->resize(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) {
      const ExampleFeature* cell = Cell(line_id_, row);
      if (cell == nullptr || cell->bytes_list().value_size() == 0) continue;
      if (IsShared(*line_id_) && row > 0) {
        (*line_ids)[row] = (*line_ids)[0];
      } else if (!(*line_ids)[row].ParseFromString(cell->bytes_list().value(0))) {
        return errors::InvalidArgument("Failed to parse the LineId in row ", row, " of ",
                                       kLineIdName);
      }
    }
    return OkStatus();
  }

 private:
  std::vector<const NamedFeatureList*> columns_;
  const NamedFeatureList* label_ = nullptr;
  const NamedFeatureList* line_id_ = nullptr;
};

// Everything but sparse columns and labels that need more than the table.
Status WriteBatchColumn(OpKernelContext* ctx, const BatchTable& table, const ParseSpec& spec,
                        int64_t i, int64_t batch, const std::vector<LineId>& line_ids,
                        const DeviceRunner& parallel) {
  const ParseSpec::Column& column = spec.columns[i];
  const NamedFeatureList* list = table.column(i);
  DenseRow rows = DenseCells(column, [list](int64_t row) { return BatchTable::Cell(list, row); });
  switch (column.kind) {
    case ParseSpec::Kind::kLineId:
      return WriteLineIdColumn(
          ctx, column, i, batch,
          [&line_ids](int64_t row) -> const LineId& { return line_ids[row]; }, parallel);
    case ParseSpec::Kind::kLabel:
      if (table.label() != nullptr) {
        rows.floats = [&](int64_t row, float* out) {
          const ExampleFeature* cell = BatchTable::Cell(table.label(), row);
          CutOrPad(cell->float_list().value(), column.width, 0.0f, out);
          return OkStatus();
        };
      }
      break;
    case ParseSpec::Kind::kWeight:
      rows.floats = [&, list](int64_t row, float* out) {
        const ExampleFeature* cell = BatchTable::Cell(list, row);
        const float weight = cell == nullptr || cell->float_list().value_size() == 0
                                 ? 1.0f
                                 : cell->float_list().value(0);
        out[0] = weight > 0 ? weight : 1.0f;
        std::fill(out + 1, out + column.width, 0.0f);
        return OkStatus();
      };
      break;
    default:
      break;
  }
  return WriteDenseColumn(ctx, column, i, batch, rows, parallel);
}

Status CollectSparse(const ParseSpec::Column& column, const NamedFeatureList* list, int64_t batch,
                     FeatureRows* rows) {
  const bool shared = list != nullptr && IsShared(*list);
  const int64_t num_rows = shared ? 1 : batch;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (batch > 0) {
      TF_RETURN_IF_ERROR(AppendFids(column.name, BatchTable::Cell(list, row), rows));
    }
    rows->AddRow();
  }
  rows->shared = shared && batch > 0;
  return OkStatus();
}

Status WriteExampleBatch(OpKernelContext* ctx, const ExampleBatch& batch, const ParseSpec& spec,
                         const DeviceRunner& parallel) {
  TF_RETURN_IF_ERROR(CheckBatchSize(batch));
  BatchTable table;
  TF_RETURN_IF_ERROR(table.Add(batch, spec));
  std::vector<LineId> line_ids;
  if (spec.needs_line_id) TF_RETURN_IF_ERROR(table.ParseLineIds(batch.batch_size(), &line_ids));
  for (int64_t i = 0; i < spec.num_columns(); ++i) {
    if (spec.columns[i].kind != ParseSpec::Kind::kSparse) {
      TF_RETURN_IF_ERROR(
          WriteBatchColumn(ctx, table, spec, i, batch.batch_size(), line_ids, parallel));
      continue;
    }
    FeatureRows sparse;
    TF_RETURN_IF_ERROR(
        CollectSparse(spec.columns[i], table.column(i), batch.batch_size(), &sparse));
    TF_RETURN_IF_ERROR(WriteSparseColumn(ctx, i, spec.num_columns() + i, sparse,
                                         sparse.shared ? batch.batch_size() : 0,
                                         /*convert_v1=*/true));
  }
  return OkStatus();
}

// Element 0 of a vector, or the scalar itself, keeping its rank.
Status FirstElement(const Tensor& input, Tensor* first) {
  if (input.dims() > 1 || input.NumElements() == 0) {
    return errors::InvalidArgument("pb_input has shape ", input.shape().DebugString(),
                                   ", want a scalar or a vector with at least one element");
  }
  *first = input.dims() == 1 ? input.Slice(0, 1) : input;
  return OkStatus();
}

template <typename Proto, bool returns_protos>
class ParseExampleOp : public OpKernel {
 public:
  explicit ParseExampleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, spec_.BuildFromAttrs(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    Tensor input = ctx->input(0);
    if constexpr (std::is_same_v<Proto, ExampleBatch>) {
      OP_REQUIRES_OK(ctx, FirstElement(ctx->input(0), &input));
    }
    if (returns_protos) {
      if (input.dtype() == DT_STRING) {
        OP_REQUIRES_OK(ctx, StringsToVariants<Proto>("pb_input", Tensor(input), parallel, &input));
      }
      ctx->set_output(ctx->num_outputs() - 1, input);
    }
    SampleBatch<Proto> batch;
    OP_REQUIRES_OK(ctx, batch.Load("pb_input", input, parallel));
    if constexpr (std::is_same_v<Proto, ExampleBatch>) {
      OP_REQUIRES_OK(ctx, WriteExampleBatch(ctx, batch[0], spec_, parallel));
    } else {
      OP_REQUIRES_OK(ctx, WriteExamples(ctx, batch, spec_, parallel));
    }
  }

 private:
  ParseSpec spec_;
};

#define REGISTER_PARSE_KERNELS(name, Proto)                                             \
  REGISTER_GUARDED_KERNEL(Name(name).Device(DEVICE_CPU), ParseExampleOp<Proto, false>); \
  REGISTER_GUARDED_KERNEL(Name(name "V2").Device(DEVICE_CPU), ParseExampleOp<Proto, true>)

REGISTER_PARSE_KERNELS("ParseExamples", Example);
REGISTER_PARSE_KERNELS("ParseExampleBatch", ExampleBatch);

bool HasAny(const LineId& line_id, const ::google::protobuf::RepeatedField<int32_t>& wanted) {
  const auto& actions = line_id.actions();
  return std::any_of(wanted.begin(), wanted.end(), [&actions](int32_t action) {
    return std::find(actions.begin(), actions.end(), action) != actions.end();
  });
}

class ParseExampleBatchListOp : public OpKernel {
 public:
  explicit ParseExampleBatchListOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, spec_.BuildFromAttrs(ctx));
    std::string label_config;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("label_config", &label_config));
    OP_REQUIRES(ctx, labels_.ParseFromString(label_config),
                errors::InvalidArgument("label_config is not a serialized LabelConf"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("positive_label", &positive_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("negative_label", &negative_));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner parallel(ctx);
    BatchTable table;
    int64_t rows = -1;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      Tensor first;
      OP_REQUIRES_OK(ctx, FirstElement(ctx->input(i), &first));
      const ExampleBatch* batch;
      OP_REQUIRES_OK(ctx, GetSample<ExampleBatch>(first.flat<Variant>()(0), &batch));
      OP_REQUIRES_OK(ctx, CheckBatchSize(*batch));
      OP_REQUIRES(ctx, rows < 0 || rows == batch->batch_size(),
                  errors::InvalidArgument("inputs[", i, "] has ", batch->batch_size(),
                                          " rows, want those of inputs[0]: ", rows));
      rows = batch->batch_size();
      OP_REQUIRES_OK(ctx, table.Add(*batch, spec_));
    }
    std::vector<LineId> line_ids;
    if (spec_.needs_line_id || labels_.conf_size() > 0) {
      OP_REQUIRES_OK(ctx, table.ParseLineIds(rows, &line_ids));
    }
    for (int64_t i = 0; i < spec_.num_columns(); ++i) {
      OP_REQUIRES_OK(ctx, WriteColumn(ctx, table, i, rows, line_ids, parallel));
    }
  }

 private:
  Status WriteColumn(OpKernelContext* ctx, const BatchTable& table, int64_t i, int64_t rows,
                     const std::vector<LineId>& line_ids, const DeviceRunner& parallel) const {
    const ParseSpec::Column& column = spec_.columns[i];
    if (column.kind == ParseSpec::Kind::kLabel && labels_.conf_size() > 0) {
      DenseRow label;
      label.floats = [&](int64_t row, float* out) {
        for (int64_t task = 0; task < column.width; ++task) {
          out[task] = task < labels_.conf_size()
                          ? LabelOf(line_ids[row], labels_.conf(static_cast<int>(task)))
                          : kInvalidLabel;
        }
        return OkStatus();
      };
      return WriteDenseColumn(ctx, column, i, rows, label, parallel);
    }
    if (column.kind != ParseSpec::Kind::kSparse) {
      return WriteBatchColumn(ctx, table, spec_, i, rows, line_ids, parallel);
    }
    return WriteReslotted(ctx, table.column(i), i, rows);
  }

  float LabelOf(const LineId& line_id,
                const ::monolith::native_training::data::config::TaskLabelConf& task) const {
    if (HasAny(line_id, task.pos_actions())) return positive_;
    if (task.neg_actions_size() == 0 || HasAny(line_id, task.neg_actions())) return negative_;
    return kInvalidLabel;
  }

  Status WriteReslotted(OpKernelContext* ctx, const NamedFeatureList* list, int64_t i,
                        int64_t rows) const {
    FeatureRows sparse;
    TF_RETURN_IF_ERROR(CollectSparse(spec_.columns[i], list, rows, &sparse));
    if (list != nullptr && (list->id() < 0 || list->id() >= ::monolith::engine::kMaxSlotsV2)) {
      return errors::InvalidArgument("id of column '", list->name(), "' is ", list->id(),
                                     ", want a slot below ", ::monolith::engine::kMaxSlotsV2);
    }
    std::vector<std::vector<uint64_t>> reslotted;
    reslotted.reserve(sparse.spans.size());
    for (::monolith::data::FidSpan& span : sparse.spans) {
      reslotted.emplace_back(span.fids, span.fids + span.size);
      for (uint64_t& fid : reslotted.back()) fid = ::monolith::engine::MakeFidV2(list->id(), fid);
      span = {reslotted.back().data(), span.size, false};
    }
    return WriteSparseColumn(ctx, i, spec_.num_columns() + i, sparse, sparse.shared ? rows : 0,
                             /*convert_v1=*/true);
  }

  ParseSpec spec_;
  LabelConf labels_;
  float positive_;
  float negative_;
};

REGISTER_GUARDED_KERNEL(Name("ParseExampleBatchList").Device(DEVICE_CPU), ParseExampleBatchListOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
