// Sets of files that appear together or not at all, and are read together or not at all. The heart
// of this folder: checkpoints of tables and filters are such sets.
//
// A save writes its files beside those of the last one and makes them durable. Then it renames a
// manifest into place: from this moment the new set counts. Only then do the files get their final
// names.
//
//   t-00000-of-00002          old    old       old       new       new
//   t-00001-of-00002          old    old       old       old       new
//   t-00000-of-00002-tmp-7           written   written   -         -
//   t-00001-of-00002-tmp-7           written   written   written   -
//   .t.manifest               old    old       new, 7    new, 7    new, 7
//                                              ^ counts
//
// A reader takes a file that the manifest names under its temporary name where that exists, and
// under its final name where it does not. So whatever happens at any of these steps, a reader finds
// the old set or the new one, and nothing needs repair. It compares sizes before it reads, and
// checksums while it reads.
//
// Sets without a manifest, which other programs wrote, are read if they are complete.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SET_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/files/file_system.h"
#include "monolith/native_training/runtime/files/manifest.h"

namespace monolith {
namespace engine {

// The names of a set's files.
struct FileSetName {
  std::string prefix;    // a path; every file is called prefix + suffix
  std::string manifest;  // a path in the same folder
  // Returns whether a suffix may belong to this set, however many files the set has.
  std::function<bool(std::string_view suffix)> owns;
};

// Returns the names `<basename><kind>-ddddd-of-ddddd` for every kind. The manifest beside them is
// `.<name>.manifest`: hidden, because some programs take every file whose name begins with the base
// name for data.
FileSetName ShardedSetName(const std::string& basename, const std::vector<std::string>& kinds);

// Returns `<kind>-ddddd-of-ddddd`.
std::string ShardSuffix(const std::string& kind, int64_t shard, int64_t num_shards);

constexpr int64_t kMaxShards = 99999;  // five digits

class FileSetWriter;

// A file of a set while it is written. Close makes it durable.
class SetOutputFile final : public OutputFile {
 public:
  Status Append(const char* data, int64_t size) override;
  Status Close() override;
  void AddRecords(int64_t n) { entry_.records += n; }

 private:
  friend class FileSetWriter;
  SetOutputFile(FileSetWriter* set, std::string suffix, std::unique_ptr<OutputFile> file);

  FileSetWriter* const set_;
  const std::unique_ptr<OutputFile> file_;
  ManifestFile entry_;
};

// Writes a set. Create and the files may be used from several threads, one file from one thread.
class FileSetWriter {
 public:
  // `files` must outlive the writer.
  FileSetWriter(FileSystem* files, FileSetName name);
  // Removes what was written unless it was published.
  ~FileSetWriter();
  FileSetWriter(const FileSetWriter&) = delete;
  FileSetWriter& operator=(const FileSetWriter&) = delete;

  // Creates the set's folder and a file in it, under a temporary name.
  Status Create(const std::string& suffix, std::unique_ptr<SetOutputFile>* file);

  // Replaces the previous set. All files must be closed. After an error the old set is in place, or
  // the new one if the message says so.
  Status Publish();

 private:
  friend class SetOutputFile;

  std::string FinalName(const std::string& suffix) const { return name_.prefix + suffix; }
  std::string Temporary(const std::string& path) const;
  void Done(ManifestFile entry);
  Status FindReplaced(Manifest* manifest) const;
  Status WriteManifest(const Manifest& manifest);
  bool IsPublished() const;
  Status RenameFiles(const Manifest& manifest);
  Status RemoveLeftovers(const Manifest& manifest) const;

  FileSystem* const files_;
  const FileSetName name_;
  const uint64_t token_;
  std::mutex mutex_;
  bool has_folder_ = false;
  std::set<std::string> temporaries_;  // paths, the manifest's included
  std::vector<ManifestFile> done_;
  bool keep_ = false;  // the manifest names the temporary files, or might
};

// Reads a set.
class FileSetReader {
 public:
  struct File {
    std::string suffix;
    std::string path;
    int64_t bytes = 0;
    int64_t records = -1;  // -1: unknown, there is no manifest
    uint32_t crc = 0;
  };

  // Takes the files that the manifest names and compares their sizes. Errors name file and sizes:
  //   DataLoss         a file's size differs from the manifest, or the manifest is damaged
  //   InvalidArgument  a file is missing, or the manifest does not name a file that exists
  //   NotFound         there is no manifest
  static Status OpenManifest(FileSystem* files, const FileSetName& name, FileSetReader* reader);

  // Takes the files with these suffixes, for sets without a manifest.
  static Status OpenFiles(FileSystem* files, const FileSetName& name,
                          const std::vector<std::string>& suffixes, FileSetReader* reader);

  // Returns the files, sorted by suffix.
  const std::vector<File>& files() const { return set_; }
  bool has_manifest() const { return has_manifest_; }

  // Returns null if the set has no such file.
  const File* Find(const std::string& suffix) const;

  // Opens a file. With a manifest, the read that reaches its end fails with DataLoss if the content
  // is not what was saved.
  Status Open(const File& file, std::unique_ptr<InputFile>* input) const;

  // Returns whether a save has replaced this set since it was opened: an error while reading it
  // means nothing then.
  bool Replaced() const;

 private:
  void SortFiles();

  FileSystem* file_system_ = nullptr;
  FileSetName name_;
  std::vector<File> set_;  // sorted by suffix
  bool has_manifest_ = false;
  uint64_t token_ = 0;
};

// Opens `<basename><kind>-ddddd-of-ddddd` for every kind, with or without a manifest, and passes it
// to `read` with the number of files per kind. Does both again if a save replaces the set
// meanwhile. Without a manifest, fails with InvalidArgument if a file is missing or the names do
// not fit together.
Status ReadShardedSet(
    FileSystem* files, const std::string& basename, const std::vector<std::string>& kinds,
    const std::function<Status(const FileSetReader& reader, int64_t num_shards)>& read);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_SET_H_
