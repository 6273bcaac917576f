// Names of files in a set, and its manifest: what the writer and the reader have in common.
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

// `<path>-tmp-<token>`
std::string TemporaryName(const std::string& path, uint64_t token);

// What stands in front of `-tmp-<number>`; everything, if the name does not end so.
std::string_view WithoutTemporaryMark(std::string_view name);

// What follows `kind` in a suffix: `-ddddd-of-ddddd` and nothing else.
bool ParseShardSuffix(std::string_view suffix, std::string_view kind, int64_t* shard,
                      int64_t* num_shards);

// What follows the prefix's last component in the names of its folder; none if there is no folder.
Status ListSuffixes(FileSystem* files, const std::string& prefix,
                    std::vector<std::string>* suffixes);

// NotFound: it is not there. DataLoss: it is damaged.
Status ReadManifest(FileSystem* files, const std::string& path, Manifest* manifest);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_SET_NAMES_H_
