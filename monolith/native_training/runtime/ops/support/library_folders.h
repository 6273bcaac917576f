// Where optional libraries may lie: beside the op library, or in Python packages.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_LIBRARY_FOLDERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_LIBRARY_FOLDERS_H_

#include <string>
#include <vector>

namespace tensorflow {
namespace monolith_tf {

// The folder of the op library.
std::string OpLibraryFolder();

// The folders in which Python packages are installed, as far as this library can tell: those that
// hold TensorFlow and Monolith. No Python is asked, since a server may run without one.
std::vector<std::string> PackageFolders();

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_LIBRARY_FOLDERS_H_
