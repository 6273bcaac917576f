#include "monolith/native_training/runtime/ops/data/parquet/parquet_columns.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "monolith/native_training/runtime/base/utf8.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::Reflection;

constexpr int64_t kFirstId = 10000;

// XXX of __XXX__, or empty.
std::string_view ReservedName(std::string_view name) {
  if (name.size() < 5 || name.substr(0, 2) != "__" || name.substr(name.size() - 2) != "__") {
    return "";
  }
  const std::string_view inner = name.substr(2, name.size() - 4);
  const bool is_word = std::all_of(inner.begin(), inner.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
  });
  return is_word ? inner : "";
}

bool IsNumberFeature(const std::string& name) { return name == kLabelName || name == kWeightName; }

std::string IntegerText(int64_t value, bool is_unsigned) {
  return is_unsigned ? std::to_string(static_cast<uint64_t>(value)) : std::to_string(value);
}

std::string OutOfRange(int64_t value, bool is_unsigned) {
  return IntegerText(value, is_unsigned) + " is out of range";
}

// Whether a number of a file, whose bits may be those of an unsigned one, is one of T.
template <typename T>
bool Fits(int64_t value, bool is_unsigned) {
  if (is_unsigned) {
    return static_cast<uint64_t>(value) <= static_cast<uint64_t>(std::numeric_limits<T>::max());
  }
  if constexpr (std::is_signed_v<T>) {
    return value >= std::numeric_limits<T>::min() && value <= std::numeric_limits<T>::max();
  } else {
    return value >= 0 && static_cast<uint64_t>(value) <= std::numeric_limits<T>::max();
  }
}

double ToDouble(int64_t value, bool is_unsigned) {
  return is_unsigned ? static_cast<double>(static_cast<uint64_t>(value))
                     : static_cast<double>(value);
}

// One value of a column.
struct Value {
  const MonolithParquetColumn& column;
  const MonolithParquetValues& values;
  int64_t index;

  bool is_unsigned() const { return column.is_unsigned != 0; }
  int64_t integer() const { return values.integers[index]; }
  double number() const {
    return column.kind == MONOLITH_PARQUET_INTEGER ? ToDouble(integer(), is_unsigned())
                                                   : values.floats[index];
  }
  std::string bytes() const {
    const int64_t* const splits = values.byte_splits;
    return std::string(values.bytes + splits[index],
                       static_cast<size_t>(splits[index + 1] - splits[index]));
  }
};

// Sets or appends a field of LineId. Returns what is wrong, or "".
std::string SetField(const Value& value, const FieldDescriptor* field, LineId* line_id) {
  const Reflection* const reflection = line_id->GetReflection();
  const bool is_repeated = field->is_repeated();
  switch (field->cpp_type()) {
#define MONOLITH_SET_INTEGER(cpp_type, T, Name)                                           \
  case FieldDescriptor::cpp_type:                                                         \
    if (!Fits<T>(value.integer(), value.is_unsigned())) {                                 \
      return OutOfRange(value.integer(), value.is_unsigned());                            \
    }                                                                                     \
    is_repeated ? reflection->Add##Name(line_id, field, static_cast<T>(value.integer()))  \
                : reflection->Set##Name(line_id, field, static_cast<T>(value.integer())); \
    return "";
    MONOLITH_SET_INTEGER(CPPTYPE_INT32, int32_t, Int32)
    MONOLITH_SET_INTEGER(CPPTYPE_INT64, int64_t, Int64)
    MONOLITH_SET_INTEGER(CPPTYPE_UINT32, uint32_t, UInt32)
    MONOLITH_SET_INTEGER(CPPTYPE_ENUM, int32_t, EnumValue)
#undef MONOLITH_SET_INTEGER
    case FieldDescriptor::CPPTYPE_UINT64: {
      // Files keep the bits of an id as a signed number.
      const uint64_t bits = static_cast<uint64_t>(value.integer());
      is_repeated ? reflection->AddUInt64(line_id, field, bits)
                  : reflection->SetUInt64(line_id, field, bits);
      return "";
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      is_repeated ? reflection->AddBool(line_id, field, value.integer() != 0)
                  : reflection->SetBool(line_id, field, value.integer() != 0);
      return "";
    case FieldDescriptor::CPPTYPE_FLOAT: {
      const float number = static_cast<float>(value.number());
      is_repeated ? reflection->AddFloat(line_id, field, number)
                  : reflection->SetFloat(line_id, field, number);
      return "";
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      is_repeated ? reflection->AddDouble(line_id, field, value.number())
                  : reflection->SetDouble(line_id, field, value.number());
      return "";
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string bytes = value.bytes();
      // Parsing the sample would fail.
      if (field->type() == FieldDescriptor::TYPE_STRING &&
          (bytes.size() > INT32_MAX || !monolith::engine::IsUtf8(bytes))) {
        return "the text is not UTF-8";
      }
      is_repeated ? reflection->AddString(line_id, field, std::move(bytes))
                  : reflection->SetString(line_id, field, std::move(bytes));
      return "";
    }
    default:
      return "a LineId field that is a message cannot be a column";
  }
}

}  // namespace

Status ParquetColumns::Init(const std::vector<std::string>& names,
                            const std::vector<std::string>& types) {
  if (names.empty()) {
    return errors::InvalidArgument("select_columns is empty, want the names of columns");
  }
  if (names.size() != types.size()) {
    return errors::InvalidArgument("select_columns has ", names.size(),
                                   " names, select_columns_type has ", types.size(), " types");
  }
  names_ = names;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    Column column;
    column.type_name = types[i];
    if (types[i] == "int") {
      column.type = Type::kInt;
    } else if (types[i] == "fid_v1") {
      column.type = Type::kFidV1;
    } else if (types[i] == "fid_v2") {
      column.type = Type::kFidV2;
    } else if (types[i] == "float") {
      column.type = Type::kFloat;
    } else if (types[i] == "bytes" || types[i] == "string") {
      column.type = Type::kBytes;
    } else {
      return errors::InvalidArgument("select_columns_type[", i, "] is '", types[i],
                                     "', want one of int, fid_v1, fid_v2, float, bytes, string");
    }
    if (std::find(names.begin(), names.begin() + i, name) != names.begin() + i) {
      return errors::InvalidArgument("select_columns has '", name, "' twice");
    }
    const std::string_view reserved = ReservedName(name);
    if (!reserved.empty() && name != kLabelName) {
      const std::string field_name = absl::AsciiStrToLower({reserved.data(), reserved.size()});
      const FieldDescriptor* const field = LineId::descriptor()->FindFieldByName(field_name);
      if (field == nullptr || field->message_type() != nullptr) {
        return errors::InvalidArgument("select_columns[", i, "] is '", name,
                                       "', but LineId has no value '", field_name, "'");
      }
      column.line_id_field = field;
    }
    columns_.push_back(std::move(column));
  }
  return OkStatus();
}

bool ParquetColumns::Accepts(size_t i, int32_t kind) const {
  const bool is_number = kind == MONOLITH_PARQUET_INTEGER || kind == MONOLITH_PARQUET_FLOAT;
  const FieldDescriptor* const field = columns_[i].line_id_field;
  if (field != nullptr) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_FLOAT:
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return is_number;
      case FieldDescriptor::CPPTYPE_STRING:
        return kind == MONOLITH_PARQUET_BYTES;
      default:
        return kind == MONOLITH_PARQUET_INTEGER;
    }
  }
  if (IsNumberFeature(names_[i]) || columns_[i].type == Type::kFloat) return is_number;
  const bool is_bytes = columns_[i].type == Type::kBytes;
  return kind == (is_bytes ? MONOLITH_PARQUET_BYTES : MONOLITH_PARQUET_INTEGER);
}

Status ParquetColumns::CheckFile(const ParquetFile& file) const {
  for (size_t i = 0; i < columns_.size(); ++i) {
    const MonolithParquetColumn found = file.Describe(static_cast<int64_t>(i));
    if (found.count != 1) {
      return errors::InvalidArgument(file.name(), " has ", found.count, " columns '", names_[i],
                                     "', want one; it has: ", file.AllNames());
    }
    const FieldDescriptor* const field = columns_[i].line_id_field;
    if (!Accepts(i, found.kind)) {
      return errors::InvalidArgument(
          "column '", names_[i], "' of ", file.name(), " is ", found.type_name,
          ", which cannot become ",
          field == nullptr ? columns_[i].type_name : "LineId." + std::string(field->name()));
    }
    if (found.is_list && field != nullptr && !field->is_repeated()) {
      return errors::InvalidArgument("column '", names_[i], "' of ", file.name(), " is ",
                                     found.type_name, ", but LineId.", field->name(),
                                     " is one value");
    }
  }
  return OkStatus();
}

Status ParquetColumns::ValueError(const ParquetFile& file, size_t i, int64_t row,
                                  const std::string& text) const {
  return errors::InvalidArgument("row ", row, " of column '", names_[i], "' of ", file.name(), ": ",
                                 text);
}

Status ParquetColumns::FillFeatures(const ParquetFile& file, size_t i, int64_t num_rows,
                                    int64_t first_row, ExampleBatch* batch) const {
  const MonolithParquetColumn column = file.Describe(static_cast<int64_t>(i));
  const MonolithParquetValues values = file.Values(static_cast<int64_t>(i));
  const Type type = IsNumberFeature(names_[i]) ? Type::kFloat : columns_[i].type;
  auto* const features = batch->add_named_feature_list();
  features->set_name(names_[i]);
  features->set_id(static_cast<int32_t>(kFirstId + i));
  features->mutable_feature()->Reserve(static_cast<int>(num_rows));
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t begin = values.row_splits[row];
    const int64_t end = values.row_splits[row + 1];
    ExampleFeature* const feature = features->add_feature();
    // A list is set even if it stays empty: that is a value too.
    switch (type) {
      case Type::kInt: {
        auto* const list = feature->mutable_int64_list()->mutable_value();
        for (int64_t k = begin; k < end; ++k) {
          if (!Fits<int64_t>(values.integers[k], column.is_unsigned != 0)) {
            return ValueError(file, i, first_row + row,
                              OutOfRange(values.integers[k], column.is_unsigned != 0));
          }
          list->Add(values.integers[k]);
        }
        break;
      }
      case Type::kFidV1:
      case Type::kFidV2: {
        // Files keep the bits of an id as a signed number.
        auto* const list = type == Type::kFidV1 ? feature->mutable_fid_v1_list()->mutable_value()
                                                : feature->mutable_fid_v2_list()->mutable_value();
        for (int64_t k = begin; k < end; ++k) {
          list->Add(static_cast<uint64_t>(values.integers[k]));
        }
        break;
      }
      case Type::kFloat: {
        auto* const list = feature->mutable_float_list()->mutable_value();
        for (int64_t k = begin; k < end; ++k) {
          list->Add(static_cast<float>(Value{column, values, k}.number()));
        }
        break;
      }
      case Type::kBytes: {
        auto* const list = feature->mutable_bytes_list()->mutable_value();
        for (int64_t k = begin; k < end; ++k) *list->Add() = Value{column, values, k}.bytes();
        break;
      }
    }
  }
  return OkStatus();
}

Status ParquetColumns::FillLineIds(const ParquetFile& file, size_t i, int64_t first_row,
                                   std::vector<LineId>* line_ids) const {
  const MonolithParquetColumn column = file.Describe(static_cast<int64_t>(i));
  const MonolithParquetValues values = file.Values(static_cast<int64_t>(i));
  for (size_t row = 0; row < line_ids->size(); ++row) {
    for (int64_t k = values.row_splits[row]; k < values.row_splits[row + 1]; ++k) {
      const std::string wrong =
          SetField({column, values, k}, columns_[i].line_id_field, &(*line_ids)[row]);
      if (!wrong.empty()) {
        return ValueError(file, i, first_row + static_cast<int64_t>(row), wrong);
      }
    }
  }
  return OkStatus();
}

Status ParquetColumns::MakeBatch(const ParquetFile& file, int64_t num_rows, int64_t first_row,
                                 ExampleBatch* batch) const {
  batch->Clear();
  batch->set_batch_size(static_cast<int32_t>(num_rows));
  std::vector<LineId> line_ids;
  for (size_t i = 0; i < columns_.size(); ++i) {
    const int64_t null = file.Values(static_cast<int64_t>(i)).first_null;
    if (null >= 0) return ValueError(file, i, first_row + null, "null is not a value");
    if (columns_[i].line_id_field == nullptr) {
      TF_RETURN_IF_ERROR(FillFeatures(file, i, num_rows, first_row, batch));
    } else {
      line_ids.resize(static_cast<size_t>(num_rows));
      TF_RETURN_IF_ERROR(FillLineIds(file, i, first_row, &line_ids));
    }
  }
  if (line_ids.empty()) return OkStatus();
  auto* const features = batch->add_named_feature_list();
  features->set_name(kLineIdName);
  for (const LineId& line_id : line_ids) {
    line_id.SerializeToString(features->add_feature()->mutable_bytes_list()->add_value());
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
