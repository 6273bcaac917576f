#include "monolith/native_training/runtime/ops/data/parse/line_id.h"

#include <algorithm>
#include <type_traits>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::google::protobuf::Reflection;

template <typename T>
T GetElement(const LineId& line_id, const Reflection& reflection, const LineIdField& field, int i) {
  const bool repeated = field.is_repeated();
  if constexpr (std::is_same_v<T, tstring>) {
    return repeated ? reflection.GetRepeatedString(line_id, &field, i)
                    : reflection.GetString(line_id, &field);
  } else {
    switch (field.cpp_type()) {
      case LineIdField::CPPTYPE_INT32:
        return static_cast<T>(repeated ? reflection.GetRepeatedInt32(line_id, &field, i)
                                       : reflection.GetInt32(line_id, &field));
      case LineIdField::CPPTYPE_INT64:
        return static_cast<T>(repeated ? reflection.GetRepeatedInt64(line_id, &field, i)
                                       : reflection.GetInt64(line_id, &field));
      case LineIdField::CPPTYPE_UINT32:
        return static_cast<T>(repeated ? reflection.GetRepeatedUInt32(line_id, &field, i)
                                       : reflection.GetUInt32(line_id, &field));
      case LineIdField::CPPTYPE_UINT64:
        return static_cast<T>(
            static_cast<int64_t>(repeated ? reflection.GetRepeatedUInt64(line_id, &field, i)
                                          : reflection.GetUInt64(line_id, &field)));
      case LineIdField::CPPTYPE_ENUM:
        return static_cast<T>(repeated ? reflection.GetRepeatedEnumValue(line_id, &field, i)
                                       : reflection.GetEnumValue(line_id, &field));
      case LineIdField::CPPTYPE_FLOAT:
        return static_cast<T>(repeated ? reflection.GetRepeatedFloat(line_id, &field, i)
                                       : reflection.GetFloat(line_id, &field));
      case LineIdField::CPPTYPE_DOUBLE:
        return static_cast<T>(repeated ? reflection.GetRepeatedDouble(line_id, &field, i)
                                       : reflection.GetDouble(line_id, &field));
      default:
        return T();
    }
  }
}

}  // namespace

Status FindLineIdField(const std::string& name, const LineIdField** field, DataType* dtype) {
  *field = LineId::descriptor()->FindFieldByName(name);
  if (*field == nullptr) return errors::InvalidArgument(name, " is not in line id, pls check!");
  switch ((*field)->cpp_type()) {
    case LineIdField::CPPTYPE_INT32:
    case LineIdField::CPPTYPE_INT64:
    case LineIdField::CPPTYPE_UINT32:
    case LineIdField::CPPTYPE_UINT64:
    case LineIdField::CPPTYPE_ENUM:
      *dtype = DT_INT64;
      return OkStatus();
    case LineIdField::CPPTYPE_FLOAT:
    case LineIdField::CPPTYPE_DOUBLE:
      *dtype = DT_FLOAT;
      return OkStatus();
    case LineIdField::CPPTYPE_STRING:
      *dtype = DT_STRING;
      return OkStatus();
    default:
      return errors::InvalidArgument("field ", name, " of line id is a ", (*field)->cpp_type_name(),
                                     ", want a number or a string");
  }
}

template <typename T>
void CopyLineIdField(const LineId& line_id, const LineIdField& field, int64_t width, T* out) {
  const Reflection& reflection = *LineId::GetReflection();
  const int64_t size = field.is_repeated() ? reflection.FieldSize(line_id, &field) : 1;
  const int64_t copied = std::min(size, width);
  for (int64_t i = 0; i < copied; ++i) {
    out[i] = GetElement<T>(line_id, reflection, field, static_cast<int>(i));
  }
  std::fill(out + copied, out + width, T());
}

template void CopyLineIdField<int64_t>(const LineId&, const LineIdField&, int64_t, int64_t*);
template void CopyLineIdField<float>(const LineId&, const LineIdField&, int64_t, float*);
template void CopyLineIdField<tstring>(const LineId&, const LineIdField&, int64_t, tstring*);

}  // namespace monolith_tf
}  // namespace tensorflow
