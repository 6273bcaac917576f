#include "monolith/serving/native/remote/remote_predictor.h"

#include <dlfcn.h>

#include <algorithm>
#include <utility>

#include "monolith/native_training/runtime/ops/serving/remote_predictor.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {
namespace {

constexpr char kPredict[] = "/tensorflow.serving.PredictionService/Predict";
constexpr std::chrono::seconds kAskAgain(1);
// An answer later than this is of no use to anybody.
constexpr std::chrono::milliseconds kMaxTimeout(600'000);

// Whether another replica may well answer what this one did not.
bool IsOfReplica(Code code) {
  switch (code) {
    case Code::kCancelled:
    case Code::kDeadlineExceeded:
    case Code::kNotFound:
    case Code::kResourceExhausted:
    case Code::kFailedPrecondition:
    case Code::kUnimplemented:
    case Code::kUnavailable:
      return true;
    default:
      return false;
  }
}

void PredictFromOp(void* self, const char* request, int64_t request_size, const char* old_name,
                   int64_t old_name_size, int64_t timeout_millis, MonolithPredictDone done,
                   void* context) {
  static_cast<RemotePredictor*>(self)->Predict(
      std::string(request, static_cast<size_t>(request_size)),
      std::string(old_name, static_cast<size_t>(old_name_size)),
      std::chrono::milliseconds(timeout_millis), [done, context](const RpcReply& reply) {
        const std::string& text = reply.status.ok() ? reply.message : reply.status.message;
        done(context, static_cast<int32_t>(reply.status.code), text.data(),
             static_cast<int64_t>(text.size()));
      });
}

}  // namespace

struct RemotePredictor::Attempt {
  std::string request;
  ServedModel model;
  Clock::time_point deadline;
  RpcDone done;
  std::string address;
  bool last = false;
};

Status RemotePredictor::Install(void* op_library) {
  using SetFunction = void (*)(MonolithPredictFunction, void*);
  const auto set = reinterpret_cast<SetFunction>(dlsym(op_library, "MonolithSetRemotePredictor"));
  if (set == nullptr) {
    return Status(Code::kFailedPrecondition,
                  "the op library is older than the server: it has no MonolithSetRemotePredictor");
  }
  set(&PredictFromOp, this);
  return Status();
}

void RemotePredictor::Predict(const std::string& request, const std::string& old_name,
                              std::chrono::milliseconds timeout, RpcDone done) {
  api::PredictRequest parsed;
  if (!parsed.ParseFromString(request)) {
    return done(RpcReply{Status(Code::kInternal, "the op sent no PredictRequest"), ""});
  }
  const auto attempt = std::make_shared<Attempt>();
  const Status status = addresses_->Find(parsed.model_spec().name(), old_name, &attempt->model);
  if (!status.ok()) return done(RpcReply{status, ""});
  attempt->request = request;
  if (attempt->model.name != parsed.model_spec().name()) {
    parsed.mutable_model_spec()->set_name(attempt->model.name);
    attempt->request = parsed.SerializeAsString();
  }
  if (timeout_.count() > 0) timeout = timeout_;
  attempt->deadline = Clock::now() + std::min(timeout, kMaxTimeout);
  attempt->done = std::move(done);
  Send(attempt);
}

void RemotePredictor::Send(const std::shared_ptr<Attempt>& attempt) {
  const std::vector<std::string>& addresses = attempt->model.addresses;
  attempt->address = Choose(addresses, attempt->address);
  Clock::time_point deadline = attempt->deadline;
  // A replica that hangs must leave time for another one.
  if (!attempt->last && addresses.size() > 1) deadline -= (deadline - Clock::now()) / 2;
  channels_->Call(attempt->address, kPredict, attempt->request, deadline,
                  [this, attempt](RpcReply reply) {
                    if (IsOfReplica(reply.status.code)) {
                      MarkFailed(attempt->address);
                      if (!attempt->last && Clock::now() < attempt->deadline) {
                        attempt->last = true;
                        return Send(attempt);
                      }
                    }
                    attempt->done(std::move(reply));
                  });
}

std::string RemotePredictor::Choose(const std::vector<std::string>& addresses,
                                    const std::string& not_this) {
  const uint64_t start = next_.fetch_add(1, std::memory_order_relaxed);
  const size_t count = addresses.size();
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string* second_best = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const std::string& address = addresses[(start + i) % count];
    if (address == not_this) continue;
    const auto failed = failed_.find(address);
    if (failed == failed_.end()) return address;
    if (Clock::now() - failed->second >= kAskAgain) {
      failed_.erase(failed);
      return address;
    }
    if (second_best == nullptr) second_best = &address;
  }
  return second_best != nullptr ? *second_best : addresses[start % count];
}

void RemotePredictor::MarkFailed(const std::string& address) {
  std::lock_guard<std::mutex> lock(mutex_);
  failed_[address] = Clock::now();
}

}  // namespace serving
}  // namespace monolith
