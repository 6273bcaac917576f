#include "monolith/native_training/runtime/base/dynamic_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdlib.h>

#include <memory>

namespace monolith {
namespace engine {

bool DynamicLibrary::Open(const std::vector<std::string>& candidates, std::string* error,
                          [[maybe_unused]] Prefers prefers) {
  error->clear();
  int flags = RTLD_NOW | RTLD_LOCAL;
#ifdef RTLD_DEEPBIND
  // AddressSanitizer ends the process that asks for it.
  if (prefers == Prefers::kItself && dlsym(RTLD_DEFAULT, "__asan_init") == nullptr) {
    flags |= RTLD_DEEPBIND;
  }
#endif
  for (const std::string& candidate : candidates) {
    handle_ = dlopen(candidate.c_str(), flags);
    if (handle_ != nullptr) {
      path_ = candidate;
      return true;
    }
    const char* const reason = dlerror();
    if (!error->empty()) *error += "; ";
    *error += reason == nullptr ? candidate + " cannot be opened" : reason;
  }
  return false;
}

void* DynamicLibrary::FindSymbol(const char* name, std::string* error) const {
  void* const found = handle_ == nullptr ? nullptr : dlsym(handle_, name);
  if (found == nullptr) *error = path_ + " has no function " + name;
  return found;
}

std::string FolderOfCode(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  const std::unique_ptr<char, decltype(&free)> resolved(realpath(info.dli_fname, nullptr), &free);
  const std::string path = resolved == nullptr ? info.dli_fname : resolved.get();
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::vector<std::string> MatchingPaths(const std::string& pattern) {
  glob_t matches = {};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
    paths.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  }
  globfree(&matches);
  return paths;
}

}  // namespace engine
}  // namespace monolith
