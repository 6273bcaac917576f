#include "monolith/native_training/runtime/ops/data/parse/conversions.h"

#include <string>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/base/feature_id.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::io::proto::NamedFeature;
using ::monolith::io::proto::NamedFeatureList;

bool IsReserved(const std::string& name) {
  return name == kLineIdName || name == kLabelName || name == kWeightName;
}

template <typename From, typename To>
void CopyLists(const From& from, To* to) {
  for (const auto& list : from) *to->add_list()->mutable_value() = list.value();
}

// The first non-empty field decides the type.
void ConvertFeature(const InstanceFeature& from, ExampleFeature* to) {
  if (from.fid_size() > 0) {
    *to->mutable_fid_v2_list()->mutable_value() = from.fid();
  } else if (from.float_value_size() > 0) {
    *to->mutable_float_list()->mutable_value() = from.float_value();
  } else if (from.int64_value_size() > 0) {
    *to->mutable_int64_list()->mutable_value() = from.int64_value();
  } else if (from.bytes_value_size() > 0) {
    *to->mutable_bytes_list()->mutable_value() = from.bytes_value();
  } else if (from.fid_list_size() > 0) {
    CopyLists(from.fid_list(), to->mutable_fid_v2_lists());
  } else if (from.float_list_size() > 0) {
    CopyLists(from.float_list(), to->mutable_float_lists());
  } else if (from.int64_list_size() > 0) {
    CopyLists(from.int64_list(), to->mutable_int64_lists());
  } else if (from.bytes_list_size() > 0) {
    CopyLists(from.bytes_list(), to->mutable_bytes_lists());
  }
}

// Adds a column, or v1 ids, to the Instance.
void AddColumn(const NamedFeature& named, Instance* instance) {
  const ExampleFeature& from = named.feature();
  const auto column = [&named, instance]() {
    InstanceFeature* to = instance->add_feature();
    to->set_name(named.name());
    return to;
  };
  switch (from.type_case()) {
    case ExampleFeature::kFidV1List:
      instance->mutable_fid()->MergeFrom(from.fid_v1_list().value());
      break;
    case ExampleFeature::kFidV1Lists:
      for (const auto& list : from.fid_v1_lists().list()) {
        instance->mutable_fid()->MergeFrom(list.value());
      }
      break;
    case ExampleFeature::kFidV2List:
      *column()->mutable_fid() = from.fid_v2_list().value();
      break;
    case ExampleFeature::kFloatList:
      *column()->mutable_float_value() = from.float_list().value();
      break;
    case ExampleFeature::kInt64List:
      *column()->mutable_int64_value() = from.int64_list().value();
      break;
    case ExampleFeature::kBytesList:
      *column()->mutable_bytes_value() = from.bytes_list().value();
      break;
    case ExampleFeature::kFidV2Lists: {
      InstanceFeature* to = column();
      for (const auto& list : from.fid_v2_lists().list()) {
        *to->add_fid_list()->mutable_value() = list.value();
      }
      break;
    }
    case ExampleFeature::kFloatLists: {
      InstanceFeature* to = column();
      for (const auto& list : from.float_lists().list()) {
        *to->add_float_list()->mutable_value() = list.value();
      }
      break;
    }
    case ExampleFeature::kInt64Lists: {
      InstanceFeature* to = column();
      for (const auto& list : from.int64_lists().list()) {
        *to->add_int64_list()->mutable_value() = list.value();
      }
      break;
    }
    case ExampleFeature::kBytesLists: {
      InstanceFeature* to = column();
      for (const auto& list : from.bytes_lists().list()) {
        *to->add_bytes_list()->mutable_value() = list.value();
      }
      break;
    }
    case ExampleFeature::kInt64Value:
      column()->add_int64_value(from.int64_value());
      break;
    case ExampleFeature::kFloatValue:
      column()->add_float_value(from.float_value());
      break;
    case ExampleFeature::kBytesValue:
      column()->add_bytes_value(from.bytes_value());
      break;
    default:  // Instance has no doubles
      break;
  }
}

// Fills a field from a reserved feature. Proto is Example or Instance.
template <typename Proto>
Status FillReserved(const std::string& name, const ExampleFeature& feature, Proto* proto) {
  if (name == kLineIdName) {
    if (feature.bytes_list().value_size() > 0 &&
        !proto->mutable_line_id()->ParseFromString(feature.bytes_list().value(0))) {
      return errors::InvalidArgument("Failed to parse the LineId in feature ", kLineIdName);
    }
  } else if (name == kLabelName) {
    *proto->mutable_label() = feature.float_list().value();
  } else {
    const auto& list = feature.float_list();
    proto->set_instance_weight(list.value_size() > 0 ? list.value(0) : 1.0f);
  }
  return OkStatus();
}

}  // namespace

Example InstanceToExample(const Instance& instance) {
  Example example;
  if (instance.has_line_id()) *example.mutable_line_id() = instance.line_id();
  *example.mutable_label() = instance.label();
  example.set_instance_weight(instance.has_instance_weight() ? instance.instance_weight() : 1.0f);
  example.set_data_source_key(instance.data_source_key());
  const auto add = [&example](const std::string& name) {
    NamedFeature* named = example.add_named_feature();
    named->set_name(name);
    named->set_id(example.named_feature_size() - 1);
    return named;
  };
  if (instance.value_size() > 0) {
    *add("value")->mutable_feature()->mutable_float_list()->mutable_value() = instance.value();
  }
  absl::flat_hash_map<int64_t, int> position;
  for (uint64_t fid : instance.fid()) {
    const int64_t slot = ::monolith::engine::SlotOfV1(fid);
    const auto [it, is_new] = position.emplace(slot, example.named_feature_size());
    if (is_new) add("fc_slot_" + std::to_string(slot));
    example.mutable_named_feature(it->second)
        ->mutable_feature()
        ->mutable_fid_v1_list()
        ->add_value(fid);
  }
  for (const InstanceFeature& feature : instance.feature()) {
    ConvertFeature(feature, add(feature.name())->mutable_feature());
  }
  return example;
}

Status ExampleToInstance(const Example& example, Instance* instance) {
  if (example.has_line_id()) *instance->mutable_line_id() = example.line_id();
  *instance->mutable_label() = example.label();
  if (example.instance_weight() > 0) instance->set_instance_weight(example.instance_weight());
  instance->set_data_source_key(example.data_source_key());
  for (const NamedFeature& named : example.named_feature()) {
    if (IsReserved(named.name())) {
      TF_RETURN_IF_ERROR(FillReserved(named.name(), named.feature(), instance));
    } else {
      AddColumn(named, instance);
    }
  }
  return OkStatus();
}

Status ExampleBatchRow(const ExampleBatch& batch, int64_t row, Example* example) {
  example->set_data_source_key(batch.data_source_key());
  for (const NamedFeatureList& column : batch.named_feature_list()) {
    TF_RETURN_IF_ERROR(CheckColumn(batch, column));
    const ExampleFeature& feature = column.feature(IsShared(column) ? 0 : static_cast<int>(row));
    if (IsReserved(column.name())) {
      TF_RETURN_IF_ERROR(FillReserved(column.name(), feature, example));
      continue;
    }
    NamedFeature* named = example->add_named_feature();
    named->set_name(column.name());
    named->set_id(column.id());
    *named->mutable_feature() = feature;
  }
  return OkStatus();
}

void Prune(Pruning pruning, Example* example) {
  if (pruning == Pruning::kFeature) example->clear_named_feature();
  if (pruning == Pruning::kRawFeature) example->clear_named_raw_feature();
}

void Prune(Pruning pruning, ExampleBatch* batch) {
  if (pruning == Pruning::kRawFeature) batch->clear_named_raw_feature_list();
  if (pruning != Pruning::kFeature) return;
  auto* columns = batch->mutable_named_feature_list();
  int kept = 0;
  for (int i = 0; i < columns->size(); ++i) {
    if (IsReserved(columns->Get(i).name())) columns->SwapElements(kept++, i);
  }
  columns->DeleteSubrange(kept, columns->size() - kept);
}

}  // namespace monolith_tf
}  // namespace tensorflow
