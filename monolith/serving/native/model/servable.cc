#include "monolith/serving/native/model/servable.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <unordered_set>
#include <utility>

#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/followed_graph.h"
#include "monolith/serving/native/model/pooling_fusion.h"
#include "monolith/serving/native/model/run_gate.h"
#include "monolith/serving/native/model/tensorflow_status.h"
#include "monolith/serving/native/row_log/sync_state.h"
#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/cc/saved_model/reader.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"
#include "tensorflow/core/public/session.h"

namespace monolith {
namespace serving {
namespace {

constexpr char kDefaultSignature[] = "serving_default";

// A request may choose any subset of the outputs; those used most are few.
constexpr size_t kMaxCallables = 256;

// Runs are called short after so many of them, if the slowest of late took no longer than this.
constexpr int64_t kRunsToJudge = 16;
constexpr int64_t kShortNanos = 2'000'000;
// Parts of the names of ops that may wait for a server or another request, or go on for as long as
// a request says.
constexpr const char* kWaiting[] = {"RemotePredict", "Dequeue",  "Enqueue", "Barrier",
                                    "Stage",         "TakeMany", "Recv",    "PyFunc",
                                    "Dataset",       "Iterator", "While",   "NextIteration"};

bool MayWait(const tensorflow::GraphDef& graph) {
  const auto waits = [](const tensorflow::NodeDef& node) {
    return std::any_of(std::begin(kWaiting), std::end(kWaiting),
                       [&](const char* part) { return node.op().find(part) != std::string::npos; });
  };
  if (std::any_of(graph.node().begin(), graph.node().end(), waits)) return true;
  for (const tensorflow::FunctionDef& function : graph.library().function()) {
    if (std::any_of(function.node_def().begin(), function.node_def().end(), waits)) return true;
  }
  return false;
}

std::string KeyOf(const std::string& signature, const std::set<std::string>& outputs) {
  std::string key = signature;
  for (const std::string& alias : outputs) key += '\0' + alias;
  return key;
}

std::string NameOf(const std::string& signature) {
  return signature.empty() ? kDefaultSignature : signature;
}

// An error quotes no more of a request's names.
constexpr size_t kMaxNamed = 16;

template <typename Names>
std::string List(const Names& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", '" : "'") + name + "'";
  return text + "]";
}

// Names the inputs of `names` that the signature has not, and those that it has in addition.
Status CompareInputNames(const std::string& name, const tensorflow::SignatureDef& signature,
                         const std::vector<std::string>& sent) {
  const std::set<std::string> names(sent.begin(), sent.end());
  std::set<std::string> expected;
  std::set<std::string> surplus;
  std::set<std::string> missing;
  for (const auto& [alias, info] : signature.inputs()) {
    expected.insert(alias);
    if (names.count(alias) == 0) missing.insert(alias);
  }
  for (const std::string& alias : names) {
    if (expected.count(alias) == 0 && surplus.size() < kMaxNamed) surplus.insert(alias);
  }
  if (surplus.empty() && missing.empty()) return Status();
  return Status(Code::kInvalidArgument, "signature '" + name + "' takes " + List(expected) +
                                            ": missing " + List(missing) + ", surplus " +
                                            List(surplus));
}

Status CheckInput(const std::string& alias, const tensorflow::TensorInfo& info,
                  const tensorflow::Tensor& tensor) {
  if (info.dtype() != tensor.dtype()) {
    return Status(Code::kInvalidArgument,
                  "input '" + alias + "' is " + tensorflow::DataTypeString(tensor.dtype()) +
                      ", the signature wants " + tensorflow::DataTypeString(info.dtype()));
  }
  const tensorflow::PartialTensorShape wanted(info.tensor_shape());
  if (!wanted.IsCompatibleWith(tensor.shape())) {
    return Status(Code::kInvalidArgument, "input '" + alias + "' has shape " +
                                              tensor.shape().DebugString() +
                                              ", the signature wants " + wanted.DebugString());
  }
  return Status();
}

class CallableCall : public SessionCall {
 public:
  CallableCall(tensorflow::Session* session, tensorflow::Session::CallableHandle handle)
      : session_(session), handle_(handle) {}
  ~CallableCall() override { session_->ReleaseCallable(handle_).IgnoreError(); }

  Status Run(const std::vector<tensorflow::Tensor>& feeds,
             std::vector<tensorflow::Tensor>* fetches) override {
    return FromTensorFlow(session_->RunCallable(handle_, feeds, fetches, nullptr));
  }

 private:
  tensorflow::Session* const session_;
  const tensorflow::Session::CallableHandle handle_;
};

}  // namespace

// How long runs take. What runs at the same time note may be lost: the next slow one is noted
// again.
class Pace {
 public:
  // Remembers the slowest run, and forgets it by and by.
  void Note(std::chrono::nanoseconds time) {
    const int64_t runs = runs_.load(std::memory_order_relaxed);
    // The first one makes things ready.
    if (runs > 0) {
      const int64_t slowest = slowest_.load(std::memory_order_relaxed);
      slowest_.store(std::max<int64_t>(time.count(), slowest - slowest / 64),
                     std::memory_order_relaxed);
    }
    if (runs < kRunsToJudge) runs_.store(runs + 1, std::memory_order_relaxed);
  }

  bool is_short() const {
    return runs_.load(std::memory_order_relaxed) >= kRunsToJudge &&
           slowest_.load(std::memory_order_relaxed) <= kShortNanos;
  }

 private:
  std::atomic<int64_t> runs_{0};
  std::atomic<int64_t> slowest_{0};
};

class Servable::Impl {
 public:
  explicit Impl(const SessionSettings& settings) : settings_(settings) {}

  ~Impl() {
    if (bundle_.session == nullptr) return;
    for (const auto& [key, callable] : callables_) {
      bundle_.session->ReleaseCallable(callable.handle).IgnoreError();
    }
    bundle_.session->Close().IgnoreError();
  }

  Status Load(const std::string& path) {
    tensorflow::SessionOptions options;
    options.config.set_intra_op_parallelism_threads(static_cast<int>(settings_.intra_op_threads));
    options.config.set_inter_op_parallelism_threads(static_cast<int>(settings_.inter_op_threads));
    options.config.set_allow_soft_placement(true);
    options.config.mutable_gpu_options()->set_allow_growth(settings_.gpu_allow_growth);
    options.config.mutable_gpu_options()->set_per_process_gpu_memory_fraction(
        settings_.gpu_memory_fraction);
    const std::unordered_set<std::string> tags(settings_.tags.begin(), settings_.tags.end());
    if (!tensorflow::MaybeSavedModelDirectory(path)) {
      return Status(Code::kNotFound, path + " is not a SavedModel: it has no saved_model.pb");
    }
    Status status = ReadGraph(path, tags);
    if (status.ok()) status = FromTensorFlow(MakeSession(options, path));
    if (!status.ok()) return Status(status.code, "cannot load " + path + ": " + status.message);
    return Status();
  }

  Status MakeCall(const std::vector<std::string>& feeds, const std::vector<std::string>& fetches,
                  const std::vector<std::string>& targets, std::unique_ptr<SessionCall>* call) {
    tensorflow::CallableOptions options;
    for (const std::string& name : feeds) options.add_feed(name);
    for (const std::string& name : fetches) options.add_fetch(name);
    for (const std::string& name : targets) options.add_target(name);
    options.mutable_run_options()->set_inter_op_thread_pool(-1);
    tensorflow::Session::CallableHandle handle = 0;
    const Status status = FromTensorFlow(bundle_.session->MakeCallable(options, &handle));
    if (status.ok()) *call = std::make_unique<CallableCall>(bundle_.session.get(), handle);
    return status;
  }

  RunGate* MakeGate() {
    if (gate_ == nullptr) gate_ = std::make_unique<RunGate>();
    return gate_.get();
  }

  const RowLogNodes* row_log_nodes() const { return row_log_nodes_ ? &*row_log_nodes_ : nullptr; }
  const DenseNodes* dense_nodes() const { return dense_nodes_ ? &*dense_nodes_ : nullptr; }

  const tensorflow::protobuf::Map<std::string, tensorflow::SignatureDef>& signatures() const {
    return bundle_.meta_graph_def.signature_def();
  }

  Status Run(const std::string& signature_name, const Tensors& inputs,
             const std::vector<std::string>& output_filter, Tensors* outputs,
             const Servable& owner) {
    Status status = owner.Check(signature_name, inputs, output_filter);
    if (!status.ok()) return status;
    const tensorflow::SignatureDef* signature = nullptr;
    status = owner.FindSignature(signature_name, &signature);
    if (!status.ok()) return status;
    std::vector<tensorflow::Tensor> feeds;
    feeds.reserve(inputs.size());
    // `inputs` is sorted, and so are the feeds of a callable.
    for (const auto& [alias, tensor] : inputs) feeds.push_back(tensor);
    Callable callable;
    status = FindCallable(signature_name, *signature, {output_filter.begin(), output_filter.end()},
                          &callable);
    if (!status.ok()) return status;
    std::vector<tensorflow::Tensor> fetches;
    std::shared_lock<RunGate> pass;
    if (gate_ != nullptr) pass = std::shared_lock<RunGate>(*gate_);
    const auto start = std::chrono::steady_clock::now();
    status =
        FromTensorFlow(bundle_.session->RunCallable(callable.handle, feeds, &fetches, nullptr));
    if (pass.owns_lock()) pass.unlock();
    callable.pace->Note(std::chrono::steady_clock::now() - start);
    if (callable.once) bundle_.session->ReleaseCallable(callable.handle).IgnoreError();
    if (!status.ok()) return status;
    for (const auto& [alias, index] : callable.outputs) (*outputs)[alias] = fetches[index];
    return Status();
  }

  bool RunsAreShort(const std::string& key) const {
    if (may_wait_) return false;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = callables_.find(key);
    return found != callables_.end() && found->second.pace->is_short();
  }

 private:
  // These two do what LoadSavedModel does, with the graph rewritten before the session is made.
  Status ReadGraph(const std::string& path, const std::unordered_set<std::string>& tags) {
    tensorflow::MetaGraphDef* meta_graph = &bundle_.meta_graph_def;
    Status status =
        FromTensorFlow(tensorflow::ReadMetaGraphDefFromSavedModel(path, tags, meta_graph));
    if (!status.ok()) return status;
    const int64_t joined = FusePooling(meta_graph);
    if (joined > 0) LogInfo(path + ": " + std::to_string(joined) + " features are pooled together");
    may_wait_ = MayWait(meta_graph->graph_def());
    return settings_.follows_logs ? AddFollowers(path, meta_graph) : Status();
  }

  // Adds what the logs need that the export names.
  Status AddFollowers(const std::string& path, tensorflow::MetaGraphDef* meta_graph) {
    std::optional<SyncState> rows;
    std::optional<SyncState> dense;
    Status status = ReadSyncState(path, kRowState, &rows);
    if (status.ok()) status = ReadSyncState(path, kDenseState, &dense);
    if (status.ok() && rows) {
      status = AddRowLogNodes(rows->topic, meta_graph, &row_log_nodes_.emplace());
    }
    if (status.ok() && dense) status = AddDenseNodes(meta_graph, &dense_nodes_.emplace());
    return status;
  }

  tensorflow::Status MakeSession(const tensorflow::SessionOptions& options,
                                 const std::string& path) {
    TF_RETURN_IF_ERROR(
        tensorflow::LoadMetagraphIntoSession(options, bundle_.meta_graph_def, &bundle_.session));
    return tensorflow::RestoreSession(tensorflow::RunOptions(), bundle_.meta_graph_def, path,
                                      &bundle_.session);
  }

  struct Callable {
    tensorflow::Session::CallableHandle handle = 0;
    // Alias of an output -> its place among the fetches.
    std::vector<std::pair<std::string, size_t>> outputs;
    bool once = false;
    std::shared_ptr<Pace> pace;
  };

  Status FindCallable(const std::string& signature_name, const tensorflow::SignatureDef& signature,
                      const std::set<std::string>& wanted, Callable* result) {
    const std::string key = KeyOf(signature_name, wanted);
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      const auto found = callables_.find(key);
      if (found != callables_.end()) {
        *result = found->second;
        return Status();
      }
    }
    Callable callable;
    callable.pace = std::make_shared<Pace>();
    tensorflow::CallableOptions options;
    const std::map<std::string, tensorflow::TensorInfo> inputs(signature.inputs().begin(),
                                                               signature.inputs().end());
    for (const auto& [alias, info] : inputs) options.add_feed(info.name());
    std::map<std::string, size_t> places;
    for (const auto& [alias, info] : signature.outputs()) {
      if (!wanted.empty() && wanted.count(alias) == 0) continue;
      const auto [place, is_new] = places.emplace(info.name(), places.size());
      if (is_new) options.add_fetch(info.name());
      callable.outputs.emplace_back(alias, place->second);
    }
    options.mutable_run_options()->set_inter_op_thread_pool(settings_.inter_op_threads > 0 ? 0
                                                                                           : -1);
    const Status status = FromTensorFlow(bundle_.session->MakeCallable(options, &callable.handle));
    if (!status.ok()) return status;
    std::unique_lock<std::shared_mutex> lock(mutex_);
    callable.once = callables_.size() >= kMaxCallables || callables_.count(key) > 0;
    if (!callable.once) callables_[key] = callable;
    *result = callable;
    return Status();
  }

  const SessionSettings settings_;
  tensorflow::SavedModelBundle bundle_;
  bool may_wait_ = true;
  std::optional<RowLogNodes> row_log_nodes_;
  std::optional<DenseNodes> dense_nodes_;
  std::unique_ptr<RunGate> gate_;
  mutable std::shared_mutex mutex_;
  std::map<std::string, Callable> callables_;
};

Servable::Servable(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Servable::~Servable() = default;

Status Servable::Load(const std::string& path, const SessionSettings& settings,
                      std::unique_ptr<Servable>* servable) {
  auto impl = std::make_unique<Impl>(settings);
  const Status status = impl->Load(path);
  if (status.ok()) servable->reset(new Servable(std::move(impl)));
  return status;
}

Status Servable::Run(const std::string& signature, const Tensors& inputs,
                     const std::vector<std::string>& output_filter, Tensors* outputs) {
  return impl_->Run(signature, inputs, output_filter, outputs, *this);
}

const RowLogNodes* Servable::row_log_nodes() const { return impl_->row_log_nodes(); }

const DenseNodes* Servable::dense_nodes() const { return impl_->dense_nodes(); }

Status Servable::MakeCall(const std::vector<std::string>& feeds,
                          const std::vector<std::string>& fetches,
                          const std::vector<std::string>& targets,
                          std::unique_ptr<SessionCall>* call) {
  return impl_->MakeCall(feeds, fetches, targets, call);
}

RunGate* Servable::MakeGate() { return impl_->MakeGate(); }

bool Servable::RunsAreShort(const std::string& signature,
                            const std::vector<std::string>& output_filter) const {
  return impl_->RunsAreShort(KeyOf(signature, {output_filter.begin(), output_filter.end()}));
}

Status Servable::Check(const std::string& signature_name, const Tensors& inputs,
                       const std::vector<std::string>& output_filter) const {
  const tensorflow::SignatureDef* signature = nullptr;
  Status status = FindSignature(signature_name, &signature);
  if (!status.ok()) return status;
  bool complete = static_cast<int>(inputs.size()) == signature->inputs_size();
  for (const auto& [alias, tensor] : inputs) {
    const auto info = signature->inputs().find(alias);
    complete = complete && info != signature->inputs().end();
    if (!complete) break;
    status = CheckInput(alias, info->second, tensor);
    if (!status.ok()) return status;
  }
  if (!complete) {
    std::vector<std::string> names;
    for (const auto& [alias, tensor] : inputs) names.push_back(alias);
    return CompareInputNames(NameOf(signature_name), *signature, names);
  }
  for (const std::string& alias : output_filter) {
    if (signature->outputs().count(alias) > 0) continue;
    std::set<std::string> known;
    for (const auto& [name, info] : signature->outputs()) known.insert(name);
    return Status(Code::kInvalidArgument, "output_filter has '" + alias +
                                              "', the outputs of signature '" +
                                              NameOf(signature_name) + "' are " + List(known));
  }
  return Status();
}

Status Servable::CheckInputNames(const std::string& signature,
                                 const std::vector<std::string>& names) const {
  const tensorflow::SignatureDef* found = nullptr;
  const Status status = FindSignature(signature, &found);
  if (!status.ok()) return status;
  const bool fits = static_cast<int>(names.size()) == found->inputs_size() &&
                    std::all_of(names.begin(), names.end(), [&](const std::string& name) {
                      return found->inputs().count(name) > 0;
                    });
  return fits ? Status() : CompareInputNames(NameOf(signature), *found, names);
}

Status Servable::FindSignature(const std::string& name,
                               const tensorflow::SignatureDef** signature) const {
  const auto found = impl_->signatures().find(NameOf(name));
  if (found == impl_->signatures().end()) {
    return Status(Code::kInvalidArgument, "the model has no signature '" + NameOf(name) +
                                              "', only " + List(signature_names()));
  }
  *signature = &found->second;
  return Status();
}

std::vector<std::string> Servable::signature_names() const {
  std::set<std::string> names;
  for (const auto& [name, signature] : impl_->signatures()) {
    // Others are the loader's, not the model's.
    if (name.rfind("__saved_model", 0) != 0) names.insert(name);
  }
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace serving
}  // namespace monolith
