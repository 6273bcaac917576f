// The file names and the manifest of a set, which its writer and its reader share.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_SET_NAMES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_SET_NAMES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/files/file_system.h"
#include "monolith/native_training/runtime/files/manifest.h"

namespace monolith {
namespace engine {

// Returns `<path>-tmp-<token>`.
std::string TemporaryName(const std::string& path, uint64_t token);

// Returns what precedes `-tmp-<number>`, or the whole name if it does not end so.
std::string_view WithoutTemporaryMark(std::string_view name);

// Parses `<kind>-ddddd-of-ddddd`; returns false for any other suffix.
bool ParseShardSuffix(std::string_view suffix, std::string_view kind, int64_t* shard,
                      int64_t* num_shards);

// Lists what follows the prefix's last component in its folder's names; none without a folder.
Status ListSuffixes(FileSystem* files, const std::string& prefix,
                    std::vector<std::string>* suffixes);

// Reads a manifest. NotFound: it does not exist. DataLoss: it is damaged.
Status ReadManifest(FileSystem* files, const std::string& path, Manifest* manifest);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_SET_NAMES_H_
