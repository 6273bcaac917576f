#include "monolith/native_training/runtime/ops/sharded_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "monolith/native_training/runtime/ops/file_pool.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/path.h"
#include "tensorflow/core/platform/random.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr int64_t kMaxShards = 99999;  // five digits
constexpr absl::string_view kTemporaryMark = "-tmp-";

struct ShardName {
  int64_t shard = 0;
  int64_t nshards = 0;
};

bool ParseDigits(absl::string_view text, int64_t* value) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; }) &&
         absl::SimpleAtoi(text, value);
}

// Parses what follows a base name: `-ddddd-of-ddddd` and nothing else.
bool ParseSuffix(absl::string_view suffix, ShardName* name) {
  constexpr absl::string_view kPattern = "-ddddd-of-ddddd";
  return suffix.size() == kPattern.size() && suffix[0] == '-' && suffix.substr(6, 4) == "-of-" &&
         ParseDigits(suffix.substr(1, 5), &name->shard) &&
         ParseDigits(suffix.substr(10, 5), &name->nshards);
}

// The entries of the base name's folder that start with its last component, as suffixes. Listing
// instead of globbing: a base name may hold characters that mean something in a pattern.
Status ListSuffixes(Env* env, const std::string& basename, std::vector<std::string>* suffixes) {
  const std::string folder(io::Dirname(basename));
  const std::string prefix(io::Basename(basename));
  std::vector<std::string> names;
  const Status status = env->GetChildren(folder.empty() ? "." : folder, &names);
  if (errors::IsNotFound(status)) return OkStatus();
  TF_RETURN_IF_ERROR(status);
  for (const std::string& name : names) {
    if (absl::StartsWith(name, prefix)) suffixes->push_back(name.substr(prefix.size()));
  }
  return OkStatus();
}

// The temporary files that saves of this process are writing: what else looks like one was left by
// a save that was interrupted.
class LiveTemporaries {
 public:
  // Never destroyed: a save may still run in a thread of its own when the process ends.
  static LiveTemporaries& Get() {
    static auto* live = new LiveTemporaries;
    return *live;
  }

  void Add(const std::string& name) {
    mutex_lock lock(mu_);
    names_.insert(name);
  }
  void Remove(const std::string& name) {
    mutex_lock lock(mu_);
    names_.erase(name);
  }
  bool Contains(const std::string& name) {
    mutex_lock lock(mu_);
    return names_.count(name) > 0;
  }

  // Held while a set gets its final names, so that two saves of one base name do not mix.
  mutex* publishing() { return &publishing_; }

 private:
  mutex mu_;
  mutex publishing_;
  std::set<std::string> names_ TF_GUARDED_BY(mu_);
};

// Flushes a local file or folder to the disk; other file systems are durable when a file is closed.
Status SyncToDisk(const std::string& path) {
  absl::string_view scheme, host, local;
  io::ParseURI(path, &scheme, &host, &local);
  if (!scheme.empty() && scheme != "file") return OkStatus();
  const int descriptor = open(std::string(local).c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return errors::Internal("Unable to open ", path, " to flush it: ", std::strerror(errno));
  }
  const int result = fsync(descriptor);
  const int error = errno;
  close(descriptor);
  // Some file systems do not support flushing a folder.
  if (result != 0 && error != EINVAL && error != ENOTSUP) {
    return errors::Internal("Unable to flush ", path, ": ", std::strerror(error));
  }
  return OkStatus();
}

}  // namespace

std::string ShardFileName(const std::string& basename, int64_t shard, int64_t nshards) {
  return absl::StrFormat("%s-%05d-of-%05d", basename, shard, nshards);
}

Status FindShardFiles(Env* env, const std::string& basename, int64_t* nshards) {
  std::vector<std::string> suffixes;
  TF_RETURN_IF_ERROR(ListSuffixes(env, basename, &suffixes));
  std::vector<bool> found;
  for (const std::string& suffix : suffixes) {
    ShardName name;
    if (!ParseSuffix(suffix, &name)) continue;
    if (found.empty()) found.resize(name.nshards);
    if (static_cast<int64_t>(found.size()) != name.nshards) {
      return errors::InvalidArgument("Filename ", basename, suffix, " doesn't match nshards. ",
                                     found.size());
    }
    if (name.shard >= name.nshards) {
      return errors::InvalidArgument("Shard ", name.shard, " exceeds ", name.nshards, " for ",
                                     basename);
    }
    found[name.shard] = true;
  }
  if (found.empty()) {
    return errors::InvalidArgument("There is no valid sharded files for ", basename);
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i]) {
      return errors::InvalidArgument("Shard ", i, " doesn't show up for ", basename);
    }
  }
  *nshards = static_cast<int64_t>(found.size());
  return OkStatus();
}

Status ResolveNumShards(int64_t requested, int64_t rows, int64_t* nshards) {
  if (requested == 0 || requested < -1 || requested > kMaxShards) {
    return errors::InvalidArgument("nshards is ", requested, ", want -1 or 1 to ", kMaxShards);
  }
  constexpr int64_t kRowsPerShard = 1000000;
  constexpr int64_t kMaxShardsBySize = 4;
  *nshards = requested > 0 ? requested
                           : std::min(kMaxShardsBySize, std::max<int64_t>(1, rows / kRowsPerShard));
  return OkStatus();
}

AtomicFileSet::~AtomicFileSet() {
  for (const File& file : files_) LiveTemporaries::Get().Remove(file.temporary);
  if (published_) return;
  for (const File& file : files_) {
    const Status status = env_->DeleteFile(file.temporary);
    if (!status.ok() && !errors::IsNotFound(status)) {
      LOG(WARNING) << "Unable to delete " << file.temporary << ": " << status;
    }
  }
}

Status AtomicFileSet::Open(const std::string& final_name, std::unique_ptr<WritableFile>* file) {
  const std::string folder(io::Dirname(final_name));
  if (!folder.empty()) TF_RETURN_IF_ERROR(env_->RecursivelyCreateDir(folder));
  const std::string temporary = absl::StrCat(final_name, kTemporaryMark, random::New64());
  {
    mutex_lock lock(mu_);
    files_.push_back({temporary, final_name});
  }
  LiveTemporaries::Get().Add(temporary);
  return env_->NewWritableFile(temporary, file);
}

Status AtomicFileSet::Publish(const std::vector<std::string>& basenames, int64_t nshards) {
  mutex_lock lock(mu_);
  std::map<std::string, bool> folders;
  for (const File& file : files_) {
    TF_RETURN_IF_ERROR(SyncToDisk(file.temporary));
    folders[std::string(io::Dirname(file.final_name))] = true;
  }
  mutex_lock publishing(*LiveTemporaries::Get().publishing());
  for (const File& file : files_) {
    TF_RETURN_IF_ERROR(env_->RenameFile(file.temporary, file.final_name));
  }
  published_ = true;
  for (const auto& folder : folders) {
    TF_RETURN_IF_ERROR(SyncToDisk(folder.first.empty() ? "." : folder.first));
  }
  // Only now that the new set is safe: what an interrupted save or one of another size left behind.
  for (const std::string& basename : basenames) {
    std::vector<std::string> suffixes;
    TF_RETURN_IF_ERROR(ListSuffixes(env_, basename, &suffixes));
    for (const std::string& suffix : suffixes) {
      ShardName name;
      const size_t mark = suffix.find(kTemporaryMark);
      const bool stale = mark != std::string::npos
                             ? ParseSuffix(suffix.substr(0, mark), &name)
                             : ParseSuffix(suffix, &name) && name.nshards != nshards;
      if (!stale || LiveTemporaries::Get().Contains(basename + suffix)) continue;
      const Status status = env_->DeleteFile(basename + suffix);
      if (!status.ok() && !errors::IsNotFound(status)) return status;
    }
  }
  return OkStatus();
}

Status RunPerShard(Env* /*env*/, int64_t nshards, const std::function<Status(int64_t)>& work) {
  if (nshards == 1) return work(0);
  std::atomic<int64_t> next{0};
  mutex mu;
  Status first_error;
  FilePool()->RunSteps(nshards, [&] {
    const int64_t shard = next.fetch_add(1);
    if (shard >= nshards) return false;
    const Status status = work(shard);
    if (status.ok()) return true;
    mutex_lock lock(mu);
    first_error.Update(status);
    next.store(nshards);
    return false;
  });
  return first_error;
}

}  // namespace monolith_tf
}  // namespace tensorflow
