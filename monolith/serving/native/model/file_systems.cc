#include "monolith/serving/native/model/file_systems.h"

#include "monolith/serving/native/model/tensorflow_status.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/file_statistics.h"

namespace monolith {
namespace serving {

bool NamesFileSystem(const std::string& path) {
  const size_t separator = path.find("://");
  return separator != std::string::npos && separator > 0;
}

Status ListFolders(const std::string& path, std::vector<std::string>* names) {
  tensorflow::Env* const env = tensorflow::Env::Default();
  std::vector<std::string> children;
  const Status status = FromTensorFlow(env->GetChildren(path, &children));
  if (!status.ok()) return status;
  for (std::string& name : children) {
    // Object stores end the names of folders with a slash.
    while (!name.empty() && name.back() == '/') name.pop_back();
    if (!name.empty() && env->IsDirectory(path + "/" + name).ok()) names->push_back(name);
  }
  return Status();
}

std::string FileFingerprint(const std::string& path) {
  tensorflow::FileStatistics statistics;
  if (!tensorflow::Env::Default()->Stat(path, &statistics).ok()) return "-";
  return std::to_string(statistics.length) + "," + std::to_string(statistics.mtime_nsec);
}

Status ReadFileOf(const std::string& path, int64_t max_bytes, std::string* text) {
  tensorflow::Env* const env = tensorflow::Env::Default();
  tensorflow::uint64 size = 0;
  Status status = FromTensorFlow(env->GetFileSize(path, &size));
  if (status.ok() && size > static_cast<tensorflow::uint64>(max_bytes)) {
    status =
        Status(Code::kInvalidArgument, "it has more than " + std::to_string(max_bytes) + " bytes");
  }
  if (status.ok()) status = FromTensorFlow(tensorflow::ReadFileToString(env, path, text));
  return status;
}

}  // namespace serving
}  // namespace monolith
