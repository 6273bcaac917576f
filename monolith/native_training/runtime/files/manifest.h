// The list of files that belong together. Text, so that an operator can read it:
//
//   monolith file set 1
//   token 8243721640239523
//   file -00000-of-00002 41000 1000 5f3759df      suffix, bytes, records, CRC-32C of the bytes
//   file -00001-of-00002 41000 1000 0badcafe
//   replaced -00000-of-00001                      a file of the previous set that may still exist
//   end 1c291ca3                                  CRC-32C of everything above
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_MANIFEST_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_MANIFEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace engine {

struct ManifestFile {
  std::string suffix;  // follows the prefix that all files of the set share
  int64_t bytes = 0;
  int64_t records = 0;
  uint32_t crc = 0;
};

struct Manifest {
  uint64_t token = 0;  // identifies the save; ends its temporary names
  std::vector<ManifestFile> files;
  std::vector<std::string> replaced;
};

std::string EncodeManifest(const Manifest& manifest);

// Parses a manifest. DataLoss: the text is damaged or not a manifest.
Status DecodeManifest(std::string_view text, Manifest* manifest);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_MANIFEST_H_
