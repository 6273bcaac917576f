#include "monolith/serving/native/model/version_policy.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <vector>

#include "monolith/serving/native/model/file_systems.h"

namespace monolith {
namespace serving {
namespace {

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};

bool IsFolder(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Returns false for a name that is no version's.
bool ParseVersion(const std::string& name, int64_t* version) {
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data(), end, *version);
  return parsed.ec == std::errc() && parsed.ptr == end && *version >= 0;
}

}  // namespace

Status ListVersions(const std::string& base_path, std::map<int64_t, std::string>* paths) {
  if (NamesFileSystem(base_path)) {
    std::vector<std::string> names;
    const Status status = ListFolders(base_path, &names);
    if (!status.ok()) {
      return Status(status.code, "cannot read base path " + base_path + ": " + status.message);
    }
    for (const std::string& name : names) {
      int64_t version = 0;
      if (ParseVersion(name, &version)) paths->emplace(version, base_path + "/" + name);
    }
    return Status();
  }
  const std::unique_ptr<DIR, CloseFolder> folder(opendir(base_path.c_str()));
  if (folder == nullptr) {
    return Status(Code::kNotFound, "cannot read base path " + base_path + ": " + strerror(errno));
  }
  while (const dirent* entry = readdir(folder.get())) {
    const std::string name = entry->d_name;
    int64_t version = 0;
    if (!ParseVersion(name, &version)) continue;
    const std::string path = base_path + "/" + name;
    if (IsFolder(path)) paths->emplace(version, path);
  }
  return Status();
}

std::set<int64_t> WantedVersions(const api::VersionPolicy& policy,
                                 const std::map<int64_t, std::string>& paths) {
  std::set<int64_t> wanted;
  if (policy.has_specific()) {
    for (const int64_t version : policy.specific().versions()) {
      if (paths.count(version) > 0) wanted.insert(version);
    }
    return wanted;
  }
  const size_t count =
      policy.has_all() ? paths.size() : std::max<size_t>(1, policy.latest().num_versions());
  for (auto it = paths.rbegin(); it != paths.rend() && wanted.size() < count; ++it) {
    wanted.insert(it->first);
  }
  return wanted;
}

std::string Fingerprint(const std::string& path) {
  std::string text;
  for (const char* name : {"", "/saved_model.pb", "/saved_model.pbtxt", "/variables",
                           "/variables/variables.index", "/assets"}) {
    if (NamesFileSystem(path)) {
      text += FileFingerprint(path + name) + ";";
      continue;
    }
    struct stat info {};
    if (stat((path + name).c_str(), &info) != 0) {
      text += "-;";
      continue;
    }
    text += std::to_string(info.st_ino) + "," + std::to_string(info.st_size) + "," +
            std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec) + ";";
  }
  return text;
}

Status CheckConfig(const api::ModelServerConfig& config) {
  if (config.has_custom_model_config()) {
    return Status(Code::kInvalidArgument,
                  "custom_model_config is not supported, want model_config_list");
  }
  std::set<std::string> names;
  for (const api::ModelConfig& model : config.model_config_list().config()) {
    if (model.name().empty() || model.name().find('/') != std::string::npos) {
      return Status(Code::kInvalidArgument,
                    "a model of the configuration is called '" + model.name() + "'");
    }
    const std::string which = "model '" + model.name() + "' of the configuration ";
    if (!names.insert(model.name()).second) {
      return Status(Code::kInvalidArgument, which + "is there twice");
    }
    const std::string& base_path = model.base_path();
    if (base_path.empty() || (base_path[0] != '/' && !NamesFileSystem(base_path))) {
      return Status(Code::kInvalidArgument,
                    which + "has base_path '" + model.base_path() +
                        "', want an absolute path, or one of a file system as gs://");
    }
    if (!model.model_platform().empty() && model.model_platform() != "tensorflow") {
      return Status(Code::kInvalidArgument, which + "has model_platform '" +
                                                model.model_platform() + "', want 'tensorflow'");
    }
    if (model.model_type() != 0 && model.model_type() != 1) {
      return Status(Code::kInvalidArgument, which + "has a model_type other than TENSORFLOW");
    }
    if (model.model_version_policy().has_specific() &&
        model.model_version_policy().specific().versions().empty()) {
      return Status(Code::kInvalidArgument, which + "wants specific versions and names none");
    }
  }
  return Status();
}

}  // namespace serving
}  // namespace monolith
