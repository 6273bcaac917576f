// The interface through which the engine reaches files. posix_file_system.h implements it for local
// disks without TensorFlow, ops/files/env_file_system.h for everything TensorFlow's Env can reach.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SYSTEM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace engine {

// A file that is read front to back, by one thread.
class InputFile {
 public:
  virtual ~InputFile() = default;

  // Reads up to `size` bytes into `out`; `*read` is less than `size` at the end of the file only.
  virtual Status Read(int64_t size, char* out, int64_t* read) = 0;
};

// A file that is written front to back, by one thread. Nothing is promised before Close succeeds.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual Status Append(const char* data, int64_t size) = 0;
  virtual Status Close() = 0;
};

// Thread-safe. Errors name the path. A path that does not exist is kNotFound.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Creates or truncates a file.
  virtual Status Create(const std::string& path, std::unique_ptr<OutputFile>* file) = 0;
  virtual Status Open(const std::string& path, std::unique_ptr<InputFile>* file) = 0;
  virtual Status GetSize(const std::string& path, int64_t* bytes) = 0;
  virtual Status IsFolder(const std::string& path, bool* is_folder) = 0;
  // Replaces `to` if it exists. Readers see the old or the new file.
  virtual Status Rename(const std::string& from, const std::string& to) = 0;
  virtual Status Remove(const std::string& path) = 0;
  // Lists the names in a folder, in no particular order.
  virtual Status List(const std::string& folder, std::vector<std::string>* names) = 0;
  // Creates a folder and the missing ones above it. On return all of them survive a power loss,
  // even if `folder` existed before.
  virtual Status MakeFolders(const std::string& folder) = 0;
  // Makes the content of a closed file, or the names in a folder, survive a power loss.
  virtual Status Sync(const std::string& path) = 0;
};

// "a/b" -> "a", "/b" -> "/", "b" -> ".".
inline std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Returns what follows the last slash.
inline std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Returns the path of `name` in the folder of `path`.
inline std::string SiblingOf(const std::string& path, const std::string& name) {
  return path.substr(0, path.rfind('/') + 1) + name;
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SYSTEM_H_
