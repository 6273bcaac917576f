#include "monolith/serving/native/rest/json_tensors.h"

#include <cmath>
#include <limits>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "monolith/serving/native/rest/json.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// TensorFlow's own limit is 254; numpy's, which clients use, 32.
constexpr size_t kMaxDimensions = 32;
// An output of this suffix holds bytes, not text.
constexpr std::string_view kBytesSuffix = "_bytes";

Status Invalid(const std::string& text) { return Status(Code::kInvalidArgument, text); }

bool IsBytes(const Json& value) {
  return value.is_object() && value.members.size() == 1 && value.members[0].first == "b64";
}

// Nested lists; those of a column are the rows of different instances.
using Rows = std::vector<const Json*>;

// Follows the first elements down; Fill finds where others differ.
Status FindShape(const std::string& name, const Json* value, std::vector<int64_t>* shape) {
  while (value->is_array()) {
    if (shape->size() >= kMaxDimensions) {
      return Invalid("input '" + name + "' has more than " + std::to_string(kMaxDimensions) +
                     " dimensions");
    }
    shape->push_back(static_cast<int64_t>(value->items.size()));
    if (value->items.empty()) break;
    value = &value->items[0];
  }
  return Status();
}

template <typename T>
bool Convert(const Json& leaf, T* value) {
  if constexpr (std::is_same_v<T, bool>) {
    *value = leaf.boolean;
    return leaf.kind == Json::Kind::kBool;
  } else if constexpr (std::is_same_v<T, tensorflow::tstring>) {
    std::string bytes;
    if (IsBytes(leaf)) {
      const Json& encoded = leaf.members[0].second;
      if (!encoded.is_string() || !DecodeBase64(encoded.text, &bytes)) return false;
    } else if (leaf.is_string()) {
      bytes = leaf.text;
    } else {
      return false;
    }
    *value = bytes;
    return true;
  } else if constexpr (std::is_integral_v<T>) {
    if (leaf.kind == Json::Kind::kUnsigned) {
      *value = static_cast<T>(leaf.unsigned_integer);
      return std::is_same_v<T, uint64_t> || std::is_same_v<T, tensorflow::uint64>;
    }
    if (leaf.kind != Json::Kind::kInteger) return false;
    *value = static_cast<T>(leaf.integer);
    if constexpr (std::is_unsigned_v<T>) {
      return leaf.integer >= 0 &&
             static_cast<uint64_t>(leaf.integer) <= std::numeric_limits<T>::max();
    } else {
      return leaf.integer >= std::numeric_limits<T>::min() &&
             leaf.integer <= std::numeric_limits<T>::max();
    }
  } else {
    if (leaf.kind != Json::Kind::kInteger && leaf.kind != Json::Kind::kUnsigned &&
        leaf.kind != Json::Kind::kFloat) {
      return false;
    }
    *value = static_cast<T>(leaf.number);
    // A number that becomes infinite does not fit.
    return std::isfinite(static_cast<double>(*value));
  }
}

template <typename T>
class Filler {
 public:
  Filler(const std::string& name, tensorflow::Tensor* tensor)
      : name_(name),
        type_(tensorflow::DataTypeString(tensor->dtype())),
        rank_(tensor->dims()),
        shape_(tensor->shape()),
        values_(tensor->flat<T>().data()) {}

  Status Fill(const Json& value, int dimension) {
    if (dimension == rank_) {
      if (value.is_array()) return Invalid("input '" + name_ + "' is ragged");
      if (!Convert(value, &values_[next_++])) {
        return Invalid("input '" + name_ + "' has a value that is no " + type_);
      }
      return Status();
    }
    if (!value.is_array() ||
        static_cast<int64_t>(value.items.size()) != shape_.dim_size(dimension)) {
      return Invalid("input '" + name_ + "' is ragged");
    }
    for (const Json& item : value.items) {
      const Status status = Fill(item, dimension + 1);
      if (!status.ok()) return status;
    }
    return Status();
  }

 private:
  const std::string& name_;
  const std::string type_;
  const int rank_;
  const tensorflow::TensorShape shape_;
  T* const values_;
  int64_t next_ = 0;
};

template <typename T>
Status FillRows(const std::string& name, const Rows& rows, bool stacked,
                tensorflow::Tensor* tensor) {
  Filler<T> filler(name, tensor);
  for (const Json* row : rows) {
    const Status status = filler.Fill(*row, stacked ? 1 : 0);
    if (!status.ok()) return status;
  }
  return Status();
}

// `stacked`: `rows` are slices along a first dimension; else there is one, the whole tensor.
Status MakeTensor(const std::string& name, const Rows& rows, bool stacked,
                  tensorflow::DataType type, const PredictLimits& limits,
                  tensorflow::Tensor* tensor) {
  std::vector<int64_t> dimensions;
  if (stacked) dimensions.push_back(static_cast<int64_t>(rows.size()));
  Status status = FindShape(name, rows[0], &dimensions);
  if (!status.ok()) return status;
  tensorflow::TensorShape shape;
  if (!tensorflow::TensorShape::BuildTensorShape(dimensions, &shape).ok() ||
      shape.num_elements() > limits.max_tensor_bytes / 16) {
    return Invalid("input '" + name + "' is too large");
  }
  switch (type) {
#define MONOLITH_CASE(TYPE)                     \
  case tensorflow::DataTypeToEnum<TYPE>::value: \
    *tensor = tensorflow::Tensor(type, shape);  \
    return FillRows<TYPE>(name, rows, stacked, tensor);
    MONOLITH_CASE(float)
    MONOLITH_CASE(double)
    MONOLITH_CASE(Eigen::half)
    MONOLITH_CASE(tensorflow::bfloat16)
    MONOLITH_CASE(tensorflow::int8)
    MONOLITH_CASE(tensorflow::int16)
    MONOLITH_CASE(tensorflow::int32)
    MONOLITH_CASE(int64_t)
    MONOLITH_CASE(tensorflow::uint8)
    MONOLITH_CASE(tensorflow::uint16)
    MONOLITH_CASE(tensorflow::uint32)
    MONOLITH_CASE(tensorflow::uint64)
    MONOLITH_CASE(bool)
    MONOLITH_CASE(tensorflow::tstring)
#undef MONOLITH_CASE
    default:
      return Invalid("input '" + name + "' is " + tensorflow::DataTypeString(type) +
                     ", which JSON cannot hold");
  }
}

Status OnlyInput(const tensorflow::SignatureDef& signature, std::string* name) {
  if (signature.inputs_size() == 1) {
    *name = signature.inputs().begin()->first;
    return Status();
  }
  std::map<std::string, int> sorted;
  for (const auto& [alias, info] : signature.inputs()) sorted[alias] = 0;
  std::string names;
  for (const auto& [alias, unused] : sorted) names += (names.empty() ? "'" : ", '") + alias + "'";
  return Invalid("the signature takes [" + names + "]: name them, as keys of an object");
}

// Turns a list of examples into rows per input.
Status Columns(const Json& instances, const tensorflow::SignatureDef& signature,
               std::map<std::string, Rows>* columns) {
  const Json& first = instances.items[0];
  if (!first.is_object() || IsBytes(first)) {
    std::string name;
    const Status status = OnlyInput(signature, &name);
    if (!status.ok()) return status;
    for (const Json& instance : instances.items) (*columns)[name].push_back(&instance);
    return Status();
  }
  for (const auto& [key, value] : first.members) (*columns)[key];
  int64_t number = 0;
  for (const Json& instance : instances.items) {
    bool fits = instance.is_object() && instance.members.size() == columns->size();
    if (fits) {
      for (const auto& [key, value] : instance.members) {
        const auto column = columns->find(key);
        fits = fits && column != columns->end();
        if (fits) column->second.push_back(&value);
      }
    }
    if (!fits) {
      return Invalid("instance " + std::to_string(number) +
                     " is not an object with the keys of the first");
    }
    ++number;
  }
  return Status();
}

Status ParseDocument(std::string_view body, Json* document) {
  const Status status = ParseJson(body, document);
  if (!status.ok()) return status;
  if (!document->is_object()) return Invalid("the body is not a JSON object");
  for (const auto& [key, value] : document->members) {
    if (key != "signature_name" && key != "instances" && key != "inputs") {
      return Invalid("unknown key '" + key.substr(0, 100) +
                     "', want some of ['inputs', 'instances', 'signature_name']");
    }
  }
  if ((document->Find("instances") == nullptr) == (document->Find("inputs") == nullptr)) {
    return Invalid("want either instances or inputs");
  }
  return Status();
}

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
    if (!as_bytes_ && IsUtf8(bytes)) return AppendJsonString(bytes, body_);
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

Status ParseJsonRequest(std::string_view body, const Servable& servable,
                        const PredictLimits& limits, JsonRequest* request) {
  Json document;
  Status status = ParseDocument(body, &document);
  if (!status.ok()) return status;
  if (const Json* name = document.Find("signature_name")) {
    if (!name->is_string()) return Invalid("signature_name is not a string");
    request->signature_name = name->text;
  }
  const tensorflow::SignatureDef* signature = nullptr;
  status = servable.FindSignature(request->signature_name, &signature);
  if (!status.ok()) return status;
  std::map<std::string, Rows> columns;
  const bool stacked = document.Find("instances") != nullptr;
  if (stacked) {
    const Json& instances = *document.Find("instances");
    if (!instances.is_array() || instances.items.empty()) {
      return Invalid("instances is not a list with elements");
    }
    request->rows = static_cast<int64_t>(instances.items.size());
    status = Columns(instances, *signature, &columns);
  } else {
    const Json& inputs = *document.Find("inputs");
    if (inputs.is_object() && !IsBytes(inputs)) {
      for (const auto& [key, value] : inputs.members) columns[key] = {&value};
    } else {
      std::string name;
      status = OnlyInput(*signature, &name);
      if (status.ok()) columns[name] = {&inputs};
    }
  }
  if (!status.ok()) return status;
  for (const auto& [name, rows] : columns) {
    const auto info = signature->inputs().find(name);
    tensorflow::Tensor& tensor = request->inputs[name];
    // Servable::Run names inputs that do not exist.
    if (info == signature->inputs().end()) continue;
    status = MakeTensor(name, rows, stacked, info->second.dtype(), limits, &tensor);
    if (!status.ok()) return status;
  }
  return Status();
}

Status WriteJsonAnswer(const JsonRequest& request, const Servable::Tensors& outputs,
                       std::string* body) {
  const bool by_row = request.rows >= 0;
  for (const auto& [name, tensor] : outputs) {
    if (by_row && (tensor.dims() == 0 || tensor.dim_size(0) != request.rows)) {
      return Invalid("output '" + name + "' has shape " + tensor.shape().DebugString() + " for " +
                     std::to_string(request.rows) + " instances: send inputs instead of instances");
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

Status WriteJsonMetadata(const std::string& model, int64_t version, const Servable& servable,
                         std::string* body) {
  *body = "{\"model_spec\": {\"name\": ";
  AppendJsonString(model, body);
  *body += ", \"signature_name\": \"\", \"version\": \"" + std::to_string(version) +
           "\"}, \"metadata\": {\"signature_def\": {\"signature_def\": {";
  bool first = true;
  for (const std::string& name : servable.signature_names()) {
    const tensorflow::SignatureDef* signature = nullptr;
    const Status status = servable.FindSignature(name, &signature);
    if (!status.ok()) return status;
    if (!first) *body += ", ";
    first = false;
    AppendJsonString(name, body);
    *body += ": {\"inputs\": ";
    WriteTensorInfos(signature->inputs(), body);
    *body += ", \"outputs\": ";
    WriteTensorInfos(signature->outputs(), body);
    *body += ", \"method_name\": ";
    AppendJsonString(signature->method_name(), body);
    *body += "}";
  }
  *body += "}}}}";
  return Status();
}

}  // namespace serving
}  // namespace monolith
