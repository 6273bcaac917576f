#include "monolith/native_training/runtime/ops/data/datasets/flow_group.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

struct Groups {
  mutex mu;
  std::vector<std::shared_ptr<FlowGroup>> all TF_GUARDED_BY(mu);  // the newest last
};

Groups* AllGroups() {
  static Groups* const groups = new Groups;  // iterators may outlive static objects
  return groups;
}

constexpr char kPatienceVariable[] = "MONOLITH_FLOW_PATIENCE_SECONDS";

// How long flows wait for an iterator that is missing.
std::chrono::milliseconds Patience() {
  constexpr int64_t kDefaultSeconds = 10;
  constexpr int64_t kMaxSeconds = 7 * 24 * 3600;
  int64_t seconds = kDefaultSeconds;
  const char* const text = std::getenv(kPatienceVariable);
  if (text != nullptr && (!absl::SimpleAtoi(text, &seconds) || seconds < 1)) {
    LOG_FIRST_N(ERROR, 1) << kPatienceVariable << " is '" << text << "', want a number of seconds";
    seconds = kDefaultSeconds;
  }
  return std::chrono::seconds(std::min(seconds, kMaxSeconds));
}

thread_local FlowHome* current_home = nullptr;
// Those of the merger that this thread reads for.
thread_local FlowWaits* current_waits = nullptr;

}  // namespace

FlowHome::Scope::Scope(FlowHome* home) : outer_(current_home) {
  if (outer_ == nullptr) current_home = home;
}

FlowHome::Scope::~Scope() { current_home = outer_; }

FlowHome::ThreadScope::ThreadScope(FlowHome* home) : waits_(home->waits()), scope_(home) {
  current_waits = waits_.get();
}

FlowHome::ThreadScope::~ThreadScope() {
  current_waits = nullptr;
  waits_->RemoveThread();
}

void FlowHome::Keep(std::unique_ptr<FlowReader> reader) {
  std::vector<std::unique_ptr<FlowReader>> finished;  // outlives the lock
  mutex_lock lock(mu_);
  for (std::unique_ptr<FlowReader>& kept : readers_) {
    if (kept->is_finished()) finished.push_back(std::move(kept));
  }
  readers_.erase(std::remove(readers_.begin(), readers_.end(), nullptr), readers_.end());
  readers_.push_back(std::move(reader));
}

FlowHome* FlowHome::Current() { return current_home; }

void FlowWaits::AddThread() {
  mutex_lock lock(mu_);
  ++threads_;
}

void FlowWaits::RemoveThread() {
  {
    mutex_lock lock(mu_);
    --threads_;
  }
  Check();
}

void FlowWaits::Add(std::shared_ptr<FlowGroup> group, size_t flow) {
  {
    mutex_lock lock(mu_);
    waiting_.push_back({std::move(group), flow});
  }
  Check();
}

void FlowWaits::Remove(const std::shared_ptr<FlowGroup>& group, size_t flow) {
  mutex_lock lock(mu_);
  waiting_.erase(std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& waiting) {
    return waiting.group == group && waiting.flow == flow;
  }));
}

void FlowWaits::Check() {
  std::vector<Waiting> stuck;
  {
    mutex_lock lock(mu_);
    const auto is_stuck = [](const Waiting& waiting) {
      return waiting.group->IsStuck(waiting.flow);
    };
    if (waiting_.size() < threads_ || !std::all_of(waiting_.begin(), waiting_.end(), is_stuck)) {
      return;
    }
    stuck = waiting_;
  }
  for (const Waiting& waiting : stuck) waiting.group->Free();
}

void FlowWaits::NoteReader(const FlowName& name) {
  mutex_lock lock(mu_);
  if (std::find(read_.begin(), read_.end(), name) == read_.end()) read_.push_back(name);
}

bool FlowWaits::HadReader(const FlowName& name) {
  mutex_lock lock(mu_);
  return std::find(read_.begin(), read_.end(), name) != read_.end();
}

FlowGroup::FlowGroup(const FlowName& name, int64_t max_queue_size, const FlowHome* home,
                     const void* runtime)
    : name_(name),
      home_(home),
      runtime_(runtime),
      waits_(home == nullptr ? nullptr : home->waits()),
      queues_(
          name.data_flow.size(), max_queue_size,
          [this, max_queue_size](size_t flow, bool full) {
            return EndOfPatience(flow, full, max_queue_size);
          },
          Patience()),
      live_(name.data_flow.size()),
      joined_(name.data_flow.size()) {}

std::optional<FlowItem> FlowGroup::EndOfPatience(size_t flow, bool full, int64_t max_queue_size) {
  std::string problem;
  if (full) {
    problem = absl::StrCat("has ", max_queue_size, " samples waiting and no iterator takes them");
  } else if (!has_reader_ && !MayGetReader()) {
    problem = "waits for an iterator over index 0, which reads the input";
  } else {
    return std::nullopt;
  }
  finished_ = true;
  return FlowItem{errors::FailedPrecondition("flow ", flow, " ('", name_.data_flow[flow], "') ",
                                             problem, ": nobody came in ", Patience().count(),
                                             " ms (the environment variable ", kPatienceVariable,
                                             " is the number of seconds to wait)"),
                  Tensor()};
}

bool FlowGroup::MayGetReader() {
  Groups* const groups = AllGroups();
  // The thread that holds that lock may wait for the one that this is called under.
  if (!groups->mu.try_lock()) return true;
  const bool found = std::any_of(
      groups->all.begin(), groups->all.end(), [this](const std::shared_ptr<FlowGroup>& group) {
        return group->name_.data_flow == name_.data_flow && (group->live_[0] || group->has_reader_);
      });
  groups->mu.unlock();
  return found;
}

void FlowGroup::Free() {
  if (has_reader_) {
    queues_.KeepUnopened();
  } else if (waits_->HadReader(name_)) {
    abandoned_ = true;
    finished_ = true;
    queues_.EndAll();
  }
}

bool FlowGroup::IsOver(bool is_newest) const {
  const auto is_set = [](bool bit) { return bit; };
  if (std::any_of(live_.begin(), live_.end(), is_set) || has_reader_) return false;
  // Samples that were read for a flow that was never opened are kept: flows may be read one after
  // the other.
  return home_ != nullptr || !finished_ || !is_newest ||
         std::all_of(joined_.begin(), joined_.end(), is_set);
}

std::shared_ptr<FlowGroup> FlowGroup::Join(const FlowName& name, size_t index, const void* runtime,
                                           int64_t max_queue_size) {
  const FlowHome* const home = FlowHome::Current();
  Groups* const groups = AllGroups();
  mutex_lock lock(groups->mu);
  std::shared_ptr<FlowGroup> found;
  int found_rank = 0;
  for (auto it = groups->all.rbegin(); it != groups->all.rend(); ++it) {
    const FlowGroup& group = **it;
    if (group.name_.data_flow != name.data_flow || group.joined_[index]) continue;
    if (index == 0 && group.finished_) continue;  // its flows have given up
    const bool same_name = group.name_.shared_name == name.shared_name;
    int rank = 0;
    if (home != nullptr) {
      // The input may have been written down once per flow.
      if (group.home_ == home) rank = same_name ? 2 : 1;
    } else if (same_name) {
      // An iterator that is made while its merger runs has lost sight of it.
      if (group.runtime_ == runtime) {
        rank = 2;
      } else if (group.home_ == nullptr) {
        rank = 1;
      }
    }
    if (rank <= found_rank) continue;
    found = *it;
    found_rank = rank;
  }
  if (found == nullptr) {
    found.reset(new FlowGroup(name, max_queue_size, home, runtime));
    groups->all.push_back(found);
  }
  found->live_[index] = true;
  found->joined_[index] = true;
  found->queues_.Open(index);
  return found;
}

void FlowGroup::Leave(const std::shared_ptr<FlowGroup>& group, size_t index) {
  group->queues_.Leave(index);
  {
    mutex_lock lock(AllGroups()->mu);
    group->live_[index] = false;
  }
  Prune();
}

void FlowGroup::Prune() {
  std::vector<std::shared_ptr<FlowGroup>> over;  // outlives the lock
  Groups* const groups = AllGroups();
  mutex_lock lock(groups->mu);
  auto& all = groups->all;
  for (size_t i = all.size(); i-- > 0;) {
    const bool is_newest =
        std::none_of(all.begin() + i + 1, all.end(),
                     [&all, i](const auto& newer) { return newer->name_ == all[i]->name_; });
    if (!all[i]->IsOver(is_newest)) continue;
    over.push_back(std::move(all[i]));
    all.erase(all.begin() + i);
  }
}

Popped FlowGroup::Pop(const std::shared_ptr<FlowGroup>& group, size_t index, FlowItem* item) {
  group->Start();
  const bool is_counted = group->waits_ != nullptr && group->waits_.get() == current_waits &&
                          group->queues_.WaitsForItem(index);
  if (is_counted) group->waits_->Add(group, index);
  const Popped popped = group->queues_.Pop(index, item);
  if (is_counted) group->waits_->Remove(group, index);
  return popped;
}

void FlowGroup::Start() {
  mutex_lock lock(mu_);
  wanted_ = true;
  if (reader_ != nullptr) reader_->StartThread();
}

void FlowGroup::Attach(FlowReader* reader) {
  if (waits_ != nullptr) waits_->NoteReader(name_);
  mutex_lock lock(mu_);
  reader_ = reader;
  has_reader_ = true;
  if (wanted_) reader_->StartThread();
}

void FlowGroup::Detach() {
  mutex_lock lock(mu_);
  reader_ = nullptr;
  has_reader_ = false;
}

FlowReader::FlowReader(std::shared_ptr<FlowGroup> group, FlowRoute route)
    : group_(std::move(group)), route_(std::move(route)) {}

FlowReader::~FlowReader() {
  if (!attached_) return;
  group_->Detach();
  cancellation_->StartCancel();
  Close();  // also wakes the thread if it waits for room
  thread_.reset();
  input_.reset();
  FlowGroup::Prune();
}

Status FlowReader::Open(data::IteratorContext* ctx, const data::IteratorBase* parent,
                        const data::DatasetBase* input, const std::string& prefix) {
  if (group_->abandoned_) {
    return errors::FailedPrecondition(
        "the iterator over flow 0 ('", group_->name().data_flow[0],
        "'), which reads the input of all flows, was made after the others had waited for it and "
        "had ended: merge flow 0 directly, not behind a stage that opens it in its own thread");
  }
  cancellation_ = std::make_unique<CancellationManager>(ctx->cancellation_manager());
  data::IteratorContext::Params params(ctx);
  params.cancellation_manager = cancellation_.get();
  ctx_ = std::make_unique<data::IteratorContext>(std::move(params));
  TF_RETURN_IF_ERROR(input->MakeIterator(ctx_.get(), parent, prefix, &input_));
  attached_ = true;
  group_->Attach(this);
  return OkStatus();
}

void FlowReader::StartThread() {
  if (thread_ == nullptr) thread_ = ctx_->StartThread("split_flow", [this] { Run(); });
}

bool FlowReader::Push(size_t flow, FlowItem item) {
  FlowQueues* const queues = group_->queues();
  if (queues->WaitsForConsumer(flow)) {
    group_->is_blocked_ = true;
    if (group_->waits_ != nullptr) group_->waits_->Check();
  }
  const bool pushed = queues->Push(flow, std::move(item));
  group_->is_blocked_ = false;
  return pushed;
}

void FlowReader::Run() {
  FlowQueues* const queues = group_->queues();
  while (!WasCancelled(cancellation_.get())) {
    std::vector<Tensor> element;
    bool end = false;
    Status status = input_->GetNext(ctx_.get(), &element, &end);
    if (WasCancelled(cancellation_.get())) break;
    if (status.ok() && end) {
      queues->EndAll();
      group_->finished_ = true;
      return;
    }
    size_t flow = 0;
    if (status.ok()) status = CheckSampleElement(element);
    if (status.ok()) status = CatchExceptions([&] { return route_(element[0], &flow); });
    if (status.ok()) {
      if (!Push(flow, {OkStatus(), std::move(element[0])})) return;
      continue;
    }
    for (flow = 0; flow < queues->size(); ++flow) {
      if (!Push(flow, {status, Tensor()})) return;
    }
  }
  Close();
}

void FlowReader::Close() {
  group_->finished_ = true;
  group_->queues()->Fail(
      {errors::FailedPrecondition(
           "the iterator over flow 0 ('", group_->name().data_flow[0],
           "'), which reads the input of all flows, was closed before the end of the input"),
       Tensor()});
}

}  // namespace monolith_tf
}  // namespace tensorflow
