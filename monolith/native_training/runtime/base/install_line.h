// The command that installs an extra of the Python package, as monolith/_install.py names it.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_INSTALL_LINE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_INSTALL_LINE_H_

#include <string>

namespace monolith {
namespace engine {

// "pip install '.[kafka]'" where this code lies in a checkout, else
// "pip install 'monolith-recsys[kafka]'".
std::string InstallLine(const std::string& extra);

// The same for code that lies in `folder`, which a folder `monolith` contains.
std::string InstallLineFor(const std::string& folder, const std::string& extra);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_INSTALL_LINE_H_
