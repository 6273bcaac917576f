// Loads the versions of models, and keeps them in step with configuration and files.
//
// One thread looks at the folders, loads and warms up new versions, and only then unloads old ones:
// a request finds a version as long as one could be loaded. A version in use is unloaded after its
// last request.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_MODEL_MANAGER_H_
#define MONOLITH_SERVING_NATIVE_MODEL_MODEL_MANAGER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/model/version_policy.h"
#include "monolith/serving/native/net/event_loop.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

struct ManagerSettings {
  SessionSettings session;
  // The interval between looks at the folders; 0 or less: only when the configuration changes.
  int64_t poll_seconds = 1;
  bool warm_up = true;
  // How often a failed version is tried again before its files change, and how long after a
  // failure; both do not depend on whether folders are looked at.
  int64_t load_retries = 5;
  std::chrono::microseconds retry_interval{60'000'000};
  // How many versions are loaded, and unloaded, at a time; less than 2 for one.
  int64_t load_threads = 1;
  int64_t unload_threads = 1;
  // Whether a label may name a version that does not answer.
  bool labels_for_unavailable = false;
  // Attaches a follower to a loaded model whose export names a log; empty if models follow none.
  std::function<Status(const std::string& path, Servable* servable)> set_follower;
  // Called from any thread when a model may have started or stopped answering.
  std::function<void()> on_change = [] {};
};

class ModelManager {
 public:
  using State = api::ModelVersionStatus::State;

  explicit ModelManager(const ManagerSettings& settings);
  ~ModelManager();

  // Makes `config` the wanted state, and waits until every model has an AVAILABLE version, one of
  // them has failed, or `deadline` has passed. A refused configuration changes nothing.
  Status SetConfig(const api::ModelServerConfig& config, Clock::time_point deadline);

  // Finds the version that `spec` names, and its number.
  Status Find(const api::ModelSpec& spec, std::shared_ptr<Servable>* servable,
              int64_t* version) const;

  // The states of one version, or of all for a spec without version.
  Status GetStatus(const api::ModelSpec& spec, api::GetModelStatusResponse* response) const;

  bool Knows(const std::string& name) const;
  // Tells for each model whether it answers.
  std::map<std::string, bool> Availability() const;

  struct Counts {
    int64_t loads = 0;
    int64_t load_errors = 0;
    std::vector<std::tuple<std::string, int64_t, State>> versions;
    // The metrics of the newest loaded version of each model that follows a log.
    std::vector<std::pair<std::string, std::vector<FollowerSample>>> followers;
  };
  Counts counts() const;

 private:
  struct Version {
    State state = api::ModelVersionStatus::START;
    Status status;
    std::shared_ptr<Servable> servable;
    // Loaded, but not caught up with training yet.
    std::shared_ptr<Servable> catching_up;
    // The progress of its follower, or the reason why that cannot go on.
    std::string note;
    std::string path;
    // Describes the files as they were when loading failed.
    std::string fingerprint;
    int64_t tries = 0;
    // When a failed version is tried again.
    Clock::time_point retry_at;
  };
  struct Model {
    api::ModelConfig config;
    std::map<int64_t, Version> versions;
    // Folders by version, of those that the policy chose when the folder was last looked at.
    std::map<int64_t, std::string> wanted;
    // No longer configured; kept to report that its versions have ended.
    bool removed = false;
    // The labels of the configuration, once all of their versions answer.
    std::map<std::string, int64_t> labels;
    // The error of the folder itself.
    Status folder;
  };

  void Work();
  // Loads the versions that are due and unloads those that are not wanted; with `look`, first
  // updates from the folders which are.
  void Reconcile(bool look);
  void ReconcileModel(const std::string& name, const api::ModelConfig& config, bool look);
  void LoadVersion(const std::string& name, const std::string& base_path, int64_t number,
                   const std::string& path);
  // Called by the follower of a version, from its threads.
  void NoteProgress(const std::string& name, int64_t number, const Servable* servable);
  // Returns the versions whose last load failed.
  std::vector<int64_t> FailedVersions(const std::string& name) const;
  // Returns when a wanted version is to be loaded, the clock's maximum for never.
  Clock::time_point LoadTime(const Version& version, const std::string& path) const;
  // The earliest of all.
  Clock::time_point NextLoadTime() const;
  // Makes a servable available to requests. Needs the lock.
  void SetAvailable(const std::string& name, int64_t number, std::shared_ptr<Servable> servable,
                    Version* version);
  // Takes a servable out of service; it is unloaded when no request uses it. Needs the lock.
  void Retire(const std::string& name, int64_t number, Version* version);
  // Returns whether some are still used by requests.
  bool UnloadRetired();
  // Whether a wanted version is not loaded yet, or has not caught up with its log.
  bool IsLoading() const;
  // The rest needs the lock.
  Status FirstProblem() const;
  static bool Serves(const Model& model);
  bool SetLabels(Model* model) const;
  static Status FindLabel(const Model& model, const api::ModelSpec& spec, int64_t* number);

  const ManagerSettings settings_;
  mutable std::shared_mutex mutex_;
  std::map<std::string, Model> models_;
  // Taken out of models_ or replaced there, still in use.
  struct Retired {
    std::string model;
    int64_t version;
    std::shared_ptr<Servable> servable;
  };
  std::vector<Retired> retired_;
  int64_t loads_ = 0;
  int64_t load_errors_ = 0;

  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::condition_variable reconciled_;
  int64_t config_generation_ = 0;
  int64_t done_generation_ = 0;
  // A version has caught up: others may be unloaded.
  bool progressed_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_MODEL_MANAGER_H_
