#include "monolith/serving/native/rest/json_tensors.h"

#include <map>
#include <string_view>
#include <utility>

#include "monolith/native_training/runtime/base/utf8.h"
#include "monolith/serving/native/rest/json.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// An output of this suffix holds bytes, not text.
constexpr std::string_view kBytesSuffix = "_bytes";

class ValueWriter {
 public:
  ValueWriter(const std::string& name, const tensorflow::Tensor& tensor, std::string* body)
      : as_bytes_(
            name.size() >= kBytesSuffix.size() &&
            name.compare(name.size() - kBytesSuffix.size(), std::string::npos, kBytesSuffix) == 0),
        tensor_(tensor),
        body_(body) {}

  // Writes what lies below `dimension`, from element `start` on; `size` elements.
  Status Write(int dimension, int64_t start, int64_t size) {
    if (dimension == tensor_.dims()) return WriteElement(start);
    const int64_t count = tensor_.dim_size(dimension);
    *body_ += "[ ";
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0) *body_ += ", ";
      const Status status = Write(dimension + 1, start + i * (size / count), size / count);
      if (!status.ok()) return status;
    }
    *body_ += " ]";
    return Status();
  }

 private:
  Status WriteElement(int64_t i) {
    switch (tensor_.dtype()) {
      case tensorflow::DT_FLOAT:
        *body_ += JsonNumber(tensor_.flat<float>()(i));
        return Status();
      case tensorflow::DT_DOUBLE:
        *body_ += JsonNumber(tensor_.flat<double>()(i));
        return Status();
      case tensorflow::DT_HALF:
        *body_ += JsonNumber(static_cast<float>(tensor_.flat<Eigen::half>()(i)));
        return Status();
      case tensorflow::DT_BFLOAT16:
        *body_ += JsonNumber(static_cast<float>(tensor_.flat<tensorflow::bfloat16>()(i)));
        return Status();
      case tensorflow::DT_BOOL:
        *body_ += tensor_.flat<bool>()(i) ? "true" : "false";
        return Status();
      case tensorflow::DT_STRING:
        WriteString(tensor_.flat<tensorflow::tstring>()(i));
        return Status();
#define MONOLITH_CASE(TYPE)                            \
  case tensorflow::DataTypeToEnum<TYPE>::value:        \
    *body_ += std::to_string(tensor_.flat<TYPE>()(i)); \
    return Status();
        MONOLITH_CASE(tensorflow::int8)
        MONOLITH_CASE(tensorflow::int16)
        MONOLITH_CASE(tensorflow::int32)
        MONOLITH_CASE(int64_t)
        MONOLITH_CASE(tensorflow::uint8)
        MONOLITH_CASE(tensorflow::uint16)
        MONOLITH_CASE(tensorflow::uint32)
        MONOLITH_CASE(tensorflow::uint64)
#undef MONOLITH_CASE
      default:
        return Status(Code::kUnimplemented, "an output is " +
                                                tensorflow::DataTypeString(tensor_.dtype()) +
                                                ", which JSON cannot hold");
    }
  }

  void WriteString(const tensorflow::tstring& value) {
    const std::string_view bytes(value.data(), value.size());
    if (!as_bytes_ && engine::IsUtf8(bytes)) return AppendJsonString(bytes, body_);
    *body_ += "{\"b64\": \"" + EncodeBase64(bytes) + "\"}";
  }

  const bool as_bytes_;
  const tensorflow::Tensor& tensor_;
  std::string* const body_;
};

void WriteTensorInfos(const tensorflow::protobuf::Map<std::string, tensorflow::TensorInfo>& infos,
                      std::string* body) {
  const std::map<std::string, tensorflow::TensorInfo> sorted(infos.begin(), infos.end());
  bool first = true;
  *body += "{";
  for (const auto& [alias, info] : sorted) {
    if (!first) *body += ", ";
    first = false;
    AppendJsonString(alias, body);
    *body += ": {\"dtype\": ";
    AppendJsonString(tensorflow::DataType_Name(info.dtype()), body);
    *body += ", \"tensor_shape\": {\"dim\": [";
    for (int i = 0; i < info.tensor_shape().dim_size(); ++i) {
      const auto& dim = info.tensor_shape().dim(i);
      *body += (i > 0 ? ", {\"size\": \"" : "{\"size\": \"") + std::to_string(dim.size()) +
               "\", \"name\": ";
      AppendJsonString(dim.name(), body);
      *body += "}";
    }
    *body += std::string("], \"unknown_rank\": ") +
             (info.tensor_shape().unknown_rank() ? "true" : "false") + "}, \"name\": ";
    AppendJsonString(info.name(), body);
    *body += "}";
  }
  *body += "}";
}

}  // namespace

Status WriteJsonAnswer(const JsonRequest& request, const Servable::Tensors& outputs,
                       std::string* body) {
  const bool by_row = request.rows >= 0;
  for (const auto& [name, tensor] : outputs) {
    if (by_row && (tensor.dims() == 0 || tensor.dim_size(0) != request.rows)) {
      return Status(Code::kInvalidArgument, "output '" + name + "' has shape " +
                                                tensor.shape().DebugString() + " for " +
                                                std::to_string(request.rows) +
                                                " instances: send inputs instead of instances");
    }
  }
  *body = by_row ? "{ \"predictions\": " : "{ \"outputs\": ";
  Status status;
  if (outputs.size() == 1) {
    const auto& [name, tensor] = *outputs.begin();
    status = ValueWriter(name, tensor, body).Write(0, 0, tensor.NumElements());
  } else if (by_row) {
    *body += '[';
    for (int64_t row = 0; row < request.rows && status.ok(); ++row) {
      *body += row > 0 ? ", {" : "{";
      bool first = true;
      for (const auto& [name, tensor] : outputs) {
        if (!first) *body += ", ";
        first = false;
        AppendJsonString(name, body);
        *body += ": ";
        const int64_t size = tensor.NumElements() / request.rows;
        if (status.ok()) status = ValueWriter(name, tensor, body).Write(1, row * size, size);
      }
      *body += '}';
    }
    *body += ']';
  } else {
    *body += '{';
    bool first = true;
    for (const auto& [name, tensor] : outputs) {
      if (!first) *body += ", ";
      first = false;
      AppendJsonString(name, body);
      *body += ": ";
      if (status.ok()) status = ValueWriter(name, tensor, body).Write(0, 0, tensor.NumElements());
    }
    *body += '}';
  }
  *body += " }\n";
  return status;
}

void WriteJsonMetadata(const std::string& model, int64_t version, const Servable& servable,
                       std::string* body) {
  *body = "{\"model_spec\": {\"name\": ";
  AppendJsonString(model, body);
  *body += ", \"signature_name\": \"\", \"version\": \"" + std::to_string(version) +
           "\"}, \"metadata\": {\"signature_def\": {\"signature_def\": {";
  bool first = true;
  for (const auto& [name, signature] : servable.signatures()) {
    const tensorflow::SignatureDef& definition = signature.definition();
    if (!first) *body += ", ";
    first = false;
    AppendJsonString(name, body);
    *body += ": {\"inputs\": ";
    WriteTensorInfos(definition.inputs(), body);
    *body += ", \"outputs\": ";
    WriteTensorInfos(definition.outputs(), body);
    *body += ", \"method_name\": ";
    AppendJsonString(definition.method_name(), body);
    *body += "}";
  }
  *body += "}}}}";
}

}  // namespace serving
}  // namespace monolith
