// The library with the ops of exported models.
#ifndef MONOLITH_SERVING_NATIVE_OP_LIBRARY_H_
#define MONOLITH_SERVING_NATIVE_OP_LIBRARY_H_

#include <string>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Loads `path`, or the library where the package has it, as seen from this program. The handle is
// never closed: kernels stay registered.
Status LoadOpLibrary(const std::string& path, void** handle);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_OP_LIBRARY_H_
