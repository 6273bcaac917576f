#include "monolith/native_training/runtime/ops/files/env_file_system.h"

#include <utility>

#include "monolith/native_training/runtime/files/posix_file_system.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/path.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// Returns the path on the local disk; empty if the file is elsewhere.
std::string LocalPath(const std::string& path) {
  StringPiece scheme, host, local;
  io::ParseURI(path, &scheme, &host, &local);
  return scheme.empty() || scheme == "file" ? std::string(local) : std::string();
}

class EnvInput final : public engine::InputFile {
 public:
  explicit EnvInput(std::unique_ptr<RandomAccessFile> file) : file_(std::move(file)) {}

  engine::Status Read(int64_t size, char* out, int64_t* read) override {
    StringPiece result;
    const Status status =
        file_->Read(static_cast<uint64_t>(offset_), static_cast<size_t>(size), &result, out);
    *read = 0;
    if (!status.ok() && !errors::IsOutOfRange(status)) return ToEngine(status);
    // Some file systems return their own memory instead of filling `out`.
    if (result.data() != out) std::memmove(out, result.data(), result.size());
    *read = static_cast<int64_t>(result.size());
    offset_ += *read;
    return engine::Status::Ok();
  }

 private:
  const std::unique_ptr<RandomAccessFile> file_;
  int64_t offset_ = 0;
};

class EnvOutput final : public engine::OutputFile {
 public:
  explicit EnvOutput(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}

  engine::Status Append(const char* data, int64_t size) override {
    return ToEngine(file_->Append(StringPiece(data, static_cast<size_t>(size))));
  }
  engine::Status Close() override { return ToEngine(file_->Close()); }

 private:
  const std::unique_ptr<WritableFile> file_;
};

}  // namespace

engine::Status ToEngine(const Status& status) {
  if (status.ok()) return engine::Status::Ok();
  const std::string message(status.message());
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return engine::Status::InvalidArgument(message);
    case absl::StatusCode::kFailedPrecondition:
      return engine::Status::FailedPrecondition(message);
    case absl::StatusCode::kResourceExhausted:
      return engine::Status::ResourceExhausted(message);
    case absl::StatusCode::kNotFound:
      return engine::Status::NotFound(message);
    case absl::StatusCode::kPermissionDenied:
      return {engine::StatusCode::kPermissionDenied, message};
    case absl::StatusCode::kUnavailable:
      return {engine::StatusCode::kUnavailable, message};
    case absl::StatusCode::kDataLoss:
      return engine::Status::DataLoss(message);
    default:
      return engine::Status::Internal(message);
  }
}

engine::Status EnvFileSystem::Create(const std::string& path,
                                     std::unique_ptr<engine::OutputFile>* file) {
  std::unique_ptr<WritableFile> output;
  const Status status = env_->NewWritableFile(path, &output);
  if (!status.ok()) return ToEngine(status);
  *file = std::make_unique<EnvOutput>(std::move(output));
  return engine::Status::Ok();
}

engine::Status EnvFileSystem::Open(const std::string& path,
                                   std::unique_ptr<engine::InputFile>* file) {
  std::unique_ptr<RandomAccessFile> input;
  const Status status = env_->NewRandomAccessFile(path, &input);
  if (!status.ok()) return ToEngine(status);
  *file = std::make_unique<EnvInput>(std::move(input));
  return engine::Status::Ok();
}

engine::Status EnvFileSystem::GetSize(const std::string& path, int64_t* bytes) {
  uint64_t size = 0;
  const Status status = env_->GetFileSize(path, &size);
  *bytes = static_cast<int64_t>(size);
  return ToEngine(status);
}

engine::Status EnvFileSystem::IsFolder(const std::string& path, bool* is_folder) {
  const Status status = env_->IsDirectory(path);
  *is_folder = status.ok();
  // FailedPrecondition means that the path is a file.
  return errors::IsFailedPrecondition(status) ? engine::Status::Ok() : ToEngine(status);
}

engine::Status EnvFileSystem::Rename(const std::string& from, const std::string& to) {
  return ToEngine(env_->RenameFile(from, to));
}

engine::Status EnvFileSystem::Remove(const std::string& path) {
  return ToEngine(env_->DeleteFile(path));
}

engine::Status EnvFileSystem::List(const std::string& folder, std::vector<std::string>* names) {
  names->clear();
  return ToEngine(env_->GetChildren(folder, names));
}

engine::Status EnvFileSystem::MakeFolders(const std::string& folder) {
  const std::string local = LocalPath(folder);
  if (!local.empty()) return engine::PosixFileSystem().MakeFolders(local);
  return ToEngine(env_->RecursivelyCreateDir(folder));
}

// Flushes local files itself, because TensorFlow's Sync leaves the bytes in the kernel's cache.
// Files elsewhere are durable once they are closed.
engine::Status EnvFileSystem::Sync(const std::string& path) {
  const std::string local = LocalPath(path);
  return local.empty() ? engine::Status::Ok() : engine::PosixFileSystem().Sync(local);
}

}  // namespace monolith_tf
}  // namespace tensorflow
