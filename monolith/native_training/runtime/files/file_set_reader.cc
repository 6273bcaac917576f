#include <algorithm>
#include <cstdio>
#include <utility>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/set_names.h"

namespace monolith {
namespace engine {
namespace {

std::string Bytes(int64_t n) { return std::to_string(n) + " bytes"; }

// Compares what was read with the manifest at the end of the file.
class CheckedInput final : public InputFile {
 public:
  CheckedInput(std::unique_ptr<InputFile> file, FileSetReader::File entry, std::string manifest)
      : file_(std::move(file)), entry_(std::move(entry)), manifest_(std::move(manifest)) {}

  Status Read(int64_t size, char* out, int64_t* read) override {
    Status status = file_->Read(size, out, read);
    if (!status.ok()) return status;
    bytes_ += *read;
    crc_ = Crc32c(out, *read, crc_);
    if (*read == size) return Status::Ok();
    if (bytes_ != entry_.bytes) {
      return Status::DataLoss(entry_.path + " has " + Bytes(bytes_) + ", " + manifest_ + " says " +
                              std::to_string(entry_.bytes));
    }
    if (crc_ != entry_.crc) {
      char sums[64];
      std::snprintf(sums, sizeof(sums), "%08x, want %08x", crc_, entry_.crc);
      return Status::DataLoss(entry_.path + " has " + Bytes(bytes_) + " as " + manifest_ +
                              " says, but they are not those that were saved: their checksum is " +
                              sums);
    }
    return Status::Ok();
  }

 private:
  const std::unique_ptr<InputFile> file_;
  const FileSetReader::File entry_;
  const std::string manifest_;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;
};

// Returns how a message about a missing file begins: for a checkpoint, in the specified words.
std::string ExplainMissing(const std::string& prefix, std::string_view suffix,
                           const std::vector<std::string>& listed) {
  const std::string kind(suffix.substr(0, suffix.find('-')));
  int64_t shard, count;
  if (!ParseShardSuffix(suffix, kind, &shard, &count)) return "";
  const bool any = std::any_of(listed.begin(), listed.end(), [&](const std::string& other) {
    int64_t ignored;
    return ParseShardSuffix(WithoutTemporaryMark(other), kind, &ignored, &ignored);
  });
  if (!any) return "There is no valid sharded files for " + prefix + kind + ": ";
  return "Shard " + std::to_string(shard) + " doesn't show up for " + prefix + kind + ": ";
}

// Finds the complete set of one kind. Errors have the words specified for checkpoints.
Status FindShards(const std::string& basename, const std::string& kind,
                  const std::vector<std::string>& suffixes, int64_t* num_shards) {
  std::vector<bool> found;
  for (const std::string& suffix : suffixes) {
    int64_t shard, count;
    if (!ParseShardSuffix(suffix, kind, &shard, &count)) continue;
    if (found.empty()) found.resize(static_cast<size_t>(count));
    if (static_cast<int64_t>(found.size()) != count) {
      return Status::InvalidArgument("Filename " + basename + suffix + " doesn't match nshards. " +
                                     std::to_string(found.size()));
    }
    if (shard >= count) {
      return Status::InvalidArgument("Shard " + std::to_string(shard) + " exceeds " +
                                     std::to_string(count) + " for " + basename + kind);
    }
    found[static_cast<size_t>(shard)] = true;
  }
  if (found.empty()) {
    return Status::InvalidArgument("There is no valid sharded files for " + basename + kind);
  }
  const auto missing = std::find(found.begin(), found.end(), false);
  if (missing != found.end()) {
    return Status::InvalidArgument("Shard " + std::to_string(missing - found.begin()) +
                                   " doesn't show up for " + basename + kind);
  }
  *num_shards = static_cast<int64_t>(found.size());
  return Status::Ok();
}

Status OpenSharded(FileSystem* files, const std::string& basename,
                   const std::vector<std::string>& kinds, FileSetReader* reader,
                   int64_t* num_shards) {
  const FileSetName name = ShardedSetName(basename, kinds);
  Status status = FileSetReader::OpenManifest(files, name, reader);
  const bool has_manifest = status.code != StatusCode::kNotFound;
  if (!status.ok() && has_manifest) return status;
  std::vector<std::string> suffixes;
  if (has_manifest) {
    for (const FileSetReader::File& file : reader->files()) suffixes.push_back(file.suffix);
  } else {
    status = ListSuffixes(files, basename, &suffixes);
    if (!status.ok()) return status;
  }
  std::vector<std::string> wanted;
  for (const std::string& kind : kinds) {
    int64_t count = 0;
    status = FindShards(basename, kind, suffixes, &count);
    if (!status.ok()) return status;
    if (!wanted.empty() && count != *num_shards) {
      return Status::InvalidArgument(basename + " has " + std::to_string(*num_shards) + " files " +
                                     basename + kinds[0] + "-* but " + std::to_string(count) +
                                     " files " + basename + kind + "-*");
    }
    *num_shards = count;
    for (int64_t i = 0; i < count; ++i) wanted.push_back(ShardSuffix(kind, i, count));
  }
  return has_manifest ? Status::Ok() : FileSetReader::OpenFiles(files, name, wanted, reader);
}

}  // namespace

Status FileSetReader::OpenManifest(FileSystem* files, const FileSetName& name,
                                   FileSetReader* reader) {
  *reader = FileSetReader();
  reader->file_system_ = files;
  reader->name_ = name;
  Manifest manifest;
  Status status = ReadManifest(files, name.manifest, &manifest);
  if (!status.ok()) return status;
  reader->has_manifest_ = true;
  reader->token_ = manifest.token;
  std::vector<std::string> listed;
  status = ListSuffixes(files, name.prefix, &listed);
  if (!status.ok()) return status;
  const std::set<std::string> present(listed.begin(), listed.end());
  std::set<std::string> known(manifest.replaced.begin(), manifest.replaced.end());
  for (const ManifestFile& entry : manifest.files) {
    known.insert(entry.suffix);
    const std::string path = name.prefix + entry.suffix;
    File file{entry.suffix, path, entry.bytes, entry.records, entry.crc};
    if (present.count(TemporaryName(entry.suffix, manifest.token)) > 0) {
      file.path = TemporaryName(path, manifest.token);
    }
    int64_t found = 0;
    status = files->GetSize(file.path, &found);
    if (status.code == StatusCode::kNotFound && file.path != path) {
      // A save in progress has just given the file its final name.
      file.path = path;
      status = files->GetSize(path, &found);
    }
    if (status.code == StatusCode::kNotFound) {
      return Status::InvalidArgument(ExplainMissing(name.prefix, entry.suffix, listed) + path +
                                     " is missing, " + name.manifest + " says that it has " +
                                     Bytes(entry.bytes));
    }
    if (!status.ok()) return status;
    if (found != entry.bytes) {
      return Status::DataLoss(file.path + " has " + Bytes(found) + ", " + name.manifest + " says " +
                              std::to_string(entry.bytes));
    }
    reader->set_.push_back(std::move(file));
  }
  reader->SortFiles();
  for (const std::string& suffix : listed) {
    if (!name.owns(suffix) || known.count(suffix) > 0) continue;
    int64_t found = 0;
    status = files->GetSize(name.prefix + suffix, &found);
    if (status.code == StatusCode::kNotFound) continue;
    if (!status.ok()) return status;
    return Status::InvalidArgument("Filename " + name.prefix + suffix + " doesn't belong to " +
                                   name.prefix + ": " + name.manifest +
                                   " does not name this file, which has " + Bytes(found));
  }
  return Status::Ok();
}

Status FileSetReader::OpenFiles(FileSystem* files, const FileSetName& name,
                                const std::vector<std::string>& suffixes, FileSetReader* reader) {
  *reader = FileSetReader();
  reader->file_system_ = files;
  reader->name_ = name;
  for (const std::string& suffix : suffixes) {
    File file;
    file.suffix = suffix;
    file.path = name.prefix + suffix;
    Status status = files->GetSize(file.path, &file.bytes);
    if (!status.ok()) return status;
    reader->set_.push_back(std::move(file));
  }
  reader->SortFiles();
  return Status::Ok();
}

void FileSetReader::SortFiles() {
  std::sort(set_.begin(), set_.end(),
            [](const File& a, const File& b) { return a.suffix < b.suffix; });
}

const FileSetReader::File* FileSetReader::Find(const std::string& suffix) const {
  const auto found = std::lower_bound(
      set_.begin(), set_.end(), suffix,
      [](const File& file, const std::string& wanted) { return file.suffix < wanted; });
  return found == set_.end() || found->suffix != suffix ? nullptr : &*found;
}

Status FileSetReader::Open(const File& file, std::unique_ptr<InputFile>* input) const {
  Status status = file_system_->Open(file.path, input);
  if (status.code == StatusCode::kNotFound) {
    // A save in progress may have given the file its final name.
    status = file_system_->Open(name_.prefix + file.suffix, input);
  }
  if (!status.ok() || !has_manifest_) return status;
  *input = std::make_unique<CheckedInput>(std::move(*input), file, name_.manifest);
  return Status::Ok();
}

bool FileSetReader::Replaced() const {
  Manifest now;
  if (!ReadManifest(file_system_, name_.manifest, &now).ok()) return false;
  return !has_manifest_ || now.token != token_;
}

Status ReadShardedSet(
    FileSystem* files, const std::string& basename, const std::vector<std::string>& kinds,
    const std::function<Status(const FileSetReader& reader, int64_t num_shards)>& read) {
  constexpr int kAttempts = 5;
  for (int attempt = 1;; ++attempt) {
    FileSetReader reader;
    int64_t num_shards = 0;
    Status status = OpenSharded(files, basename, kinds, &reader, &num_shards);
    if (status.ok()) status = read(reader, num_shards);
    if (status.ok() || attempt == kAttempts || !reader.Replaced()) return status;
  }
}

}  // namespace engine
}  // namespace monolith
