// Longer than 600 lines: one class, whose thread and requests share the states that a lock guards.
#include "monolith/serving/native/model/model_manager.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/warmup.h"

namespace monolith {
namespace serving {
namespace {

// The most versions in a status: a server that runs for months sees thousands.
constexpr size_t kMaxEndedVersions = 16;
constexpr size_t kMaxRemovedModels = 64;
constexpr std::chrono::milliseconds kUnloadCheck(20);
constexpr Clock::time_point kNever = Clock::time_point::max();

std::string Describe(const std::string& name, int64_t version) {
  return "{name: " + name + " version: " + std::to_string(version) + "}";
}

std::string StateName(api::ModelVersionStatus::State state) {
  return api::ModelVersionStatus::State_Name(state);
}

// Calls `function` with 0 to `count` - 1, in as many threads as are wanted, this one among them.
template <typename Function>
void RunForEach(size_t count, int64_t num_threads, const Function& function) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) function(i);
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < std::min(num_threads, static_cast<int64_t>(count)); ++i) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // If threads cannot be created, the others do their work.
    }
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

ModelManager::ModelManager(const ManagerSettings& settings)
    : settings_(settings), thread_([this] { Work(); }) {}

ModelManager::~ModelManager() {
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  // Followers call this manager, so they end before its members, and without its lock.
  std::vector<std::shared_ptr<Servable>> loaded;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    for (const auto& [name, model] : models_) {
      for (const auto& [number, version] : model.versions) {
        loaded.push_back(version.servable);
        loaded.push_back(version.catching_up);
      }
    }
    for (const Retired& retired : retired_) loaded.push_back(retired.servable);
  }
  for (const std::shared_ptr<Servable>& servable : loaded) {
    if (servable != nullptr && servable->follower() != nullptr) servable->follower()->Close();
  }
}

Status ModelManager::SetConfig(const api::ModelServerConfig& config, Clock::time_point deadline) {
  Status status = CheckConfig(config);
  if (!status.ok()) return status;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    std::set<std::string> names;
    for (const api::ModelConfig& model : config.model_config_list().config()) {
      names.insert(model.name());
      models_[model.name()].config = model;
      models_[model.name()].removed = false;
    }
    for (auto it = models_.begin(); it != models_.end();) {
      Model& model = it->second;
      if (names.count(it->first) == 0 && !model.removed) {
        model.removed = true;
        model.labels.clear();
        for (auto& [number, version] : model.versions) Retire(it->first, number, &version);
        LogInfo("Model '" + it->first + "' is no longer served");
      }
      const bool forget = model.removed && models_.size() > names.size() + kMaxRemovedModels;
      it = forget ? models_.erase(it) : std::next(it);
    }
  }
  {
    std::unique_lock<std::mutex> lock(wake_mutex_);
    const int64_t generation = ++config_generation_;
    wake_.notify_all();
    const auto done = [&] { return stopping_ || (done_generation_ >= generation && !IsLoading()); };
    if (deadline == Clock::time_point::max()) {
      reconciled_.wait(lock, done);
    } else if (!reconciled_.wait_until(lock, deadline, done)) {
      return Status(Code::kDeadlineExceeded, "the models are still being loaded");
    }
  }
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return FirstProblem();
}

Status ModelManager::FirstProblem() const {
  std::string problems;
  const auto add = [&](const std::string& text) {
    problems += (problems.empty() ? "" : "; ") + text;
  };
  for (const auto& [name, model] : models_) {
    if (model.removed) continue;
    if (!Serves(model)) {
      Status why = model.folder;
      for (const auto& [number, version] : model.versions) {
        if (!version.status.ok()) why = version.status;
        if (!version.note.empty()) why = Status(Code::kUnavailable, version.note);
      }
      add("model '" + name + "' has no version that is AVAILABLE" +
          (why.ok() ? "" : ": " + why.message));
    }
    for (const auto& [label, number] : model.config.version_labels()) {
      const auto found = model.labels.find(label);
      if (found == model.labels.end() || found->second != number) {
        add("label '" + label + "' of model '" + name + "' names version " +
            std::to_string(number) + ", which is not AVAILABLE");
      }
    }
  }
  return problems.empty() ? Status() : Status(Code::kFailedPrecondition, problems);
}

bool ModelManager::Serves(const Model& model) {
  return std::any_of(model.versions.begin(), model.versions.end(), [](const auto& version) {
    return version.second.state == api::ModelVersionStatus::AVAILABLE;
  });
}

bool ModelManager::IsLoading() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return std::any_of(models_.begin(), models_.end(), [this](const auto& named) {
    const Model& model = named.second;
    return std::any_of(model.versions.begin(), model.versions.end(), [&](const auto& numbered) {
      const Version& version = numbered.second;
      if (version.catching_up != nullptr) return true;
      const auto path = model.wanted.find(numbered.first);
      if (model.removed || path == model.wanted.end()) return false;
      // A version that is wanted again is loaded once it is unloaded.
      return version.state == api::ModelVersionStatus::LOADING ||
             version.state == api::ModelVersionStatus::UNLOADING ||
             LoadTime(version, path->second) == Clock::time_point::min();
    });
  });
}

bool ModelManager::SetLabels(Model* model) const {
  const auto& labels = model->config.version_labels();
  for (const auto& [label, number] : labels) {
    const auto found = model->versions.find(number);
    const bool available =
        found != model->versions.end() && found->second.state == api::ModelVersionStatus::AVAILABLE;
    if (!available && !settings_.labels_for_unavailable) return false;
  }
  model->labels = std::map<std::string, int64_t>(labels.begin(), labels.end());
  return true;
}

Status ModelManager::FindLabel(const Model& model, const api::ModelSpec& spec, int64_t* number) {
  const auto found = model.labels.find(spec.version_label());
  if (found == model.labels.end()) {
    return Status(Code::kNotFound,
                  "Model " + spec.name() + " has no version labelled " + spec.version_label());
  }
  *number = found->second;
  return Status();
}

bool ModelManager::Knows(const std::string& name) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = models_.find(name);
  return found != models_.end() && !found->second.removed;
}

std::map<std::string, bool> ModelManager::Availability() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  std::map<std::string, bool> available;
  for (const auto& [name, model] : models_) {
    if (!model.removed) available[name] = Serves(model);
  }
  return available;
}

void ModelManager::Work() {
  const bool polls = settings_.poll_seconds > 0;
  int64_t looked_generation = -1;
  Clock::time_point next_look;
  while (true) {
    int64_t generation = 0;
    {
      std::lock_guard<std::mutex> lock(wake_mutex_);
      if (stopping_) return;
      generation = config_generation_;
      progressed_ = false;
    }
    const bool look = generation != looked_generation || Clock::now() >= next_look;
    Reconcile(look);
    bool waits_for_requests = UnloadRetired();
    settings_.on_change();
    if (look) {
      looked_generation = generation;
      next_look = polls ? Clock::now() + std::chrono::seconds(settings_.poll_seconds) : kNever;
    }
    Clock::time_point next = std::min(next_look, NextLoadTime());
    std::unique_lock<std::mutex> lock(wake_mutex_);
    done_generation_ = generation;
    reconciled_.notify_all();
    const auto woken = [&] { return stopping_ || progressed_ || config_generation_ != generation; };
    while (!woken() && Clock::now() < next) {
      if (waits_for_requests) {
        wake_.wait_for(lock, kUnloadCheck);
        lock.unlock();
        waits_for_requests = UnloadRetired();
        // A version that was wanted again before it was unloaded can be loaded now.
        next = std::min(next_look, NextLoadTime());
        lock.lock();
      } else if (next == kNever) {
        wake_.wait(lock, woken);
      } else {
        wake_.wait_until(lock, next);
      }
    }
  }
}

void ModelManager::Reconcile(bool look) {
  std::vector<api::ModelConfig> configs;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    for (const auto& [name, model] : models_) {
      if (!model.removed) configs.push_back(model.config);
    }
  }
  RunForEach(configs.size(), settings_.load_threads,
             [&](size_t i) { ReconcileModel(configs[i].name(), configs[i], look); });
}

void ModelManager::ReconcileModel(const std::string& name, const api::ModelConfig& config,
                                  bool look) {
  Status folder;
  std::map<int64_t, std::string> wanted;
  std::map<int64_t, std::string> fingerprints;
  if (look) {
    std::map<int64_t, std::string> paths;
    folder = ListVersions(config.base_path(), &paths);
    if (folder.ok() && paths.empty()) {
      folder = Status(Code::kNotFound,
                      "no versions of model '" + name + "' under base path " + config.base_path());
    }
    for (const int64_t number : WantedVersions(config.model_version_policy(), paths)) {
      wanted[number] = paths[number];
    }
    // Without the lock, for which requests wait: a file system may be slow.
    for (const int64_t number : FailedVersions(name)) {
      if (wanted.count(number) > 0) fingerprints[number] = Fingerprint(wanted[number]);
    }
  }
  std::vector<int64_t> to_load;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto found = models_.find(name);
    if (found == models_.end() || found->second.removed) return;
    Model& model = found->second;
    if (look) {
      if (!folder.ok() && folder.message != model.folder.message) LogWarning(folder.message);
      model.folder = folder;
      model.wanted = wanted;
    } else {
      wanted = model.wanted;
    }
    for (const auto& [number, path] : wanted) {
      Version& version = model.versions[number];
      if (look && !version.status.ok() && version.fingerprint != fingerprints[number]) {
        version.tries = 0;
        version.retry_at = Clock::time_point::min();
      }
      if (LoadTime(version, path) <= Clock::now()) to_load.push_back(number);
    }
  }
  // The newest first, which most requests ask for.
  for (auto it = to_load.rbegin(); it != to_load.rend(); ++it) {
    LoadVersion(name, config.base_path(), *it, wanted[*it]);
    settings_.on_change();
  }

  std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto found = models_.find(name);
  if (found == models_.end() || found->second.removed) return;
  std::map<int64_t, Version>& versions = found->second.versions;
  // Old versions serve until a new one does; if the folder was emptied, they stay.
  const bool new_serves = std::any_of(wanted.begin(), wanted.end(), [&](const auto& item) {
    return versions[item.first].state == api::ModelVersionStatus::AVAILABLE;
  });
  size_t ended = 0;
  for (auto it = versions.end(); it != versions.begin();) {
    --it;
    if (wanted.count(it->first) > 0) continue;
    // No request can miss a version that never answered.
    if (it->second.state == api::ModelVersionStatus::LOADING && it->second.catching_up != nullptr) {
      Retire(name, it->first, &it->second);
    }
    if (new_serves && it->second.state == api::ModelVersionStatus::AVAILABLE) {
      Retire(name, it->first, &it->second);
    }
    if (it->second.state == api::ModelVersionStatus::END && ++ended > kMaxEndedVersions) {
      it = versions.erase(it);
    }
  }
  SetLabels(&found->second);
}

std::vector<int64_t> ModelManager::FailedVersions(const std::string& name) const {
  std::vector<int64_t> failed;
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = models_.find(name);
  if (found == models_.end()) return failed;
  for (const auto& [number, version] : found->second.versions) {
    if (!version.status.ok()) failed.push_back(number);
  }
  return failed;
}

Clock::time_point ModelManager::LoadTime(const Version& version, const std::string& path) const {
  switch (version.state) {
    case api::ModelVersionStatus::LOADING:
    case api::ModelVersionStatus::UNLOADING:
      return kNever;
    case api::ModelVersionStatus::AVAILABLE:
      // Its folder may have been replaced, and the new one may have failed to load.
      if (version.path == path && version.status.ok()) return kNever;
      break;
    default:
      break;
  }
  if (version.path != path || version.status.ok()) return Clock::time_point::min();
  return version.tries <= settings_.load_retries ? version.retry_at : kNever;
}

Clock::time_point ModelManager::NextLoadTime() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  Clock::time_point next = kNever;
  for (const auto& [name, model] : models_) {
    if (model.removed) continue;
    for (const auto& [number, path] : model.wanted) {
      const auto version = model.versions.find(number);
      if (version != model.versions.end()) next = std::min(next, LoadTime(version->second, path));
    }
  }
  return next;
}

void ModelManager::LoadVersion(const std::string& name, const std::string& base_path,
                               int64_t number, const std::string& path) {
  const std::string fingerprint = Fingerprint(path);
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto found = models_.find(name);
    if (found == models_.end() || found->second.removed) return;
    Version& version = found->second.versions[number];
    if (version.state != api::ModelVersionStatus::AVAILABLE) {
      version.state = api::ModelVersionStatus::LOADING;
    }
    if (version.path != path || version.fingerprint != fingerprint) version.tries = 0;
    ++version.tries;
  }
  std::unique_ptr<Servable> loaded;
  Status status;
  try {
    status = Servable::Load(path, settings_.session, &loaded);
    if (status.ok() && settings_.warm_up) status = WarmUp(path, loaded.get());
    if (status.ok() && settings_.set_follower) status = settings_.set_follower(path, loaded.get());
  } catch (const std::exception& error) {
    status = Status(Code::kInternal, "cannot load " + path + ": " + error.what());
  }
  const std::shared_ptr<Servable> servable = status.ok() ? std::move(loaded) : nullptr;

  std::unique_lock<std::shared_mutex> lock(mutex_);
  ++(status.ok() ? loads_ : load_errors_);
  const auto found = models_.find(name);
  // It may have been removed, or moved, meanwhile.
  if (found == models_.end()) return;
  Version& version = found->second.versions[number];
  if (found->second.removed || found->second.config.base_path() != base_path) {
    if (version.servable == nullptr) version = Version();
    if (found->second.removed) version.state = api::ModelVersionStatus::END;
    return;
  }
  version.path = path;
  version.fingerprint = fingerprint;
  version.status = status;
  if (!status.ok()) {
    version.retry_at = Clock::now() + settings_.retry_interval;
    LogError("Loading " + Describe(name, number) + " failed: " + status.message);
    if (version.servable == nullptr) version.state = api::ModelVersionStatus::END;
    return;
  }
  Follower* const follower = servable->follower();
  if (follower == nullptr) return SetAvailable(name, number, servable, &version);
  if (version.catching_up != nullptr) {
    retired_.push_back({name, -1, std::move(version.catching_up)});
  }
  version.catching_up = servable;
  version.note = follower->reason();
  // Without the lock, as it may call back at once. `servable` lives until this function ends.
  lock.unlock();
  follower->Start(
      [this, name, number, loaded = servable.get()] { NoteProgress(name, number, loaded); });
}

void ModelManager::SetAvailable(const std::string& name, int64_t number,
                                std::shared_ptr<Servable> servable, Version* version) {
  if (version->servable != nullptr) retired_.push_back({name, -1, std::move(version->servable)});
  version->servable = std::move(servable);
  version->state = api::ModelVersionStatus::AVAILABLE;
  LogInfo("Serving " + Describe(name, number) + " from " + version->path);
}

void ModelManager::NoteProgress(const std::string& name, int64_t number, const Servable* servable) {
  bool caught_up = false;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto model = models_.find(name);
    if (model == models_.end()) return;
    const auto found = model->second.versions.find(number);
    if (found == model->second.versions.end()) return;
    Version& version = found->second;
    const bool is_new = version.catching_up.get() == servable;
    if (!is_new && version.servable.get() != servable) return;
    version.note = servable->follower()->reason();
    caught_up = is_new && servable->follower()->is_caught_up();
    if (caught_up) SetAvailable(name, number, std::move(version.catching_up), &version);
  }
  if (!caught_up) return;
  settings_.on_change();
  {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    progressed_ = true;
  }
  wake_.notify_all();
  reconciled_.notify_all();
}

void ModelManager::Retire(const std::string& name, int64_t number, Version* version) {
  if (version->servable == nullptr && version->catching_up == nullptr) return;
  version->state = api::ModelVersionStatus::UNLOADING;
  version->note.clear();
  for (std::shared_ptr<Servable>* servable : {&version->servable, &version->catching_up}) {
    if (*servable != nullptr) retired_.push_back({name, number, std::move(*servable)});
    servable->reset();
  }
}

bool ModelManager::UnloadRetired() {
  std::vector<Retired> unused;
  {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    for (auto it = retired_.begin(); it != retired_.end();) {
      // No request can find it any more, so nobody takes another reference.
      if (it->servable.use_count() > 1) {
        ++it;
        continue;
      }
      unused.push_back(std::move(*it));
      it = retired_.erase(it);
    }
  }
  RunForEach(unused.size(), settings_.unload_threads, [&](size_t i) {
    const Retired& retired = unused[i];
    unused[i].servable.reset();
    LogInfo("Unloaded " + Describe(retired.model, retired.version));
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto model = models_.find(retired.model);
    if (model == models_.end()) return;
    const auto version = model->second.versions.find(retired.version);
    if (version == model->second.versions.end()) return;
    if (version->second.state == api::ModelVersionStatus::UNLOADING) {
      version->second.state = api::ModelVersionStatus::END;
    }
  });
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return !retired_.empty();
}

Status ModelManager::Find(const api::ModelSpec& spec, std::shared_ptr<Servable>* servable,
                          int64_t* number) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto model = models_.find(spec.name());
  const bool by_label = spec.version_choice_case() == api::ModelSpec::kVersionLabel;
  const bool by_number = spec.version_choice_case() == api::ModelSpec::kVersion;
  const auto not_found = [&](const std::string& which) {
    return Status(Code::kNotFound, "Servable not found for request: " + which);
  };
  if (model == models_.end() || model->second.removed) {
    return not_found(by_number ? "Specific(" + spec.name() + ", " +
                                     std::to_string(spec.version().value()) + ")"
                               : "Latest(" + spec.name() + ")");
  }
  const std::map<int64_t, Version>& versions = model->second.versions;
  auto found = versions.end();
  if (by_label || by_number) {
    int64_t wanted = spec.version().value();
    if (by_label) {
      const Status status = FindLabel(model->second, spec, &wanted);
      if (!status.ok()) return status;
    }
    found = versions.find(wanted);
    const bool gone = found != versions.end() && found->second.status.ok() &&
                      found->second.state == api::ModelVersionStatus::END;
    if (found == versions.end() || gone) {
      return not_found("Specific(" + spec.name() + ", " + std::to_string(wanted) + ")");
    }
  } else {
    for (auto it = versions.begin(); it != versions.end(); ++it) {
      if (it->second.state == api::ModelVersionStatus::AVAILABLE) found = it;
    }
    if (found == versions.end() && versions.empty()) {
      return Status(Code::kFailedPrecondition,
                    "model '" + spec.name() + "' has no version that is AVAILABLE" +
                        (model->second.folder.ok() ? "" : ": " + model->second.folder.message));
    }
    if (found == versions.end()) found = std::prev(versions.end());
  }
  const Version& version = found->second;
  if (version.state != api::ModelVersionStatus::AVAILABLE) {
    return Status(Code::kFailedPrecondition,
                  "version " + std::to_string(found->first) + " of model '" + spec.name() +
                      "' is " + StateName(version.state) + ", not AVAILABLE" +
                      (version.status.ok() ? "" : ": " + version.status.message) +
                      (version.note.empty() ? "" : ": " + version.note));
  }
  *servable = version.servable;
  *number = found->first;
  return Status();
}

Status ModelManager::GetStatus(const api::ModelSpec& spec,
                               api::GetModelStatusResponse* response) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto model = models_.find(spec.name());
  if (model == models_.end()) {
    return Status(Code::kNotFound, "Could not find any versions of model " + spec.name());
  }
  int64_t wanted = -1;
  if (spec.version_choice_case() == api::ModelSpec::kVersion) wanted = spec.version().value();
  if (spec.version_choice_case() == api::ModelSpec::kVersionLabel) {
    const Status status = FindLabel(model->second, spec, &wanted);
    if (!status.ok()) return status;
  }
  // The newest first, as TensorFlow Serving lists them.
  const auto& versions = model->second.versions;
  for (auto it = versions.rbegin(); it != versions.rend(); ++it) {
    if (wanted >= 0 && it->first != wanted) continue;
    api::ModelVersionStatus* status = response->add_model_version_status();
    status->set_version(it->first);
    status->set_state(it->second.state);
    const bool has_note = it->second.status.ok() && !it->second.note.empty();
    const Status told = has_note ? Status(Code::kUnavailable, it->second.note) : it->second.status;
    status->mutable_status()->set_error_code(static_cast<int>(told.code));
    status->mutable_status()->set_error_message(told.message);
  }
  if (response->model_version_status_size() == 0) {
    return Status(Code::kNotFound, wanted >= 0
                                       ? "Could not find version " + std::to_string(wanted) +
                                             " of model " + spec.name()
                                       : "Could not find any versions of model " + spec.name());
  }
  return Status();
}

ModelManager::Counts ModelManager::counts() const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  Counts counts;
  counts.loads = loads_;
  counts.load_errors = load_errors_;
  for (const auto& [name, model] : models_) {
    const Servable* newest = nullptr;
    bool answers = false;
    for (const auto& [number, version] : model.versions) {
      if (version.state != api::ModelVersionStatus::END || !version.status.ok()) {
        counts.versions.emplace_back(name, number, version.state);
      }
      // A version that answers says more than a newer one that does not.
      if (version.servable != nullptr) newest = version.servable.get();
      if (version.catching_up != nullptr && !answers) newest = version.catching_up.get();
      answers = answers || version.servable != nullptr;
    }
    if (newest != nullptr && newest->follower() != nullptr) {
      counts.followers.emplace_back(name, newest->follower()->Samples());
    }
  }
  return counts;
}

}  // namespace serving
}  // namespace monolith
