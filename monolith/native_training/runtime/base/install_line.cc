#include "monolith/native_training/runtime/base/install_line.h"

#include <unistd.h>

#include "monolith/native_training/runtime/base/dynamic_library.h"

namespace monolith {
namespace engine {

std::string InstallLineFor(const std::string& folder, const std::string& extra) {
  const size_t package = (folder + "/").rfind("/monolith/");
  const bool is_checkout =
      package != std::string::npos &&
      access((folder.substr(0, package) + "/pyproject.toml").c_str(), F_OK) == 0;
  return std::string("pip install '") + (is_checkout ? "." : "monolith-recsys") + "[" + extra +
         "]'";
}

std::string InstallLine(const std::string& extra) {
  return InstallLineFor(FolderOfCode(reinterpret_cast<const void*>(&InstallLine)), extra);
}

}  // namespace engine
}  // namespace monolith
