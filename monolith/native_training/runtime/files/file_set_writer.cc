#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/log.h"
#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/set_names.h"

namespace monolith {
namespace engine {
namespace {

// The temporary files that this process's saves are writing: an interrupted save left any other
// file that looks like one.
class LiveTemporaries {
 public:
  // Never destroyed: a save may still run in its own thread when the process ends.
  static LiveTemporaries& Get() {
    static LiveTemporaries* live = std::make_unique<LiveTemporaries>().release();
    return *live;
  }

  void Add(const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex_);
    paths_.insert(path);
  }
  void Remove(const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex_);
    paths_.erase(path);
  }
  bool Contains(const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex_);
    return paths_.count(path) > 0;
  }

  // Returns the mutex to hold while publishing a set, so that two saves to one place do not mix.
  std::mutex* publishing(const std::string& prefix) {
    return &publishing_[std::hash<std::string>()(prefix) % publishing_.size()];
  }

 private:
  std::mutex mutex_;
  std::set<std::string> paths_;
  std::array<std::mutex, 64> publishing_;
};

uint64_t RandomToken() {
  std::random_device device;
  return (uint64_t{device()} << 32) ^ device();
}

Status Explain(Status status, const std::string& why) {
  status.message = why + ": " + status.message;
  return status;
}

}  // namespace

SetOutputFile::SetOutputFile(FileSetWriter* set, std::string suffix,
                             std::unique_ptr<OutputFile> file)
    : set_(set), file_(std::move(file)) {
  entry_.suffix = std::move(suffix);
}

Status SetOutputFile::Append(const char* data, int64_t size) {
  entry_.crc = Crc32c(data, size, entry_.crc);
  entry_.bytes += size;
  return file_->Append(data, size);
}

Status SetOutputFile::Close() {
  Status status = file_->Close();
  if (!status.ok()) return status;
  status = set_->files_->Sync(set_->Temporary(set_->FinalName(entry_.suffix)));
  if (!status.ok()) return status;
  set_->Done(entry_);
  return Status::Ok();
}

FileSetWriter::FileSetWriter(FileSystem* files, FileSetName name)
    : files_(files), name_(std::move(name)), token_(RandomToken()) {}

FileSetWriter::~FileSetWriter() {
  for (const std::string& path : temporaries_) {
    if (!keep_) {
      const Status status = files_->Remove(path);
      if (!status.ok() && status.code != StatusCode::kNotFound) {
        Log(LogLevel::kWarning, status.message);
      }
    }
    LiveTemporaries::Get().Remove(path);
  }
}

std::string FileSetWriter::Temporary(const std::string& path) const {
  return TemporaryName(path, token_);
}

Status FileSetWriter::Create(const std::string& suffix, std::unique_ptr<SetOutputFile>* file) {
  const std::string path = Temporary(FinalName(suffix));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_folder_) {
      Status status = files_->MakeFolders(FolderOf(name_.prefix));
      if (!status.ok()) return status;
      has_folder_ = true;
    }
    if (!temporaries_.insert(path).second) {
      return Status::InvalidArgument(FinalName(suffix) + " is written twice");
    }
  }
  LiveTemporaries::Get().Add(path);
  std::unique_ptr<OutputFile> output;
  Status status = files_->Create(path, &output);
  if (!status.ok()) return status;
  file->reset(new SetOutputFile(this, suffix, std::move(output)));
  return Status::Ok();
}

void FileSetWriter::Done(ManifestFile entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_.push_back(std::move(entry));
}

Status FileSetWriter::Publish() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (keep_ || done_.empty() || done_.size() != temporaries_.size()) {
    return Status::FailedPrecondition(name_.prefix + ": " + std::to_string(done_.size()) + " of " +
                                      std::to_string(temporaries_.size()) +
                                      " files are closed, or they are published already");
  }
  Manifest manifest;
  manifest.token = token_;
  manifest.files = done_;
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const ManifestFile& a, const ManifestFile& b) { return a.suffix < b.suffix; });
  std::lock_guard<std::mutex> publishing(*LiveTemporaries::Get().publishing(name_.prefix));
  Status status = FindReplaced(&manifest);
  if (!status.ok()) return status;
  status = WriteManifest(manifest);
  if (!status.ok()) return status;
  // The files' names must be durable before the manifest that lists them, and the manifest before
  // the renames that remove the old set.
  const std::string folder = FolderOf(name_.prefix);
  status = files_->Sync(folder);
  if (!status.ok()) return status;
  status = files_->Rename(Temporary(name_.manifest), name_.manifest);
  if (!status.ok() && !IsPublished()) return status;
  keep_ = true;
  const std::string published = name_.manifest +
                                " is published and can be restored, but its files keep temporary "
                                "names until the next save";
  status = files_->Sync(folder);
  if (!status.ok()) return Explain(std::move(status), published);
  status = RenameFiles(manifest);
  if (!status.ok()) return Explain(std::move(status), published);
  status = files_->Sync(folder);
  if (!status.ok()) return Explain(std::move(status), published);
  status = RemoveLeftovers(manifest);
  if (!status.ok()) {
    // The manifest lists them as replaced, so readers ignore them.
    Log(LogLevel::kWarning,
        "unable to remove what earlier saves of " + name_.prefix + " left: " + status.message);
  }
  return Status::Ok();
}

// Finds files of the last set that will not be overwritten. Fails early where a rename would late.
Status FileSetWriter::FindReplaced(Manifest* manifest) const {
  std::vector<std::string> suffixes;
  Status status = ListSuffixes(files_, name_.prefix, &suffixes);
  if (!status.ok()) return status;
  std::set<std::string> ours;
  for (const ManifestFile& file : manifest->files) ours.insert(file.suffix);
  for (const std::string& suffix : suffixes) {
    if (!name_.owns(suffix)) continue;
    if (ours.count(suffix) == 0) {
      manifest->replaced.push_back(suffix);
      continue;
    }
    bool is_folder = false;
    status = files_->IsFolder(FinalName(suffix), &is_folder);
    if (!status.ok() && status.code != StatusCode::kNotFound) return status;
    if (is_folder) {
      return Status::FailedPrecondition("unable to write " + FinalName(suffix) +
                                        ": a folder has this name");
    }
  }
  std::sort(manifest->replaced.begin(), manifest->replaced.end());
  return Status::Ok();
}

Status FileSetWriter::WriteManifest(const Manifest& manifest) {
  const std::string path = Temporary(name_.manifest);
  temporaries_.insert(path);
  LiveTemporaries::Get().Add(path);
  std::unique_ptr<OutputFile> file;
  Status status = files_->Create(path, &file);
  if (!status.ok()) return status;
  const std::string text = EncodeManifest(manifest);
  status = file->Append(text.data(), static_cast<int64_t>(text.size()));
  if (!status.ok()) return status;
  status = file->Close();
  if (!status.ok()) return status;
  return files_->Sync(path);
}

// Returns whether the manifest is in place, or might be: a rename that fails may have happened all
// the same, on network disks for instance. The temporary files must stay then.
bool FileSetWriter::IsPublished() const {
  Manifest found;
  const Status status = ReadManifest(files_, name_.manifest, &found);
  if (status.ok()) return found.token == token_;
  return status.code != StatusCode::kNotFound && status.code != StatusCode::kDataLoss;
}

Status FileSetWriter::RenameFiles(const Manifest& manifest) {
  Status first_error;
  for (const ManifestFile& file : manifest.files) {
    const std::string path = FinalName(file.suffix);
    Status status = files_->Rename(Temporary(path), path);
    if (!status.ok() && first_error.ok()) first_error = std::move(status);
  }
  return first_error;
}

Status FileSetWriter::RemoveLeftovers(const Manifest& manifest) const {
  std::set<std::string> leftovers;  // names in the folder
  const std::string start = NameOf(name_.prefix);
  for (const std::string& suffix : manifest.replaced) leftovers.insert(start + suffix);
  std::vector<std::string> names;
  Status first_error = files_->List(FolderOf(name_.prefix), &names);
  for (const std::string& name : names) {
    const std::string_view final_name = WithoutTemporaryMark(name);
    if (final_name.size() == name.size()) continue;
    const bool owned =
        final_name.substr(0, start.size()) == start && name_.owns(final_name.substr(start.size()));
    if (!owned && final_name != NameOf(name_.manifest)) continue;
    if (!LiveTemporaries::Get().Contains(SiblingOf(name_.prefix, name))) leftovers.insert(name);
  }
  for (const std::string& name : leftovers) {
    Status status = files_->Remove(SiblingOf(name_.prefix, name));
    if (!status.ok() && status.code != StatusCode::kNotFound && first_error.ok()) {
      first_error = std::move(status);
    }
  }
  return first_error;
}

}  // namespace engine
}  // namespace monolith
