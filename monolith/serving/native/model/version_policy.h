// Versions of a model on disk, and which of them are wanted.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_VERSION_POLICY_H_
#define MONOLITH_SERVING_NATIVE_MODEL_VERSION_POLICY_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

// Gives the folders of `base_path` whose names are numbers.
Status ListVersions(const std::string& base_path, std::map<int64_t, std::string>* paths);

// Returns the versions of `paths` that `policy` wants.
std::set<int64_t> WantedVersions(const api::VersionPolicy& policy,
                                 const std::map<int64_t, std::string>& paths);

// Returns a text that changes when the files of a version do.
std::string Fingerprint(const std::string& path);

// Refuses a configuration with a mistake, naming model and value.
Status CheckConfig(const api::ModelServerConfig& config);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_VERSION_POLICY_H_
