// A local file system that fails, or dies, at a chosen call.
#ifndef TESTS_NATIVE_TRAINING_RUNTIME_FILES_FAULTY_FILE_SYSTEM_H_
#define TESTS_NATIVE_TRAINING_RUNTIME_FILES_FAULTY_FILE_SYSTEM_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/files/posix_file_system.h"

namespace monolith {
namespace engine {

enum class Fault {
  kError,      // the call fails and does nothing
  kErrorDone,  // the call is carried out, but reports an error
  kErrorsOn,   // this call and all after it fail: the disk is gone
  kKill,       // the process ends before the call
};

// Does not wait for the disk: what a process has written survives its end anyway.
class UnsyncedFileSystem : public PosixFileSystem {
 public:
  Status Sync(const std::string& path) override {
    int64_t bytes = 0;
    return GetSize(path, &bytes);
  }
};

// Counts the calls that change something (and Sync) from 1 on.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(int64_t at = 0, Fault fault = Fault::kError) : at_(at), fault_(fault) {}

  int64_t calls() const { return calls_; }

  Status Create(const std::string& path, std::unique_ptr<OutputFile>* file) override {
    return Change("create", path, [&] {
      std::unique_ptr<OutputFile> output;
      Status status = disk_.Create(path, &output);
      if (status.ok()) *file = std::make_unique<Output>(this, path, std::move(output));
      return status;
    });
  }
  Status Open(const std::string& path, std::unique_ptr<InputFile>* file) override {
    return disk_.Open(path, file);
  }
  Status GetSize(const std::string& path, int64_t* bytes) override {
    return disk_.GetSize(path, bytes);
  }
  Status IsFolder(const std::string& path, bool* is_folder) override {
    return disk_.IsFolder(path, is_folder);
  }
  Status Rename(const std::string& from, const std::string& to) override {
    return Change("rename", to, [&] { return disk_.Rename(from, to); });
  }
  Status Remove(const std::string& path) override {
    return Change("remove", path, [&] { return disk_.Remove(path); });
  }
  Status List(const std::string& folder, std::vector<std::string>* names) override {
    return disk_.List(folder, names);
  }
  Status MakeFolders(const std::string& folder) override {
    return Change("mkdir", folder, [&] { return disk_.MakeFolders(folder); });
  }
  Status Sync(const std::string& path) override {
    return Change("sync", path, [&] { return disk_.Sync(path); });
  }

 private:
  class Output final : public OutputFile {
   public:
    Output(FaultyFileSystem* files, std::string path, std::unique_ptr<OutputFile> file)
        : files_(files), path_(std::move(path)), file_(std::move(file)) {}
    Status Append(const char* data, int64_t size) override {
      return files_->Change("append", path_, [&] { return file_->Append(data, size); });
    }
    Status Close() override {
      return files_->Change("close", path_, [&] { return file_->Close(); });
    }

   private:
    FaultyFileSystem* const files_;
    const std::string path_;
    const std::unique_ptr<OutputFile> file_;
  };

  Status Change(const char* what, const std::string& path, const std::function<Status()>& change) {
    const int64_t call = ++calls_;
    const bool now = at_ > 0 && (call == at_ || (fault_ == Fault::kErrorsOn && call > at_));
    if (!now) return change();
    if (fault_ == Fault::kKill) {
      kill(getpid(), SIGKILL);
      while (true) pause();
    }
    if (fault_ == Fault::kErrorDone) (void)change();
    return Status::Internal(std::string("injected error at ") + what + " of " + path);
  }

  UnsyncedFileSystem disk_;
  const int64_t at_;
  const Fault fault_;
  std::atomic<int64_t> calls_{0};
};

// A fresh folder that its destructor removes.
class TestFolder {
 public:
  TestFolder() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base == nullptr ? "/tmp" : base) + "/file_set_test_XXXXXX";
    EXPECT_NE(mkdtemp(&path_[0]), nullptr);
  }
  ~TestFolder() { Clear(path_); }

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    EXPECT_TRUE(PosixFileSystem().List(path_, &names).ok());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  static void Clear(const std::string& folder) {
    PosixFileSystem files;
    std::vector<std::string> names;
    (void)files.List(folder, &names);
    for (const std::string& name : names) {
      const std::string path = folder + "/" + name;
      if (unlink(path.c_str()) != 0) Clear(path);
    }
    rmdir(folder.c_str());
  }

  std::string path_;
};

inline void WriteFile(const std::string& path, const std::string& content) {
  PosixFileSystem files;
  std::unique_ptr<OutputFile> file;
  ASSERT_TRUE(files.Create(path, &file).ok());
  ASSERT_TRUE(file->Append(content.data(), static_cast<int64_t>(content.size())).ok());
  ASSERT_TRUE(file->Close().ok());
}

inline std::string ReadFile(const std::string& path) {
  PosixFileSystem files;
  std::unique_ptr<InputFile> file;
  int64_t bytes = 0, read = 0;
  EXPECT_TRUE(files.GetSize(path, &bytes).ok()) << path;
  if (!files.Open(path, &file).ok()) return "";
  std::string content(static_cast<size_t>(bytes) + 1, '\0');
  EXPECT_TRUE(file->Read(bytes + 1, &content[0], &read).ok());
  content.resize(static_cast<size_t>(read));
  return content;
}

// Runs `work` in its own process; returns whether it was killed.
inline bool RunAndSeeWhetherKilled(const std::function<void()>& work) {
  const pid_t child = fork();
  EXPECT_GE(child, 0);
  if (child == 0) {
    work();
    _exit(0);
  }
  int result = 0;
  EXPECT_EQ(waitpid(child, &result, 0), child);
  return WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL;
}

}  // namespace engine
}  // namespace monolith

#endif  // TESTS_NATIVE_TRAINING_RUNTIME_FILES_FAULTY_FILE_SYSTEM_H_
