#include "monolith/serving/native/model/predict.h"

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {

Status ParseTensor(const std::string& alias, const std::string& serialized,
                   const PredictLimits& limits, tensorflow::Tensor* tensor) {
  const auto refuse = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, "input '" + alias + "' " + what);
  };
  tensorflow::TensorProto proto;
  if (!proto.ParseFromString(serialized)) return refuse("is not a TensorProto");
  const tensorflow::DataType type = proto.dtype();
  const int64_t element = tensorflow::DataTypeSize(type);
  // Without a fixed size: only strings are values that can be sent.
  if (element == 0 && type != tensorflow::DT_STRING) {
    return refuse("has type " + std::to_string(static_cast<int>(type)) +
                  ", which cannot be sent to a model");
  }
  tensorflow::TensorShape shape;
  if (proto.tensor_shape().unknown_rank() ||
      !tensorflow::TensorShape::BuildTensorShape(proto.tensor_shape(), &shape).ok()) {
    return refuse("has no valid shape");
  }
  const int64_t bytes = element > 0 ? element : static_cast<int64_t>(sizeof(tensorflow::tstring));
  if (shape.num_elements() > limits.max_tensor_bytes / bytes) {
    return refuse("has shape " + shape.DebugString() + ", more than " +
                  std::to_string(limits.max_tensor_bytes) + " bytes");
  }
  if (!tensor->FromProto(proto)) {
    return refuse("has values that do not fit its type and shape " + shape.DebugString());
  }
  return Status();
}

Status RunDirectly(Servable* servable, const std::string& signature,
                   const Servable::Tensors& inputs, const std::vector<std::string>& output_filter,
                   Servable::Tensors* outputs) {
  return servable->Run(signature, inputs, output_filter, outputs);
}

Status Predict(Servable* servable, const api::PredictRequest& request, const PredictLimits& limits,
               const Runner& runner, api::PredictResponse* response) {
  // Names first: what is missing says more than what is wrong with the rest.
  std::vector<std::string> names;
  for (const auto& [alias, serialized] : request.inputs()) names.push_back(alias);
  const Status named = servable->CheckInputNames(request.model_spec().signature_name(), names);
  if (!named.ok()) return named;
  Servable::Tensors inputs;
  for (const auto& [alias, serialized] : request.inputs()) {
    const Status status = ParseTensor(alias, serialized, limits, &inputs[alias]);
    if (!status.ok()) return status;
  }
  const std::vector<std::string> filter(request.output_filter().begin(),
                                        request.output_filter().end());
  Servable::Tensors outputs;
  const Status status =
      runner(servable, request.model_spec().signature_name(), inputs, filter, &outputs);
  if (!status.ok()) return status;
  for (const auto& [alias, tensor] : outputs) {
    tensorflow::TensorProto proto;
    // As TensorFlow Serving answers: lists of values, which every client can read.
    tensor.AsProtoField(&proto);
    (*response->mutable_outputs())[alias] = proto.SerializeAsString();
  }
  return Status();
}

}  // namespace serving
}  // namespace monolith
