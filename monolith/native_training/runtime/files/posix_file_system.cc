#include "monolith/native_training/runtime/files/posix_file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

namespace monolith {
namespace engine {
namespace {

Status Failure(int error, const char* what, const std::string& path) {
  StatusCode code = StatusCode::kInternal;
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      code = StatusCode::kNotFound;
      break;
    case EACCES:
    case EPERM:
    case EROFS:
      code = StatusCode::kPermissionDenied;
      break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      code = StatusCode::kResourceExhausted;
      break;
    case EISDIR:
    case ENOTEMPTY:
      code = StatusCode::kFailedPrecondition;
      break;
    default:
      break;
  }
  return {code, std::string("unable to ") + what + " " + path + ": " +
                    std::generic_category().message(error)};
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }
  int release() {
    const int number = number_;
    number_ = -1;
    return number;
  }

 private:
  int number_;
};

class PosixInput final : public InputFile {
 public:
  PosixInput(int descriptor, std::string path) : file_(descriptor), path_(std::move(path)) {}

  Status Read(int64_t size, char* out, int64_t* read) override {
    *read = 0;
    while (*read < size) {
      const ssize_t got = ::read(file_.number(), out + *read,
                                 static_cast<size_t>(std::min(size - *read, kMaxCall)));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return Failure(errno, "read", path_);
      if (got == 0) break;
      *read += got;
    }
    return Status::Ok();
  }

 private:
  static constexpr int64_t kMaxCall = 1 << 30;
  Descriptor file_;
  const std::string path_;
};

class PosixOutput final : public OutputFile {
 public:
  PosixOutput(int descriptor, std::string path) : file_(descriptor), path_(std::move(path)) {}

  Status Append(const char* data, int64_t size) override {
    while (size > 0) {
      const ssize_t written =
          ::write(file_.number(), data, static_cast<size_t>(std::min(size, kMaxCall)));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return Failure(errno, "write", path_);
      data += written;
      size -= written;
    }
    return Status::Ok();
  }

  Status Close() override {
    const int descriptor = file_.release();
    if (descriptor >= 0 && close(descriptor) != 0) return Failure(errno, "close", path_);
    return Status::Ok();
  }

 private:
  static constexpr int64_t kMaxCall = 1 << 30;
  Descriptor file_;
  const std::string path_;
};

}  // namespace

Status PosixFileSystem::Create(const std::string& path, std::unique_ptr<OutputFile>* file) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return Failure(errno, "create", path);
  *file = std::make_unique<PosixOutput>(descriptor, path);
  return Status::Ok();
}

Status PosixFileSystem::Open(const std::string& path, std::unique_ptr<InputFile>* file) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return Failure(errno, "open", path);
  *file = std::make_unique<PosixInput>(descriptor, path);
  return Status::Ok();
}

Status PosixFileSystem::GetSize(const std::string& path, int64_t* bytes) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return Failure(errno, "examine", path);
  *bytes = info.st_size;
  return Status::Ok();
}

Status PosixFileSystem::IsFolder(const std::string& path, bool* is_folder) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return Failure(errno, "examine", path);
  *is_folder = S_ISDIR(info.st_mode);
  return Status::Ok();
}

Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) return Failure(errno, "rename", from + " to " + to);
  return Status::Ok();
}

Status PosixFileSystem::Remove(const std::string& path) {
  if (unlink(path.c_str()) != 0) return Failure(errno, "remove", path);
  return Status::Ok();
}

Status PosixFileSystem::List(const std::string& folder, std::vector<std::string>* names) {
  names->clear();
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  if (entries == nullptr) return Failure(errno, "list", folder);
  while (true) {
    errno = 0;
    const dirent* entry = readdir(entries.get());
    if (entry == nullptr) break;
    std::string name(entry->d_name);
    if (name != "." && name != "..") names->push_back(std::move(name));
  }
  if (errno != 0) return Failure(errno, "list", folder);
  return Status::Ok();
}

Status PosixFileSystem::MakeFolders(const std::string& folder) {
  // Creates folders from the lowest existing one downwards, each durable in the one above it.
  std::vector<std::string> missing;
  std::string at = folder;
  while (true) {
    bool is_folder = false;
    const Status status = IsFolder(at, &is_folder);
    if (status.ok() && !is_folder) {
      return Status::FailedPrecondition("unable to create " + folder + ": " + at +
                                        " is not a folder");
    }
    if (status.ok()) break;
    if (status.code != StatusCode::kNotFound) return status;
    missing.push_back(at);
    const std::string above = FolderOf(at);
    if (above == at) break;
    at = above;
  }
  for (auto it = missing.rbegin(); it != missing.rend(); ++it) {
    // Two saves may create one folder at the same time.
    if (mkdir(it->c_str(), 0777) != 0 && errno != EEXIST) return Failure(errno, "create", *it);
    Status status = Sync(FolderOf(*it));
    if (!status.ok()) return status;
  }
  if (!missing.empty()) return Status::Ok();
  const Status status = Sync(FolderOf(folder));
  // The parent may belong to another user who only lets us pass through.
  return status.code == StatusCode::kPermissionDenied ? Status::Ok() : status;
}

Status PosixFileSystem::Sync(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) return Failure(errno, "open and flush", path);
  // Some file systems cannot flush a folder.
  if (fsync(file.number()) != 0 && errno != EINVAL && errno != ENOTSUP) {
    return Failure(errno, "flush", path);
  }
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
