#include "monolith/serving/native/rest/rest_api.h"

#include <atomic>
#include <charconv>
#include <exception>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include "monolith/serving/native/model/examples.h"
#include "monolith/serving/native/rest/json.h"
#include "monolith/serving/native/rest/json_examples.h"
#include "monolith/serving/native/rest/json_request.h"
#include "monolith/serving/native/rest/json_tensors.h"
#include "tensorflow/core/framework/tensor.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::string_view kModels = "/v1/models/";
constexpr std::string_view kMetadata = "/metadata";
constexpr char kMetricsPath[] = "/monitoring/prometheus/metrics";

Status Predict(ServingApi* serving, const api::ModelSpec& spec, const std::string& body,
               MemoryLease* lease, std::string* answer) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = serving->models()->Find(spec, &servable, &version);
  if (!status.ok()) return status;
  JsonRequest request;
  status = ParseJsonRequest(body, *servable, serving->limits(), lease, &request);
  if (!status.ok()) return status;
  Servable::Tensors outputs;
  status = RunCounted(servable.get(), *request.signature, request.inputs, {}, serving->runner(),
                      AnswerKind::kJson, lease, &outputs);
  if (!status.ok()) return status;
  request.inputs.clear();
  status = WriteJsonAnswer(request, outputs, answer);
  if (!status.ok()) return status;
  outputs.clear();
  if (lease->Resize(static_cast<int64_t>(answer->capacity()))) return Status();
  return Status(Code::kResourceExhausted, "the answers of all requests take too much memory");
}

void AppendResults(const api::ClassificationResult& result, std::string* answer) {
  for (int row = 0; row < result.classifications_size(); ++row) {
    *answer += row == 0 ? "[" : ", [";
    const api::Classifications& found = result.classifications(row);
    for (int i = 0; i < found.classes_size(); ++i) {
      *answer += i == 0 ? "[" : ", [";
      AppendJsonString(found.classes(i).label(), answer);
      *answer += ", " + JsonNumber(found.classes(i).score()) + "]";
    }
    *answer += "]";
  }
}

void AppendResults(const api::RegressionResult& result, std::string* answer) {
  for (int row = 0; row < result.regressions_size(); ++row) {
    *answer += (row == 0 ? "" : ", ") + JsonNumber(result.regressions(row).value());
  }
}

// `verb` is classify or regress.
Status RunExamples(ServingApi* serving, const RestTarget& target, const std::string& body,
                   MemoryLease* lease, std::string* answer) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  Status status = serving->models()->Find(target.spec, &servable, &version);
  if (!status.ok()) return status;
  const bool classifies = target.verb == "classify";
  ExampleRunner runner(servable.get(), serving->limits(), serving->runner(), lease);
  JsonExamples parsed;
  const Status parsing =
      ParseJsonExamples(body, serving->limits().max_tensor_bytes, lease, &parsed);
  // Whatever the body, a model without such a signature has none.
  const Signature* signature = nullptr;
  status = runner.FindSignature(parsed.signature_name,
                                classifies ? kClassifyMethod : kRegressMethod, &signature);
  if (!parsing.ok() && status.code != Code::kUnimplemented) return parsing;
  if (!status.ok()) return status;
  Examples examples{parsed.context, {parsed.examples.begin(), parsed.examples.end()}};
  status = runner.SetExamples(examples);
  if (!status.ok()) return status;
  *answer = "{\"results\": [";
  if (classifies) {
    api::ClassificationResult result;
    status = runner.Classify(*signature, &result);
    AppendResults(result, answer);
  } else {
    api::RegressionResult result;
    status = runner.Regress(*signature, &result);
    AppendResults(result, answer);
  }
  *answer += "]}";
  return status;
}

Status GetMetadata(ServingApi* serving, const api::ModelSpec& spec, std::string* answer) {
  std::shared_ptr<Servable> servable;
  int64_t version = 0;
  const Status status = serving->models()->Find(spec, &servable, &version);
  if (!status.ok()) return status;
  WriteJsonMetadata(spec.name(), version, *servable, answer);
  return Status();
}

Status GetStates(ServingApi* serving, const api::ModelSpec& spec, std::string* answer) {
  api::GetModelStatusResponse response;
  const Status status = serving->models()->GetStatus(spec, &response);
  if (!status.ok()) return status;
  *answer = "{\"model_version_status\": [";
  bool first = true;
  for (const api::ModelVersionStatus& version : response.model_version_status()) {
    if (!first) *answer += ", ";
    first = false;
    *answer += "{\"version\": \"" + std::to_string(version.version()) + "\", \"state\": \"" +
               api::ModelVersionStatus::State_Name(version.state()) +
               "\", \"status\": {\"error_code\": \"" +
               Metrics::CodeName(version.status().error_code()) + "\", \"error_message\": ";
    AppendJsonString(version.status().error_message(), answer);
    *answer += "}}";
  }
  *answer += "]}";
  return Status();
}

const char* MethodName(const RestTarget& target) {
  if (target.verb == "predict") return "Predict";
  if (target.verb == "classify") return "Classify";
  if (target.verb == "regress") return "Regress";
  return target.verb == "metadata" ? "GetModelMetadata" : "GetModelStatus";
}

}  // namespace

int HttpStatus(Code code) {
  switch (static_cast<int>(code)) {
    case 0:
      return 200;
    case 3:
    case 11:
      return 400;
    case 16:
      return 401;
    case 7:
      return 403;
    case 5:
      return 404;
    case 6:
    case 10:
      return 409;
    case 9:
      return 412;
    case 8:
      return 429;
    case 1:
      return 499;
    case 12:
      return 501;
    case 14:
      return 503;
    case 4:
      return 504;
    default:
      return 500;
  }
}

bool ParseRestPath(const std::string& method, const std::string& path, RestTarget* target) {
  if (method != "GET" && method != "POST") return false;
  if (path.compare(0, kModels.size(), kModels) != 0) return false;
  std::string_view rest = std::string_view(path).substr(kModels.size());
  if (method == "POST") {
    const size_t colon = rest.rfind(':');
    if (colon == std::string_view::npos) return false;
    target->verb = rest.substr(colon + 1);
    if (target->verb != "predict" && target->verb != "classify" && target->verb != "regress") {
      return false;
    }
    rest = rest.substr(0, colon);
  } else if (rest.size() > kMetadata.size() &&
             rest.substr(rest.size() - kMetadata.size()) == kMetadata) {
    target->verb = "metadata";
    rest.remove_suffix(kMetadata.size());
  }
  const size_t slash = rest.find('/');
  const std::string_view name = rest.substr(0, slash);
  if (name.empty()) return false;
  target->spec.set_name(std::string(name));
  if (slash == std::string_view::npos) return true;
  rest.remove_prefix(slash);
  constexpr std::string_view kVersions = "/versions/";
  constexpr std::string_view kLabels = "/labels/";
  if (rest.substr(0, kVersions.size()) == kVersions) {
    const std::string_view number = rest.substr(kVersions.size());
    int64_t version = 0;
    const char* end = number.data() + number.size();
    const auto parsed = std::from_chars(number.data(), end, version);
    if (parsed.ec != std::errc() || parsed.ptr != end || version < 0) return false;
    target->spec.mutable_version()->set_value(version);
    return true;
  }
  if (rest.substr(0, kLabels.size()) != kLabels) return false;
  const std::string_view label = rest.substr(kLabels.size());
  if (label.empty() || label.find_first_of("/:") != std::string_view::npos) return false;
  target->spec.set_version_label(std::string(label));
  return true;
}

HttpReply HandleRest(ServingApi* serving, const HttpRequest& request) {
  const Clock::time_point start = Clock::now();
  HttpReply reply;
  if (request.path == kMetricsPath && request.method == "GET") {
    reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
    reply.body = serving->metrics()->ToText(serving->models()->counts());
    return reply;
  }
  RestTarget target;
  Status status;
  const char* method = "Rest";
  if (!ParseRestPath(request.method, request.path, &target)) {
    status = Status(
        request.path.rfind("/v1/", 0) == 0 ? Code::kInvalidArgument : Code::kNotFound,
        "Malformed request: " + request.method.substr(0, 20) + " " + request.path.substr(0, 200));
  } else {
    method = MethodName(target);
    if (target.verb == "predict") {
      reply.lease = std::make_shared<MemoryLease>(serving->limits().budget);
      status = Predict(serving, target.spec, request.body, reply.lease.get(), &reply.body);
    } else if (target.verb == "metadata") {
      status = GetMetadata(serving, target.spec, &reply.body);
    } else if (target.verb.empty()) {
      status = GetStates(serving, target.spec, &reply.body);
    } else {
      reply.lease = std::make_shared<MemoryLease>(serving->limits().budget);
      status = RunExamples(serving, target, request.body, reply.lease.get(), &reply.body);
    }
  }
  serving->Count(target.spec.name(), method, status.code, start);
  if (!status.ok()) {
    reply.status = HttpStatus(status.code);
    reply.body = HttpErrorBody(status.message);
    reply.lease.reset();
  }
  return reply;
}

HttpService MakeHttpService(ServingApi* serving, WorkerPool* workers) {
  return [serving, workers](HttpRequest request, HttpDone done) {
    const auto shared = std::make_shared<HttpRequest>(std::move(request));
    const bool queued = workers->Schedule([serving, shared, done] {
      if (shared->cancelled->load(std::memory_order_relaxed)) return;
      HttpReply reply;
      try {
        reply = HandleRest(serving, *shared);
      } catch (const std::bad_alloc&) {
        reply = HttpReply{429, HttpErrorBody("out of memory")};
      } catch (const std::exception& error) {
        reply = HttpReply{500, HttpErrorBody(error.what())};
      }
      done(std::move(reply));
    });
    if (!queued) done(HttpReply{429, HttpErrorBody("too many requests are waiting")});
  };
}

}  // namespace serving
}  // namespace monolith
