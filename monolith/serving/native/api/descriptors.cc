#include "monolith/serving/native/api/descriptors.h"

#include <map>
#include <utility>

#include "google/protobuf/any.pb.h"
#include "google/protobuf/descriptor.pb.h"
#include "google/protobuf/wrappers.pb.h"
#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/base/tensorflow_versions.h"
#include "monolith/serving/native/reflection.pb.h"
#include "monolith/serving/native/serving_api.pb.h"
#include "tensorflow/core/example/example.pb.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

namespace pb = google::protobuf;

// One of our types, or a field "Message.field" -> the type that clients see.
using Types = std::map<std::string, std::string>;

struct Method {
  const char* name;
  const char* input;
  const char* output;
  bool client_streams = false;
  bool server_streams = false;
};

struct Service {
  const char* name;
  std::vector<Method> methods;
};

// A file of another package, made of messages of one of our files.
struct File {
  const char* name;
  const char* package;
  const pb::FileDescriptor* source;
  std::vector<std::string> messages;
  Types types;
  std::vector<const pb::FileDescriptor*> imports;
  std::vector<Service> services;
};

const char kVersionPolicy[] = "FileSystemStoragePathSourceConfig.ServableVersionPolicy";

void Rename(const File& file, const std::string& scope, pb::DescriptorProto* message) {
  const std::string name = scope + message->name();
  for (pb::FieldDescriptorProto& field : *message->mutable_field()) {
    const auto own = file.types.find(name + "." + field.name());
    if (own != file.types.end()) {
      const bool is_enum = own->second == ".tensorflow.error.Code";
      field.set_type(is_enum ? pb::FieldDescriptorProto::TYPE_ENUM
                             : pb::FieldDescriptorProto::TYPE_MESSAGE);
      field.set_type_name(own->second);
      continue;
    }
    if (!field.has_type_name()) continue;
    // "." package "." name
    const std::string type = field.type_name().substr(file.source->package().size() + 2);
    const auto other = file.types.find(type);
    field.set_type_name(other != file.types.end() ? other->second
                                                  : "." + std::string(file.package) + "." + type);
  }
  for (pb::DescriptorProto& nested : *message->mutable_nested_type()) {
    Rename(file, name + ".", &nested);
  }
}

pb::FileDescriptorProto Describe(const File& file) {
  pb::FileDescriptorProto described;
  described.set_name(file.name);
  described.set_package(file.package);
  described.set_syntax("proto3");
  for (const pb::FileDescriptor* import : file.imports) described.add_dependency(import->name());
  for (const std::string& name : file.messages) {
    pb::DescriptorProto* message = described.add_message_type();
    file.source->FindMessageTypeByName(name)->CopyTo(message);
    Rename(file, "", message);
  }
  for (const Service& service : file.services) {
    pb::ServiceDescriptorProto* target = described.add_service();
    target->set_name(service.name);
    for (const Method& method : service.methods) {
      pb::MethodDescriptorProto* added = target->add_method();
      added->set_name(method.name);
      added->set_input_type("." + std::string(file.package) + "." + method.input);
      added->set_output_type("." + std::string(file.package) + "." + method.output);
      if (method.client_streams) added->set_client_streaming(true);
      if (method.server_streams) added->set_server_streaming(true);
    }
  }
  return described;
}

pb::FileDescriptorProto DescribeServing() {
  const pb::FileDescriptor* source = api::PredictRequest::descriptor()->file();
  pb::FileDescriptorProto described = Describe(
      {"monolith/serving/native/tensorflow_serving.proto",
       "tensorflow.serving",
       source,
       {"ModelSpec",
        "PredictRequest",
        "PredictResponse",
        "StatusProto",
        "GetModelStatusRequest",
        "ModelVersionStatus",
        "GetModelStatusResponse",
        "SignatureDefMap",
        "GetModelMetadataRequest",
        "GetModelMetadataResponse",
        "ModelConfig",
        "ModelConfigList",
        "ModelServerConfig",
        "ReloadConfigRequest",
        "ReloadConfigResponse",
        "ExampleList",
        "ExampleListWithContext",
        "Input",
        "ClassificationRequest",
        "Class",
        "Classifications",
        "ClassificationResult",
        "ClassificationResponse",
        "RegressionRequest",
        "Regression",
        "RegressionResult",
        "RegressionResponse",
        "InferenceTask",
        "InferenceResult",
        "MultiInferenceRequest",
        "MultiInferenceResponse"},
       {{"AnyMessage", ".google.protobuf.Any"},
        {"ModelSpec.Version", ".google.protobuf.Int64Value"},
        {"VersionPolicy", std::string(".tensorflow.serving.") + kVersionPolicy},
        {"PredictRequest.InputsEntry.value", ".tensorflow.TensorProto"},
        {"PredictResponse.OutputsEntry.value", ".tensorflow.TensorProto"},
        {"SignatureDefMap.SignatureDefEntry.value", ".tensorflow.SignatureDef"},
        {"ExampleList.examples", ".tensorflow.Example"},
        {"ExampleListWithContext.examples", ".tensorflow.Example"},
        {"ExampleListWithContext.context", ".tensorflow.Example"},
        {"ClassificationRequest.input", ".tensorflow.serving.Input"},
        {"RegressionRequest.input", ".tensorflow.serving.Input"},
        {"MultiInferenceRequest.input", ".tensorflow.serving.Input"},
        {"StatusProto.error_code", ".tensorflow.error.Code"}},
       {pb::Any::descriptor()->file(), pb::Int64Value::descriptor()->file(),
        tensorflow::Example::descriptor()->file(), tensorflow::TensorProto::descriptor()->file(),
        tensorflow::SignatureDef::descriptor()->file(),
        tensorflow::error::Code_descriptor()->file()},
       {{"PredictionService",
         {{"Predict", "PredictRequest", "PredictResponse"},
          {"Classify", "ClassificationRequest", "ClassificationResponse"},
          {"Regress", "RegressionRequest", "RegressionResponse"},
          {"MultiInference", "MultiInferenceRequest", "MultiInferenceResponse"},
          {"GetModelMetadata", "GetModelMetadataRequest", "GetModelMetadataResponse"}}},
        {"ModelService",
         {{"GetModelStatus", "GetModelStatusRequest", "GetModelStatusResponse"},
          {"HandleReloadConfigRequest", "ReloadConfigRequest", "ReloadConfigResponse"}}}}});
  described.mutable_message_type(0)->clear_nested_type();
  // The policy lies elsewhere there.
  pb::DescriptorProto* outer = described.add_message_type();
  outer->set_name("FileSystemStoragePathSourceConfig");
  pb::DescriptorProto* policy = outer->add_nested_type();
  source->FindMessageTypeByName("VersionPolicy")->CopyTo(policy);
  policy->set_name("ServableVersionPolicy");
  for (pb::FieldDescriptorProto& field : *policy->mutable_field()) {
    const std::string& type = field.type_name();
    field.set_type_name(std::string(".tensorflow.serving.") + kVersionPolicy +
                        type.substr(type.rfind('.')));
  }
  return described;
}

pb::FileDescriptorProto DescribeHealth() {
  return Describe({"grpc/health/v1/health.proto",
                   "grpc.health.v1",
                   api::PredictRequest::descriptor()->file(),
                   {"HealthCheckRequest", "HealthCheckResponse"},
                   {},
                   {},
                   {{"Health",
                     {{"Check", "HealthCheckRequest", "HealthCheckResponse"},
                      {"Watch", "HealthCheckRequest", "HealthCheckResponse", false, true}}}}});
}

pb::FileDescriptorProto DescribeReflection(const char* name, const char* package) {
  const pb::FileDescriptor* source = reflection::ServerReflectionRequest::descriptor()->file();
  std::vector<std::string> messages;
  for (int i = 0; i < source->message_type_count(); ++i) {
    messages.emplace_back(source->message_type(i)->name());
  }
  return Describe({name,
                   package,
                   source,
                   std::move(messages),
                   {},
                   {},
                   {{"ServerReflection",
                     {{"ServerReflectionInfo", "ServerReflectionRequest",
                       "ServerReflectionResponse", true, true}}}}});
}

}  // namespace

ServiceDescriptors MakeServiceDescriptors() {
  ServiceDescriptors result;
  result.pool = std::make_unique<pb::DescriptorPool>(pb::DescriptorPool::generated_pool());
  for (const pb::FileDescriptorProto& described :
       {DescribeServing(), DescribeHealth(),
        DescribeReflection("grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"),
        DescribeReflection("grpc/reflection/v1alpha/reflection.proto",
                           "grpc.reflection.v1alpha")}) {
    const pb::FileDescriptor* file = result.pool->BuildFile(described);
    if (file == nullptr) {
      LogError(described.name() + " cannot be described");
      continue;
    }
    for (int i = 0; i < file->service_count(); ++i) {
      result.services.emplace_back(file->service(i)->full_name());
    }
  }
  return result;
}

}  // namespace serving
}  // namespace monolith
