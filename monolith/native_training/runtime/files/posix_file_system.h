// Reaches local files through POSIX calls.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_POSIX_FILE_SYSTEM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_POSIX_FILE_SYSTEM_H_

#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/files/file_system.h"

namespace monolith {
namespace engine {

// Has no state: create one wherever it is needed.
class PosixFileSystem : public FileSystem {
 public:
  Status Create(const std::string& path, std::unique_ptr<OutputFile>* file) override;
  Status Open(const std::string& path, std::unique_ptr<InputFile>* file) override;
  Status GetSize(const std::string& path, int64_t* bytes) override;
  Status IsFolder(const std::string& path, bool* is_folder) override;
  Status Rename(const std::string& from, const std::string& to) override;
  Status Remove(const std::string& path) override;
  Status List(const std::string& folder, std::vector<std::string>* names) override;
  Status MakeFolders(const std::string& folder) override;
  Status Sync(const std::string& path) override;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_POSIX_FILE_SYSTEM_H_
