// Checkpoint files in parts: `<basename>-00002-of-00004`. Written aside and published together.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SHARDED_FILES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SHARDED_FILES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

std::string ShardFileName(const std::string& basename, int64_t shard, int64_t nshards);

// Finds a complete set and returns how many files it has. Names that do not end in exactly
// `-ddddd-of-ddddd` are ignored, so half-written files do not disturb.
// InvalidArgument: there is no set, it lacks a file, or two sets of different size are there.
Status FindShardFiles(Env* env, const std::string& basename, int64_t* nshards);

// Number of files for `rows` rows: `requested` if it is positive, by size if it is -1.
Status ResolveNumShards(int64_t requested, int64_t rows, int64_t* nshards);

// A set of files that appears as a whole or not at all. Each file is written under a temporary
// name; Publish makes them durable, renames all and removes what an earlier set of another size
// left. Files that were not published are deleted by the destructor. Open may be called from
// several threads.
class AtomicFileSet {
 public:
  explicit AtomicFileSet(Env* env) : env_(env) {}
  ~AtomicFileSet();
  AtomicFileSet(const AtomicFileSet&) = delete;
  AtomicFileSet& operator=(const AtomicFileSet&) = delete;

  // Creates the folder of `final_name` and a temporary file beside it.
  Status Open(const std::string& final_name, std::unique_ptr<WritableFile>* file);

  // All files must be closed. `basenames` are the sets that were written, `nshards` their size.
  Status Publish(const std::vector<std::string>& basenames, int64_t nshards);

 private:
  struct File {
    std::string temporary;
    std::string final_name;
  };

  Env* const env_;
  mutex mu_;
  std::vector<File> files_;
  bool published_ = false;
};

// Runs work(shard) for every shard, in this thread and on the file pool, and returns the first
// error. File work does not belong on the compute threads.
Status RunPerShard(Env* env, int64_t nshards, const std::function<Status(int64_t)>& work);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SHARDED_FILES_H_
