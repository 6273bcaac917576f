// Opens files for writing whose folder may not exist yet.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_OUTPUT_FILE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_OUTPUT_FILE_H_

#include <memory>
#include <string>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Creates the parent folders, then truncates and opens the file.
inline Status OpenOutputFile(Env* env, const std::string& filename,
                             std::unique_ptr<WritableFile>* file) {
  if (filename.empty()) return errors::InvalidArgument("filename is empty, want a path");
  const std::string folder(io::Dirname(filename));
  if (!folder.empty()) TF_RETURN_IF_ERROR(env->RecursivelyCreateDir(folder));
  return env->NewWritableFile(filename, file);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILES_OUTPUT_FILE_H_
