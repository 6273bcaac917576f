#include "monolith/serving/native/api/serving_api.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "monolith/serving/native/model/examples.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/protobuf.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// The time limit of a reload whose client sets no deadline.
constexpr std::chrono::minutes kReloadTimeout(10);
// The largest size of a short request as tensors.
constexpr int64_t kMaxInlineTensorBytes = 256 << 10;
constexpr char kSignatureDef[] = "signature_def";
constexpr char kSignatureDefMapType[] = "type.googleapis.com/tensorflow.serving.SignatureDefMap";

// A field of two bytes may take fifty once parsed.
constexpr int kMaxFields = 100'000;
// Only requests that run a model have longer messages.
constexpr size_t kMaxOtherMessageBytes = 4 << 20;

// Counts the fields of a message and of nested messages; tensors and examples are bytes here.
// Returns false for malformed input, of which protobuf would keep all that comes before the fault.
bool CountFields(std::string_view message, const tensorflow::protobuf::Descriptor* type,
                 int* count) {
  using tensorflow::protobuf::FieldDescriptor;
  using tensorflow::protobuf::internal::WireFormatLite;
  tensorflow::protobuf::io::CodedInputStream stream(
      reinterpret_cast<const uint8_t*>(message.data()), static_cast<int>(message.size()));
  while (const uint32_t tag = stream.ReadTag()) {
    if (++*count > kMaxFields) return true;
    const auto wire_type = WireFormatLite::GetTagWireType(tag);
    if (wire_type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      const int begin = stream.CurrentPosition();
      if (!WireFormatLite::SkipField(&stream, tag)) return false;
      // No message has groups, but protobuf would keep one, with its fields of two bytes each.
      if (wire_type == WireFormatLite::WIRETYPE_START_GROUP) {
        *count += (stream.CurrentPosition() - begin) / 2;
      }
      continue;
    }
    uint32_t size = 0;
    if (!stream.ReadVarint32(&size)) return false;
    const auto begin = static_cast<size_t>(stream.CurrentPosition());
    if (size > message.size() - begin || !stream.Skip(static_cast<int>(size))) return false;
    const FieldDescriptor* const field =
        type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE && !field->is_map() &&
        !CountFields(message.substr(begin, size), field->message_type(), count)) {
      return false;
    }
  }
  return *count > kMaxFields || stream.ConsumedEntireMessage();
}

// Counts the fields of a message before memory is taken for them.
Status CheckFields(const std::string& message, const char* name,
                   const tensorflow::protobuf::Descriptor* type) {
  int count = 0;
  if (!CountFields(message, type, &count)) {
    return Status(Code::kInvalidArgument, std::string("the message is not a ") + name);
  }
  if (count <= kMaxFields) return Status();
  return Status(Code::kInvalidArgument,
                "the message has more than " + std::to_string(kMaxFields) + " fields");
}

template <typename Request, typename Response, typename Method>
RpcReply Call(const std::string& message, const char* request_name, Method method) {
  RpcReply reply;
  reply.status = CheckFields(message, request_name, Request::descriptor());
  if (!reply.status.ok()) return reply;
  Request request;
  if (!request.ParseFromString(message)) {
    reply.status =
        Status(Code::kInvalidArgument, std::string("the message is not a ") + request_name);
    return reply;
  }
  Response response;
  reply.status = method(request, &response);
  if (reply.status.ok() && !response.SerializeToString(&reply.message)) {
    reply.status = Status(Code::kInternal, "the answer is longer than 2 GiB");
  }
  return reply;
}

// Charges an answer with its size as one message.
void KeepLease(const std::shared_ptr<MemoryLease>& lease, RpcReply* reply) {
  if (!reply->status.ok()) return;
  const auto bytes = static_cast<int64_t>(reply->message.size());
  if (bytes < lease->bytes()) lease->Resize(bytes);
  reply->lease = lease;
}

// Sets the version and signature that answered.
void SetSpec(const api::ModelSpec& asked, int64_t version, api::ModelSpec* spec) {
  spec->set_name(asked.name());
  spec->mutable_version()->set_value(version);
  spec->set_signature_name(asked.signature_name().empty() ? "serving_default"
                                                          : asked.signature_name());
}

Status SetExamples(const std::string& input, ExampleRunner* runner) {
  Examples examples;
  const Status status = ReadExamples(input, &examples);
  return status.ok() ? runner->SetExamples(examples) : status;
}

}  // namespace

Status ServingApi::Predict(const api::PredictRequest& request, MemoryLease* lease,
                           api::PredictResponse* response) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = models_->Find(request.model_spec(), &servable, &version);
  if (!status.ok()) return status;
  const Signature* signature = nullptr;
  status = servable->FindSignature(request.model_spec().signature_name(), &signature);
  if (!status.ok()) return status;
  return PredictOn(servable.get(), *signature, version, request, lease, response);
}

Status ServingApi::PredictOn(Servable* servable, const Signature& signature, int64_t version,
                             const api::PredictRequest& request, MemoryLease* lease,
                             api::PredictResponse* response) {
  const Status status =
      serving::Predict(servable, signature, request, limits_, runner_, lease, response);
  if (!status.ok()) return status;
  SetSpec(request.model_spec(), version, response->mutable_model_spec());
  return Status();
}

Status ServingApi::Classify(const api::ClassificationRequest& request, MemoryLease* lease,
                            api::ClassificationResponse* response) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = models_->Find(request.model_spec(), &servable, &version);
  if (!status.ok()) return status;
  ExampleRunner runner(servable.get(), limits_, runner_, lease);
  const Signature* signature = nullptr;
  status = runner.FindSignature(request.model_spec().signature_name(), kClassifyMethod, &signature);
  if (!status.ok()) return status;
  status = SetExamples(request.input(), &runner);
  if (!status.ok()) return status;
  SetSpec(request.model_spec(), version, response->mutable_model_spec());
  return runner.Classify(*signature, response->mutable_result());
}

Status ServingApi::Regress(const api::RegressionRequest& request, MemoryLease* lease,
                           api::RegressionResponse* response) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = models_->Find(request.model_spec(), &servable, &version);
  if (!status.ok()) return status;
  ExampleRunner runner(servable.get(), limits_, runner_, lease);
  const Signature* signature = nullptr;
  status = runner.FindSignature(request.model_spec().signature_name(), kRegressMethod, &signature);
  if (!status.ok()) return status;
  status = SetExamples(request.input(), &runner);
  if (!status.ok()) return status;
  SetSpec(request.model_spec(), version, response->mutable_model_spec());
  return runner.Regress(*signature, response->mutable_result());
}

Status ServingApi::MultiInference(const api::MultiInferenceRequest& request, MemoryLease* lease,
                                  api::MultiInferenceResponse* response) {
  if (request.tasks().empty()) {
    return Status(Code::kInvalidArgument, "the request has no tasks");
  }
  const api::ModelSpec& spec = request.tasks(0).model_spec();
  for (const api::InferenceTask& task : request.tasks()) {
    if (task.model_spec().name() != spec.name()) {
      return Status(Code::kInvalidArgument, "the tasks are of the models '" + spec.name() +
                                                "' and '" + task.model_spec().name() +
                                                "', want one");
    }
  }
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = models_->Find(spec, &servable, &version);
  if (!status.ok()) return status;
  ExampleRunner runner(servable.get(), limits_, runner_, lease);
  std::vector<const Signature*> signatures;
  for (const api::InferenceTask& task : request.tasks()) {
    if (task.method_name() != kClassifyMethod && task.method_name() != kRegressMethod) {
      return Status(Code::kUnimplemented, "the method is '" + task.method_name().substr(0, 100) +
                                              "', want '" + kClassifyMethod + "' or '" +
                                              kRegressMethod + "'");
    }
    status = runner.FindSignature(task.model_spec().signature_name(), task.method_name(),
                                  &signatures.emplace_back(nullptr));
    if (!status.ok()) return status;
    // As in TensorFlow Serving, a request has at most as many tasks as the model has signatures.
    if (std::count(signatures.begin(), signatures.end(), signatures.back()) > 1) {
      return Status(Code::kInvalidArgument,
                    "two tasks are of the signature '" + signatures.back()->name() + "'");
    }
  }
  status = SetExamples(request.input(), &runner);
  if (!status.ok()) return status;
  for (int i = 0; i < request.tasks_size(); ++i) {
    const api::InferenceTask& task = request.tasks(i);
    const Signature& signature = *signatures[i];
    api::InferenceResult* const result = response->add_results();
    SetSpec(task.model_spec(), version, result->mutable_model_spec());
    status = task.method_name() == kClassifyMethod
                 ? runner.Classify(signature, result->mutable_classification_result())
                 : runner.Regress(signature, result->mutable_regression_result());
    if (!status.ok()) return status;
  }
  return Status();
}

Status ServingApi::GetModelMetadata(const api::GetModelMetadataRequest& request,
                                    api::GetModelMetadataResponse* response) {
  std::string names;
  for (const std::string& field : request.metadata_field()) {
    names += (names.empty() ? "'" : ", '") + field + "'";
  }
  if (request.metadata_field_size() != 1 || request.metadata_field(0) != kSignatureDef) {
    return Status(Code::kInvalidArgument,
                  "metadata_field is [" + names.substr(0, 200) + "], want ['signature_def']");
  }
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  const Status status = models_->Find(request.model_spec(), &servable, &version);
  if (!status.ok()) return status;
  response->mutable_model_spec()->set_name(request.model_spec().name());
  response->mutable_model_spec()->mutable_version()->set_value(version);
  api::SignatureDefMap signatures;
  for (const auto& [name, signature] : servable->signatures()) {
    (*signatures.mutable_signature_def())[name] = signature.definition().SerializeAsString();
  }
  api::AnyMessage& metadata = (*response->mutable_metadata())[kSignatureDef];
  metadata.set_type_url(kSignatureDefMapType);
  metadata.set_value(signatures.SerializeAsString());
  return Status();
}

Status ServingApi::GetModelStatus(const api::GetModelStatusRequest& request,
                                  api::GetModelStatusResponse* response) {
  return models_->GetStatus(request.model_spec(), response);
}

Status ServingApi::Reload(const api::ReloadConfigRequest& request, Clock::time_point deadline,
                          api::ReloadConfigResponse* response) {
  if (request.config().config_case() == api::ModelServerConfig::CONFIG_NOT_SET) {
    return Status(Code::kInvalidArgument, "the ReloadConfigRequest has no config");
  }
  const Status status =
      models_->SetConfig(request.config(), std::min(deadline, Clock::now() + kReloadTimeout));
  if (status.ok()) response->mutable_status()->set_error_code(0);
  return status;
}

Status ServingApi::CheckHealth(const api::HealthCheckRequest& request,
                               api::HealthCheckResponse* response) {
  const std::map<std::string, bool> available = models_->Availability();
  bool serving = true;
  if (request.service().empty()) {
    for (const auto& [name, answers] : available) serving = serving && answers;
  } else {
    const auto found = available.find(request.service());
    if (found == available.end()) {
      return Status(Code::kNotFound, "unknown service '" + request.service() + "'");
    }
    serving = found->second;
  }
  response->set_status(serving ? api::HealthCheckResponse::SERVING
                               : api::HealthCheckResponse::NOT_SERVING);
  return Status();
}

RpcStreamMethods ServingApi::MakeHealthMethods() {
  RpcStreamMethod watch;
  watch.is_watch = true;
  watch.answer = [this](const std::string& message) {
    return Call<api::HealthCheckRequest, api::HealthCheckResponse>(
        message, "HealthCheckRequest", [this](const auto& request, auto* response) {
          // An unknown model may be configured later.
          if (CheckHealth(request, response).code == Code::kNotFound) {
            response->set_status(api::HealthCheckResponse::SERVICE_UNKNOWN);
          }
          return Status();
        });
  };
  return {{"/grpc.health.v1.Health/Watch", std::move(watch)}};
}

void ServingApi::Count(const std::string& model, const char* method, Code code,
                       Clock::time_point start) {
  metrics_->Count(models_->Knows(model) ? model : "", method, code, Clock::now() - start);
}

bool ServingApi::PredictIfShort(const std::string& message, RpcReply* reply) {
  const Clock::time_point start = Clock::now();
  std::string model;
  bool short_runs = true;
  const auto lease = std::make_shared<MemoryLease>(limits_.budget);
  *reply = Call<api::PredictRequest, api::PredictResponse>(
      message, "PredictRequest",
      [&](const api::PredictRequest& request, api::PredictResponse* response) {
        model = request.model_spec().name();
        std::shared_ptr<Servable> servable;
        int64_t version = 0;
        Status status = models_->Find(request.model_spec(), &servable, &version);
        if (!status.ok()) return status;
        const Signature* signature = nullptr;
        status = servable->FindSignature(request.model_spec().signature_name(), &signature);
        if (!status.ok()) return status;
        short_runs = servable->RunsAreShort(
            *signature, {request.output_filter().begin(), request.output_filter().end()});
        if (!short_runs) return Status();
        int64_t bytes = 0;
        int64_t message_bytes = 0;
        // A request that cannot be measured is refused when its turn comes.
        short_runs = !MeasureInputs(request, limits_, &bytes, &message_bytes).ok() ||
                     bytes <= kMaxInlineTensorBytes;
        if (!short_runs) return Status();
        return PredictOn(servable.get(), *signature, version, request, lease.get(), response);
      });
  KeepLease(lease, reply);
  if (short_runs) Count(model, "Predict", reply->status.code, start);
  return short_runs;
}

RpcReply ServingApi::Handle(const RpcCall& call) {
  const Clock::time_point start = Clock::now();
  Counted counted;
  RpcReply reply = HandleUncounted(call, &counted);
  if (counted.method != nullptr) Count(counted.model, counted.method, reply.status.code, start);
  return reply;
}

bool ServingApi::HandlePrediction(const RpcCall& call, Counted* counted, RpcReply* reply) {
  const auto lease = std::make_shared<MemoryLease>(limits_.budget);
  const auto take = [&](const char* name, auto method) {
    counted->method = name;
    return [this, counted, lease, method](const auto& request, auto* response) {
      counted->model = request.model_spec().name();
      return (this->*method)(request, lease.get(), response);
    };
  };
  if (call.path == kPredictPath) {
    *reply = Call<api::PredictRequest, api::PredictResponse>(call.message, "PredictRequest",
                                                             take("Predict", &ServingApi::Predict));
  } else if (call.path == "/tensorflow.serving.PredictionService/Classify") {
    *reply = Call<api::ClassificationRequest, api::ClassificationResponse>(
        call.message, "ClassificationRequest", take("Classify", &ServingApi::Classify));
  } else if (call.path == "/tensorflow.serving.PredictionService/Regress") {
    *reply = Call<api::RegressionRequest, api::RegressionResponse>(
        call.message, "RegressionRequest", take("Regress", &ServingApi::Regress));
  } else if (call.path == "/tensorflow.serving.PredictionService/MultiInference") {
    counted->method = "MultiInference";
    *reply = Call<api::MultiInferenceRequest, api::MultiInferenceResponse>(
        call.message, "MultiInferenceRequest",
        [&](const api::MultiInferenceRequest& request, api::MultiInferenceResponse* response) {
          if (!request.tasks().empty()) counted->model = request.tasks(0).model_spec().name();
          return MultiInference(request, lease.get(), response);
        });
  } else {
    return false;
  }
  KeepLease(lease, reply);
  return true;
}

RpcReply ServingApi::HandleUncounted(const RpcCall& call, Counted* counted) {
  const std::string& path = call.path;
  RpcReply reply;
  if (HandlePrediction(call, counted, &reply)) return reply;
  if (call.message.size() > kMaxOtherMessageBytes) {
    return RpcReply{
        Status(Code::kResourceExhausted, "the request has " + std::to_string(call.message.size()) +
                                             " bytes, this method takes at most " +
                                             std::to_string(kMaxOtherMessageBytes)),
        ""};
  }
  if (path == "/tensorflow.serving.PredictionService/GetModelMetadata") {
    counted->method = "GetModelMetadata";
    return Call<api::GetModelMetadataRequest, api::GetModelMetadataResponse>(
        call.message, "GetModelMetadataRequest", [&](const auto& request, auto* response) {
          counted->model = request.model_spec().name();
          return GetModelMetadata(request, response);
        });
  }
  if (path == "/tensorflow.serving.ModelService/GetModelStatus") {
    counted->method = "GetModelStatus";
    return Call<api::GetModelStatusRequest, api::GetModelStatusResponse>(
        call.message, "GetModelStatusRequest", [&](const auto& request, auto* response) {
          counted->model = request.model_spec().name();
          return GetModelStatus(request, response);
        });
  }
  if (path == "/tensorflow.serving.ModelService/HandleReloadConfigRequest") {
    counted->method = "HandleReloadConfigRequest";
    return Call<api::ReloadConfigRequest, api::ReloadConfigResponse>(
        call.message, "ReloadConfigRequest", [&](const auto& request, auto* response) {
          return Reload(request, call.deadline, response);
        });
  }
  if (path == "/grpc.health.v1.Health/Check") {
    return Call<api::HealthCheckRequest, api::HealthCheckResponse>(
        call.message, "HealthCheckRequest",
        [&](const auto& request, auto* response) { return CheckHealth(request, response); });
  }
  return RpcReply{Status(Code::kUnimplemented, "the server has no method " + path), ""};
}

}  // namespace serving
}  // namespace monolith
