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
#include "tensorflow/core/protobuf/config.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"
#include "tensorflow/core/public/session.h"

namespace monolith {
namespace serving {
namespace {

constexpr char kDefaultSignature[] = "serving_default";

// A request may choose any subset of the outputs, but few subsets are used.
constexpr size_t kMaxCallables = 256;

// Runs are called short from this number on, if the slowest of late took no longer than
// kShortNanos.
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

std::string KeyOf(const Signature& signature, const std::set<std::string>& outputs) {
  std::string key = signature.name();
  for (const std::string& alias : outputs) key += '\0' + alias;
  return key;
}

}  // namespace

// How long runs take. Runs that note their time at once may overwrite each other: the next slow one
// is noted again.
class Pace {
 public:
  // Remembers the slowest run, and gradually forgets it.
  void Note(std::chrono::nanoseconds time) {
    const int64_t runs = runs_.load(std::memory_order_relaxed);
    // The first run includes initialization.
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

SessionCall::~SessionCall() { session_->ReleaseCallable(handle_).IgnoreError(); }

Status SessionCall::Run(const std::vector<tensorflow::Tensor>& feeds,
                        std::vector<tensorflow::Tensor>* fetches) {
  return FromTensorFlow(session_->RunCallable(handle_, feeds, fetches, nullptr));
}

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
    for (const auto& [name, definition] : bundle_.meta_graph_def.signature_def()) {
      // Others are the loader's, not the model's.
      if (name.rfind("__saved_model", 0) == 0) continue;
      signatures_.try_emplace(name, name, &definition);
    }
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
    if (status.ok()) *call = std::make_unique<SessionCall>(bundle_.session.get(), handle);
    return status;
  }

  RunGate* MakeGate() {
    if (gate_ == nullptr) gate_ = std::make_unique<RunGate>();
    return gate_.get();
  }

  const RowLogNodes* row_log_nodes() const { return row_log_nodes_ ? &*row_log_nodes_ : nullptr; }
  const DenseNodes* dense_nodes() const { return dense_nodes_ ? &*dense_nodes_ : nullptr; }

  const std::map<std::string, Signature>& signatures() const { return signatures_; }

  Status Run(const Signature& signature, const Tensors& inputs,
             const std::vector<std::string>& output_filter, Tensors* outputs) {
    Status status = signature.Check(inputs, output_filter);
    if (!status.ok()) return status;
    std::vector<tensorflow::Tensor> feeds;
    feeds.reserve(inputs.size());
    // `inputs` is sorted, and so are the feeds of a callable.
    for (const auto& [alias, tensor] : inputs) feeds.push_back(tensor);
    Callable callable;
    status = FindCallable(signature, {output_filter.begin(), output_filter.end()}, &callable);
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
    if (may_wait_ || (gate_ != nullptr && gate_->is_closed())) return false;
    std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = callables_.find(key);
    return found != callables_.end() && found->second.pace->is_short();
  }

 private:
  // These two do the work of LoadSavedModel, but rewrite the graph before the session is made.
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

  // Adds the ops for the logs that the export names.
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

  Status FindCallable(const Signature& signature, const std::set<std::string>& wanted,
                      Callable* result) {
    const std::string key = KeyOf(signature, wanted);
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
    const tensorflow::SignatureDef& definition = signature.definition();
    const std::map<std::string, tensorflow::TensorInfo> inputs(definition.inputs().begin(),
                                                               definition.inputs().end());
    for (const auto& [alias, info] : inputs) options.add_feed(info.name());
    std::map<std::string, size_t> places;
    for (const auto& [alias, info] : definition.outputs()) {
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
  // The model's own, by name.
  std::map<std::string, Signature> signatures_;
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

Status Servable::Run(const Signature& signature, const Tensors& inputs,
                     const std::vector<std::string>& output_filter, Tensors* outputs) {
  return impl_->Run(signature, inputs, output_filter, outputs);
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

bool Servable::RunsAreShort(const Signature& signature,
                            const std::vector<std::string>& output_filter) const {
  return impl_->RunsAreShort(KeyOf(signature, {output_filter.begin(), output_filter.end()}));
}

Status Servable::FindSignature(const std::string& name, const Signature** signature) const {
  const std::string wanted = name.empty() ? kDefaultSignature : name;
  const auto found = signatures().find(wanted);
  if (found != signatures().end()) {
    *signature = &found->second;
    return Status();
  }
  std::set<std::string> names;
  for (const auto& [known, existing] : signatures()) names.insert(known);
  return Status(Code::kInvalidArgument,
                "the model has no signature '" + wanted + "', only " + ListNames(names));
}

const std::map<std::string, Signature>& Servable::signatures() const { return impl_->signatures(); }

}  // namespace serving
}  // namespace monolith
