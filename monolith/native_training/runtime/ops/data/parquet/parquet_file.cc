#include "monolith/native_training/runtime/ops/data/parquet/parquet_file.h"

#include <cstdlib>
#include <utility>

#include "absl/memory/memory.h"
#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "monolith/native_training/runtime/base/install_line.h"
#include "monolith/native_training/runtime/ops/support/library_folders.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/file_system.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::engine::DynamicLibrary;
using ::monolith::engine::MatchingPaths;

struct ParquetApi {
  decltype(&MonolithParquetOpen) open = nullptr;
  decltype(&MonolithParquetClose) close = nullptr;
  decltype(&MonolithParquetDescribe) describe = nullptr;
  decltype(&MonolithParquetAllNames) all_names = nullptr;
  decltype(&MonolithParquetSeek) seek = nullptr;
  decltype(&MonolithParquetRead) read = nullptr;
  decltype(&MonolithParquetGetValues) get_values = nullptr;
};

namespace {

constexpr char kVariable[] = "MONOLITH_PARQUET_LIBRARY";
constexpr size_t kErrorSize = 1024;

// Loads Arrow from the Python package pyarrow, so that the library which needs it finds it. No
// error when it is not there: the system may have Arrow as well.
void LoadArrow() {
  for (const char* const name : {"libarrow.so.*", "libparquet.so.*"}) {
    for (const std::string& folder : PackageFolders()) {
      DynamicLibrary library;
      std::string unused;
      const std::vector<std::string> paths = MatchingPaths(folder + "/pyarrow/" + name);
      if (!paths.empty() && library.Open(paths, &unused)) break;
    }
  }
}

Status GetApi(const ParquetApi** api) {
  static mutex* const mu = std::make_unique<mutex>().release();
  static const ParquetApi* loaded = nullptr;
  mutex_lock lock(*mu);
  if (loaded == nullptr) {
    const char* const given = std::getenv(kVariable);
    const std::string path = given != nullptr && given[0] != '\0'
                                 ? std::string(given)
                                 : OpLibraryFolder() + "/libmonolith_parquet.so";
    LoadArrow();
    DynamicLibrary library;
    std::string error;
    auto found = std::make_unique<ParquetApi>();
    if (!library.Open({path}, &error) ||
        !library.Find("MonolithParquetOpen", &found->open, &error) ||
        !library.Find("MonolithParquetClose", &found->close, &error) ||
        !library.Find("MonolithParquetDescribe", &found->describe, &error) ||
        !library.Find("MonolithParquetAllNames", &found->all_names, &error) ||
        !library.Find("MonolithParquetSeek", &found->seek, &error) ||
        !library.Find("MonolithParquetRead", &found->read, &error) ||
        !library.Find("MonolithParquetGetValues", &found->get_values, &error)) {
      return errors::FailedPrecondition(
          "reading Parquet files needs libmonolith_parquet.so, which is built where pyarrow is "
          "installed, and the pyarrow it was built with: ",
          monolith::engine::InstallLine("parquet"), " (", error, ")");
    }
    loaded = found.release();
  }
  *api = loaded;
  return OkStatus();
}

}  // namespace

// Gives the library its input. The first error of the file system is kept: the library knows but
// that there was one.
struct ParquetFile::Input {
  std::unique_ptr<RandomAccessFile> file;
  MonolithParquetInput callbacks;
  mutex mu;
  Status status TF_GUARDED_BY(mu);

  static int64_t Read(void* context, int64_t offset, int64_t size, void* out) {
    Input* const input = static_cast<Input*>(context);
    StringPiece bytes;
    char* const scratch = static_cast<char*>(out);
    const Status status =
        input->file->Read(static_cast<uint64>(offset), static_cast<size_t>(size), &bytes, scratch);
    if (!status.ok() && !errors::IsOutOfRange(status)) {
      mutex_lock lock(input->mu);
      input->status.Update(status);
      return -1;
    }
    if (bytes.data() != scratch) std::copy(bytes.begin(), bytes.end(), scratch);
    return static_cast<int64_t>(bytes.size());
  }
};

ParquetFile::ParquetFile(const ParquetApi* api, std::string name)
    : api_(api), name_(std::move(name)), input_(std::make_unique<Input>()) {}

ParquetFile::~ParquetFile() {
  if (reader_ != nullptr) api_->close(reader_);
}

Status ParquetFile::Open(Env* env, const std::string& file_name,
                         const std::vector<std::string>& column_names,
                         std::unique_ptr<ParquetFile>* file) {
  const ParquetApi* api = nullptr;
  TF_RETURN_IF_ERROR(GetApi(&api));
  auto opened = absl::WrapUnique(new ParquetFile(api, file_name));
  uint64 size;
  TF_RETURN_IF_ERROR(env->GetFileSize(file_name, &size));
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(file_name, &opened->input_->file));
  opened->input_->callbacks = {opened->input_.get(), static_cast<int64_t>(size), &Input::Read};
  std::vector<const char*> names;
  for (const std::string& name : column_names) names.push_back(name.c_str());
  char error[kErrorSize] = "";
  opened->reader_ = api->open(&opened->input_->callbacks, names.data(),
                              static_cast<int64_t>(names.size()), error, sizeof(error));
  if (opened->reader_ == nullptr) return opened->Error(error);
  *file = std::move(opened);
  return OkStatus();
}

Status ParquetFile::Error(const char* reason) const {
  {
    mutex_lock lock(input_->mu);
    TF_RETURN_IF_ERROR(input_->status);
  }
  return errors::InvalidArgument(name_, " cannot be read as a Parquet file: ", reason);
}

MonolithParquetColumn ParquetFile::Describe(int64_t column) const {
  MonolithParquetColumn described;
  api_->describe(reader_, column, &described);
  return described;
}

std::string ParquetFile::AllNames() const { return api_->all_names(reader_); }

Status ParquetFile::Seek(int64_t row) {
  char error[kErrorSize] = "";
  return api_->seek(reader_, row, error, sizeof(error)) == 0 ? OkStatus() : Error(error);
}

Status ParquetFile::Read(int64_t rows, int64_t* num_read) {
  char error[kErrorSize] = "";
  *num_read = api_->read(reader_, rows, error, sizeof(error));
  return *num_read >= 0 ? OkStatus() : Error(error);
}

MonolithParquetValues ParquetFile::Values(int64_t column) const {
  MonolithParquetValues values;
  api_->get_values(reader_, column, &values);
  return values;
}

}  // namespace monolith_tf
}  // namespace tensorflow
