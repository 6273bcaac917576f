#include "monolith/native_training/runtime/ops/data/parse/instance_table.h"

#include <algorithm>
#include <utility>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/quantized_floats.h"
#include "monolith/native_training/runtime/ops/data/parse/example_columns.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::data::FeatureRows;

InstanceTable::InstanceTable(const SampleBatch<Instance>& batch, const InstanceColumns& columns,
                             const DeviceRunner& parallel)
    : batch_(batch),
      num_names_(static_cast<int64_t>(columns.names.size())),
      num_slots_(static_cast<int64_t>(columns.fidv1_slots.size())),
      cells_(static_cast<size_t>(batch.size() * num_names_)),
      fids_(static_cast<size_t>(batch.size() * num_slots_)) {
  absl::flat_hash_map<absl::string_view, int64_t> names;
  for (int64_t i = 0; i < num_names_; ++i) names[columns.names[i]] = i;
  std::vector<int64_t> slots(::monolith::engine::kMaxSlotsV1, -1);
  for (int64_t i = 0; i < num_slots_; ++i) slots[columns.fidv1_slots[i]] = i;
  parallel.For(batch.size(), kIndexCycles, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (num_slots_ > 0) {
        for (uint64_t fid : batch_[row].fid()) {
          const int64_t slot = slots[::monolith::engine::SlotOfV1(fid)];
          if (slot >= 0) fids_[row * num_slots_ + slot].push_back(fid);
        }
      }
      for (const InstanceFeature& feature : batch_[row].feature()) {
        const auto it = names.find(feature.name());
        if (it != names.end()) cells_[row * num_names_ + it->second] = &feature;
      }
    }
  });
}

FeatureRows InstanceTable::FidV1Rows(int64_t i) const {
  FeatureRows rows;
  for (int64_t row = 0; row < batch_.size(); ++row) {
    const std::vector<uint64_t>& fids = fids_[row * num_slots_ + i];
    rows.spans.push_back({fids.data(), static_cast<int64_t>(fids.size()), true});
    rows.AddRow();
  }
  return rows;
}

FeatureRows InstanceTable::FidV2Rows(int64_t i) const {
  FeatureRows rows;
  for (int64_t row = 0; row < batch_.size(); ++row) {
    const InstanceFeature* feature = cell(i, row);
    if (feature != nullptr) {
      rows.spans.push_back({feature->fid().data(), feature->fid_size(), false});
      for (const auto& list : feature->fid_list()) {
        rows.spans.push_back({list.value().data(), list.value_size(), false});
      }
    }
    rows.AddRow();
  }
  return rows;
}

Status CheckSlots(const std::vector<int64_t>& slots) {
  for (int64_t slot : slots) {
    if (slot < 0 || slot >= ::monolith::engine::kMaxSlotsV1) {
      return errors::InvalidArgument("fidv1_features has slot ", slot, ", want 0 to ",
                                     ::monolith::engine::kMaxSlotsV1 - 1);
    }
  }
  std::vector<int64_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return OkStatus();
  return errors::InvalidArgument("fidv1_features has slot ", *twice, " twice");
}

namespace {

template <typename List, typename T>
void CopyExactly(const List& values, int64_t width, T* out) {
  if (values.size() == width) {
    std::copy(values.begin(), values.end(), out);
  } else {
    std::fill(out, out + width, T());
  }
}

}  // namespace

DenseRow InstanceDenseRow(const InstanceTable& table, int64_t i, int64_t width) {
  DenseRow rows;
  rows.floats = [&table, i, width](int64_t row, float* out) {
    const InstanceFeature* feature = table.cell(i, row);
    if (feature != nullptr && feature->bytes_value_size() == 1 &&
        ::monolith::data::Dequantize(feature->bytes_value(0), width, out)) {
      return OkStatus();
    }
    CopyExactly((feature == nullptr ? InstanceFeature::default_instance() : *feature).float_value(),
                width, out);
    return OkStatus();
  };
  rows.ints = [&table, i, width](int64_t row, int64_t* out) {
    const InstanceFeature* feature = table.cell(i, row);
    CopyExactly((feature == nullptr ? InstanceFeature::default_instance() : *feature).int64_value(),
                width, out);
    return OkStatus();
  };
  rows.strings = [&table, i, width](int64_t row, tstring* out) {
    const InstanceFeature* feature = table.cell(i, row);
    CopyExactly((feature == nullptr ? InstanceFeature::default_instance() : *feature).bytes_value(),
                width, out);
    return OkStatus();
  };
  return rows;
}

DenseRow InstanceLabelRow(const SampleBatch<Instance>& batch, int64_t width) {
  DenseRow rows;
  rows.floats = [&batch, width](int64_t row, float* out) {
    CutOrPad(batch[row].label(), width, 0.0f, out);
    return OkStatus();
  };
  return rows;
}

DenseRow InstanceWeightRow(const SampleBatch<Instance>& batch, int64_t width) {
  DenseRow rows;
  rows.floats = [&batch, width](int64_t row, float* out) {
    out[0] = batch[row].has_instance_weight() ? batch[row].instance_weight() : 1.0f;
    std::fill(out + 1, out + width, 0.0f);
    return OkStatus();
  };
  return rows;
}

Status ResolveMiscColumn(ParseSpec::Column* column) {
  DataType dtype = DT_FLOAT;
  if (column->name == "label") {
    column->kind = ParseSpec::Kind::kLabel;
  } else if (column->name == kWeightName) {
    column->kind = ParseSpec::Kind::kWeight;
  } else {
    column->kind = ParseSpec::Kind::kLineId;
    TF_RETURN_IF_ERROR(FindLineIdField(column->name, &column->field, &dtype));
  }
  if (dtype == column->dtype) return OkStatus();
  return errors::InvalidArgument("misc feature '", column->name, "' is requested as ",
                                 DataTypeString(column->dtype), ", but is ", DataTypeString(dtype));
}

Status WriteMiscColumn(OpKernelContext* ctx, const ParseSpec::Column& column, int64_t output,
                       const SampleBatch<Instance>& batch, const DeviceRunner& parallel) {
  switch (column.kind) {
    case ParseSpec::Kind::kLabel:
      return WriteDenseColumn(ctx, column, output, batch.size(),
                              InstanceLabelRow(batch, column.width), parallel);
    case ParseSpec::Kind::kWeight:
      return WriteDenseColumn(ctx, column, output, batch.size(),
                              InstanceWeightRow(batch, column.width), parallel);
    default:
      return WriteLineIdColumn(
          ctx, column, output, batch.size(),
          [&batch](int64_t row) -> const LineId& { return batch[row].line_id(); }, parallel);
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow
