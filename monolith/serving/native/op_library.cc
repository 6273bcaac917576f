#include "monolith/serving/native/op_library.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include "monolith/serving/native/model/tensorflow_status.h"
#include "tensorflow/core/platform/env.h"

namespace monolith {
namespace serving {
namespace {

constexpr char kVariable[] = "MONOLITH_OP_LIBRARY";
// From monolith/serving/native/ of a package or a checkout.
constexpr char kBesideProgram[] =
    "/../../native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so";

std::string ProgramFolder() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  if (size <= 0) return ".";
  const std::string program(path, static_cast<size_t>(size));
  return program.substr(0, program.rfind('/'));
}

}  // namespace

Status LoadOpLibrary(const std::string& path, void** handle) {
  std::string library = path;
  const char* variable = getenv(kVariable);
  if (library.empty() && variable != nullptr) library = variable;
  if (library.empty()) library = ProgramFolder() + kBesideProgram;
  Status status =
      FromTensorFlow(tensorflow::Env::Default()->LoadDynamicLibrary(library.c_str(), handle));
  if (!status.ok()) {
    status.message = "cannot load the op library: " + status.message + "; --op_library or " +
                     kVariable + " says where it is";
  }
  return status;
}

}  // namespace serving
}  // namespace monolith
