#include "monolith/serving/native/remote/remote_predictor.h"

#include <dlfcn.h>

#include <algorithm>
#include <set>
#include <utility>

#include "monolith/native_training/runtime/ops/serving/remote_predictor.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {
namespace {

constexpr char kPredict[] = "/tensorflow.serving.PredictionService/Predict";
constexpr std::chrono::seconds kTryAgain(1);
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
  // As the op sent it, and for the name under which the model is served.
  api::PredictRequest parsed;
  std::string request;
  std::string name;
  std::string old_name;
  Clock::time_point deadline;
  RpcDone done;
  // When replicas were found.
  Clock::time_point found;
  std::vector<std::string> chosen;
  size_t next = 0;
  std::set<std::string> tried;
  bool asked_again = false;
  // The answer of the last of them.
  RpcReply failure;
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
  const auto attempt = std::make_shared<Attempt>();
  if (!attempt->parsed.ParseFromString(request)) {
    return done(RpcReply{Status(Code::kInternal, "the op sent no PredictRequest"), ""});
  }
  attempt->request = request;
  attempt->name = attempt->parsed.model_spec().name();
  attempt->old_name = old_name;
  if (timeout_.count() > 0) timeout = timeout_;
  attempt->deadline = Clock::now() + std::min(timeout, kMaxTimeout);
  attempt->done = std::move(done);
  Start(attempt);
}

void RemotePredictor::Start(const std::shared_ptr<Attempt>& attempt) {
  attempt->found = Clock::now();
  ServedModel model;
  const Status status = addresses_->Find(attempt->name, attempt->old_name, &model);
  if (!status.ok()) return StartAgain(attempt, RpcReply{status, ""});
  if (model.name != attempt->parsed.model_spec().name()) {
    attempt->parsed.mutable_model_spec()->set_name(model.name);
    attempt->request = attempt->parsed.SerializeAsString();
  }
  attempt->next = 0;
  attempt->chosen.clear();
  for (std::string& address : Choose(model)) {
    if (attempt->tried.count(address) == 0) attempt->chosen.push_back(std::move(address));
  }
  // The agent knows no other than those that failed.
  if (attempt->chosen.empty()) return attempt->done(std::move(attempt->failure));
  Send(attempt);
}

void RemotePredictor::Send(const std::shared_ptr<Attempt>& attempt) {
  const std::string address = attempt->chosen[attempt->next++];
  attempt->tried.insert(address);
  Clock::time_point deadline = attempt->deadline;
  // A replica that hangs must leave time for another one.
  if (attempt->next < attempt->chosen.size()) deadline -= (deadline - Clock::now()) / 2;
  channels_->Call(address, kPredict, attempt->request, deadline,
                  [this, attempt, address](RpcReply reply) {
                    if (!IsOfReplica(reply.status.code)) return attempt->done(std::move(reply));
                    MarkFailed(address);
                    if (Clock::now() >= attempt->deadline) return attempt->done(std::move(reply));
                    if (attempt->next < attempt->chosen.size()) return Send(attempt);
                    StartAgain(attempt, std::move(reply));
                  });
}

void RemotePredictor::StartAgain(const std::shared_ptr<Attempt>& attempt, RpcReply reply) {
  if (attempt->asked_again || !addresses_->CanAskAgain()) {
    return attempt->done(std::move(reply));
  }
  attempt->asked_again = true;
  attempt->failure = std::move(reply);
  addresses_->AskAgain(attempt->found, [this, attempt] { Start(attempt); });
}

std::vector<std::string> RemotePredictor::Choose(const ServedModel& model) {
  std::vector<std::string> turn = model.addresses;
  std::vector<std::string> former = model.former_addresses;
  const Clock::time_point now = Clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto answers = [&](const std::string& address) {
    const auto failed = failed_.find(address);
    return failed == failed_.end() || now - failed->second >= kTryAgain;
  };
  if (!turn.empty()) {
    const auto start = next_.fetch_add(1, std::memory_order_relaxed) % turn.size();
    std::rotate(turn.begin(), turn.begin() + static_cast<int64_t>(start), turn.end());
    // Those that failed just now come last, the others keep their turn.
    std::stable_partition(turn.begin(), turn.end(), answers);
    // The only one is asked twice: the first call may find a connection that broke.
    if (turn.size() == 1) turn.push_back(turn.front());
    turn.resize(2);
  }
  if (!former.empty()) {
    std::stable_partition(former.begin(), former.end(), answers);
    turn.push_back(former.front());
  }
  return turn;
}

void RemotePredictor::MarkFailed(const std::string& address) {
  const Clock::time_point now = Clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = failed_.begin(); it != failed_.end();) {
    it = now - it->second < kTryAgain ? std::next(it) : failed_.erase(it);
  }
  failed_[address] = now;
}

}  // namespace serving
}  // namespace monolith
