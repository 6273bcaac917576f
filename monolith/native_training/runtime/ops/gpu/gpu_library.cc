#include "monolith/native_training/runtime/ops/gpu/gpu_library.h"

#include <cstdlib>
#include <memory>
#include <string>

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "monolith/native_training/runtime/base/install_line.h"
#include "monolith/native_training/runtime/ops/support/library_folders.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::DynamicLibrary;

constexpr char kVariable[] = "MONOLITH_CUDA_LIBRARY";

Status Load(std::unique_ptr<GpuLibrary>* loaded) {
  const char* const given = std::getenv(kVariable);
  const std::string path = given != nullptr && given[0] != '\0'
                               ? std::string(given)
                               : OpLibraryFolder() + "/libmonolith_cuda.so";
  DynamicLibrary library;
  std::string error;
  auto found = std::make_unique<GpuLibrary>();
  bool complete = library.Open({path}, &error);
#define MONOLITH_GPU_FIND(name) \
  complete = complete && library.Find("mono_gpu_" #name, &found->name, &error);
  MONOLITH_GPU_FUNCTIONS(MONOLITH_GPU_FIND)
#undef MONOLITH_GPU_FIND
  if (!complete) {
    return errors::FailedPrecondition(
        "Monolith's ops need libmonolith_cuda.so to run on a GPU, which is built where nvcc is "
        "found: run `make gpu`, or ",
        monolith::engine::InstallLine("cuda"), " and build again, let ", kVariable,
        " name the library, or place the op on a CPU (", error, ")");
  }
  if (found->version() != MONO_GPU_VERSION) {
    return errors::FailedPrecondition(path, " has version ", found->version(), ", want ",
                                      MONO_GPU_VERSION, ": run `make gpu` again");
  }
  *loaded = std::move(found);
  return OkStatus();
}

}  // namespace

Status GetGpuLibrary(const GpuLibrary** library) {
  static mutex* const mu = std::make_unique<mutex>().release();
  static const GpuLibrary* loaded = nullptr;
  mutex_lock lock(*mu);
  // A failure is not kept: the library may be built meanwhile.
  if (loaded == nullptr) {
    std::unique_ptr<GpuLibrary> found;
    TF_RETURN_IF_ERROR(Load(&found));
    loaded = found.release();
  }
  *library = loaded;
  return OkStatus();
}

Status GpuStatus(const GpuLibrary& library, int code) {
  switch (code) {
    case MONO_GPU_OK:
      return OkStatus();
    case MONO_GPU_INVALID_ARGUMENT:
    case MONO_GPU_REFUSED:
      return errors::InvalidArgument(library.last_error());
    case MONO_GPU_OUT_OF_MEMORY:
      return errors::ResourceExhausted(library.last_error());
    case MONO_GPU_UNIMPLEMENTED:
      // Refusals of this kind depend on a configuration, so the caller's argument is wrong.
      return errors::InvalidArgument(library.last_error());
    case MONO_GPU_FAILED_PRECONDITION:
      return errors::FailedPrecondition(library.last_error());
    default:
      return errors::Internal("CUDA: ", library.last_error());
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow
