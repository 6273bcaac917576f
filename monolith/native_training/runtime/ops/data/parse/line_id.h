// Columns of a tensor filled from fields of LineId, which are addressed by name.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_LINE_ID_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_LINE_ID_H_

#include <cstdint>
#include <string>

#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/framework/types.h"

namespace tensorflow {
namespace monolith_tf {

using LineIdField = ::google::protobuf::FieldDescriptor;

// The field and the dtype of its column: int64 for integers (unsigned ones reinterpreted), float
// for floating point, string. InvalidArgument: there is no such field, or it is a bool or a
// message.
Status FindLineIdField(const std::string& name, const LineIdField** field, DataType* dtype);

// Writes `width` values of one row: a scalar into column 0, a repeated field cut or padded with 0.
// T is int64_t, float or tstring, as FindLineIdField says.
template <typename T>
void CopyLineIdField(const LineId& line_id, const LineIdField& field, int64_t width, T* out);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_LINE_ID_H_
