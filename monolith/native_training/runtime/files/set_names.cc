#include "monolith/native_training/runtime/files/set_names.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "monolith/native_training/runtime/files/file_set.h"

namespace monolith {
namespace engine {
namespace {

constexpr std::string_view kTemporaryMark = "-tmp-";
// More than a manifest of twice kMaxShards files takes.
constexpr int64_t kMaxManifestBytes = int64_t{64} << 20;

bool IsDigits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

std::string TemporaryName(const std::string& path, uint64_t token) {
  return path + std::string(kTemporaryMark) + std::to_string(token);
}

std::string_view WithoutTemporaryMark(std::string_view name) {
  const size_t mark = name.rfind(kTemporaryMark);
  if (mark == std::string_view::npos) return name;
  return IsDigits(name.substr(mark + kTemporaryMark.size())) ? name.substr(0, mark) : name;
}

bool ParseShardSuffix(std::string_view suffix, std::string_view kind, int64_t* shard,
                      int64_t* num_shards) {
  constexpr std::string_view kPattern = "-ddddd-of-ddddd";
  if (suffix.size() != kind.size() + kPattern.size() || suffix.substr(0, kind.size()) != kind) {
    return false;
  }
  suffix.remove_prefix(kind.size());
  const std::string_view first = suffix.substr(1, 5), second = suffix.substr(10, 5);
  if (suffix[0] != '-' || suffix.substr(6, 4) != "-of-" || !IsDigits(first) || !IsDigits(second)) {
    return false;
  }
  std::from_chars(first.data(), first.data() + 5, *shard);
  std::from_chars(second.data(), second.data() + 5, *num_shards);
  return true;
}

std::string ShardSuffix(const std::string& kind, int64_t shard, int64_t num_shards) {
  char numbers[64];
  std::snprintf(numbers, sizeof(numbers), "-%05lld-of-%05lld", static_cast<long long>(shard),
                static_cast<long long>(num_shards));
  return kind + numbers;
}

FileSetName ShardedSetName(const std::string& basename, const std::vector<std::string>& kinds) {
  FileSetName name;
  name.prefix = basename;
  name.manifest = SiblingOf(basename, "." + NameOf(basename) + ".manifest");
  name.owns = [kinds](std::string_view suffix) {
    int64_t shard, num_shards;
    return std::any_of(kinds.begin(), kinds.end(), [&](const std::string& kind) {
      return ParseShardSuffix(suffix, kind, &shard, &num_shards);
    });
  };
  return name;
}

Status ListSuffixes(FileSystem* files, const std::string& prefix,
                    std::vector<std::string>* suffixes) {
  // Lists instead of globbing: a prefix may hold characters that mean something in a pattern.
  std::vector<std::string> names;
  const Status status = files->List(FolderOf(prefix), &names);
  if (status.code == StatusCode::kNotFound) return Status::Ok();
  if (!status.ok()) return status;
  const std::string start = NameOf(prefix);
  for (const std::string& name : names) {
    if (name.compare(0, start.size(), start) == 0) suffixes->push_back(name.substr(start.size()));
  }
  return Status::Ok();
}

Status ReadManifest(FileSystem* files, const std::string& path, Manifest* manifest) {
  std::unique_ptr<InputFile> file;
  Status status = files->Open(path, &file);
  if (!status.ok()) return status;
  std::string text;
  while (true) {
    constexpr int64_t kStep = 64 << 10;
    const size_t before = text.size();
    text.resize(before + kStep);
    int64_t read = 0;
    status = file->Read(kStep, &text[before], &read);
    if (!status.ok()) return status;
    text.resize(before + static_cast<size_t>(read));
    if (read < kStep) break;
    if (static_cast<int64_t>(text.size()) > kMaxManifestBytes) {
      return Status::DataLoss(path + " is too large for a manifest");
    }
  }
  status = DecodeManifest(text, manifest);
  if (!status.ok()) {
    status.message = path + " cannot be used: " + status.message +
                     ". If the files beside it are known to be whole, remove it: a complete set "
                     "is read without a manifest";
  }
  return status;
}

}  // namespace engine
}  // namespace monolith
