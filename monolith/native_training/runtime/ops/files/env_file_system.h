// Opens files for the engine through TensorFlow's Env: local ones, and any registered scheme's.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_ENV_FILE_SYSTEM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_ENV_FILE_SYSTEM_H_

#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/files/file_system.h"
#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Converts the status of a file operation to the engine's type.
::monolith::engine::Status ToEngine(const Status& status);

class EnvFileSystem final : public ::monolith::engine::FileSystem {
 public:
  explicit EnvFileSystem(Env* env) : env_(env) {}

  ::monolith::engine::Status Create(const std::string& path,
                                    std::unique_ptr<::monolith::engine::OutputFile>* file) override;
  ::monolith::engine::Status Open(const std::string& path,
                                  std::unique_ptr<::monolith::engine::InputFile>* file) override;
  ::monolith::engine::Status GetSize(const std::string& path, int64_t* bytes) override;
  ::monolith::engine::Status IsFolder(const std::string& path, bool* is_folder) override;
  ::monolith::engine::Status Rename(const std::string& from, const std::string& to) override;
  ::monolith::engine::Status Remove(const std::string& path) override;
  ::monolith::engine::Status List(const std::string& folder,
                                  std::vector<std::string>* names) override;
  ::monolith::engine::Status MakeFolders(const std::string& folder) override;
  ::monolith::engine::Status Sync(const std::string& path) override;

 private:
  Env* const env_;
};

// Returns a file that decompresses what TensorFlow's Snappy writer wrote.
std::unique_ptr<::monolith::engine::InputFile> NewSnappyInput(
    std::unique_ptr<::monolith::engine::InputFile> compressed);

// Returns a file that compresses into `file`. The caller closes it first, then `file`.
std::unique_ptr<::monolith::engine::OutputFile> NewSnappyOutput(
    ::monolith::engine::OutputFile* file);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_ENV_FILE_SYSTEM_H_
