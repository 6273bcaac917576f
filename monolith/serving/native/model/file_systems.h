// Folders that are not on this machine: TensorFlow's file systems read gs://bucket/folder and the
// like.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_FILE_SYSTEMS_H_
#define MONOLITH_SERVING_NATIVE_MODEL_FILE_SYSTEMS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Whether a path begins with the name of a file system, as in gs://.
bool NamesFileSystem(const std::string& path);

// Lists the folders in a folder, by name.
Status ListFolders(const std::string& path, std::vector<std::string>* names);

// Returns a text that changes when the file does; "-" where there is none.
std::string FileFingerprint(const std::string& path);

// Reads a file of at most `max_bytes`.
Status ReadFileOf(const std::string& path, int64_t max_bytes, std::string* text);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_FILE_SYSTEMS_H_
