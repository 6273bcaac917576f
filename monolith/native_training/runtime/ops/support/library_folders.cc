#include "monolith/native_training/runtime/ops/support/library_folders.h"

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "tensorflow/core/platform/env.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::engine::FolderOfCode;

std::string OpLibraryFolder() {
  return FolderOfCode(reinterpret_cast<const void*>(&OpLibraryFolder));
}

std::vector<std::string> PackageFolders() {
  std::vector<std::string> folders;
  // <packages>/tensorflow/libtensorflow_framework.so.2
  const std::string tensorflow = FolderOfCode(reinterpret_cast<const void*>(&Env::Default));
  if (!tensorflow.empty()) folders.push_back(tensorflow + "/..");
  // <packages>/monolith/native_training/runtime/ops/
  const std::string ours = OpLibraryFolder();
  if (!ours.empty()) folders.push_back(ours + "/../../../..");
  return folders;
}

}  // namespace monolith_tf
}  // namespace tensorflow
