#include "monolith/native_training/runtime/hash_table/records/table_files.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/log.h"
#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/file_workers.h"

namespace monolith {
namespace engine {
namespace {

// Bytes encoded under one hold of an internal shard's lock: about a millisecond.
constexpr int64_t kSavePageBytes = 1 << 20;
constexpr int64_t kLoadBatch = 2048;
// Smaller files take no longer to load than threads take to start.
constexpr int64_t kMinBytesPerThread = 8 << 20;
constexpr int64_t kMaxThreads = 4;

// Damage is FailedPrecondition for tables, by specification.
Status NameFile(Status status, const std::string& path) {
  if (status.ok()) return status;
  const bool named = status.message.find(path) != std::string::npos;
  const std::string where = named ? "" : " (" + path + ")";
  if (status.code == StatusCode::kDataLoss) {
    return Status::FailedPrecondition(
        "Unable to parse data. Data might be corrupted: " + status.message + where);
  }
  status.message += where;
  return status;
}

// A load of an EmbeddingTable fills a twin, which takes the table's place in the end.
class TwinLoad : public RecordLoad {
 public:
  explicit TwinLoad(EmbeddingTable* table) : table_(table), twin_(table->NewEmptyTwin()) {}

  Status BeginPass(int /*pass*/, int64_t rows) override { return twin_->Reserve(rows); }
  Status Add(const RecordView* records, int64_t n, LoadStats* stats) override {
    return twin_->LoadRecords(records, n, stats);
  }
  Status Finish() override {
    table_->SwapContent(twin_.get());
    return Status::Ok();
  }

 private:
  EmbeddingTable* const table_;
  const std::unique_ptr<EmbeddingTable> twin_;
};

// Reading alone leaves `writable` null.
class HostRecordTable : public RecordTable {
 public:
  HostRecordTable(const EmbeddingTable* table, EmbeddingTable* writable)
      : table_(table), writable_(writable) {}

  Status GetSize(int64_t* size) const override {
    *size = table_->Size();
    return Status::Ok();
  }
  int64_t MaxUpdateTs() const override { return table_->MaxUpdateTs(); }
  const ExpiryPolicy& expiry() const override { return table_->expiry(); }
  Status WriteShard(int shard, const ExpiryPolicy* expiry, const AppendBytes& append,
                    SaveStats* stats) const override {
    std::string buffer;
    ShardCursor cursor;
    while (!cursor.done) {
      buffer.clear();
      Status status = table_->SaveShard(shard, expiry, kSavePageBytes, /*framed=*/true, &cursor,
                                        &buffer, /*sizes=*/nullptr, &stats->saved);
      if (!status.ok()) return status;
      status = append(buffer);
      if (!status.ok()) return status;
    }
    stats->expired += cursor.expired;
    return Status::Ok();
  }
  std::unique_ptr<RecordLoad> NewLoad() override { return std::make_unique<TwinLoad>(writable_); }

 private:
  const EmbeddingTable* const table_;
  EmbeddingTable* const writable_;
};

// Rows that the files will give, to make room at once: by the manifest, else guessed from the first
// record. Never more than the bytes can hold.
Status CountRows(const FileSetReader& reader, int64_t* result) {
  int64_t rows = 0, bytes = 0, record_bytes = 0;
  for (const FileSetReader::File& file : reader.files()) {
    rows += std::min(file.records, file.bytes / (kRecordHeaderBytes + kRecordFooterBytes));
    bytes += file.bytes;
    if (reader.has_manifest() || file.bytes == 0 || record_bytes > 0) continue;
    std::unique_ptr<InputFile> input;
    Status status = reader.Open(file, &input);
    if (!status.ok()) return status;
    RecordBatchReader records(std::move(input));
    std::vector<RecordView> first;
    if (records.Next(1, &first).ok() && !first.empty()) {
      record_bytes = first[0].size + kRecordHeaderBytes + kRecordFooterBytes;
    }
  }
  if (!reader.has_manifest()) rows = record_bytes == 0 ? 0 : bytes / record_bytes;
  *result = rows;
  return Status::Ok();
}

// The files of a set as threads load them into one table. A thread reads a piece of a file while
// the others that have come to it wait, and loads that piece on its own: it takes ten times as long
// to load. A set that this program wrote has each id once, so that their order does not matter;
// other files are read by one thread each, since the last of equal ids counts.
class FileLoader {
 public:
  FileLoader(const FileSetReader& reader, RecordLoad* load)
      : reader_(reader), load_(load), files_(reader.files().size()) {}

  // Threads that are worth having: a file holds the rows of one internal shard after the other, so
  // that many threads in one file would wait for each other.
  int64_t MaxThreads() const {
    const int64_t num_files = static_cast<int64_t>(files_.size());
    if (!reader_.has_manifest()) return num_files;
    int64_t bytes = 0;
    for (const FileSetReader::File& file : reader_.files()) bytes += file.bytes;
    const int64_t cores = static_cast<int64_t>(std::thread::hardware_concurrency());
    return std::max(num_files, std::min({cores, kMaxThreads, bytes / kMinBytesPerThread}));
  }

  // Loads until nothing is left that others do not have, beginning with a file of this thread's.
  Status Load(int64_t thread, int64_t num_threads, LoadStats* stats) {
    const size_t first = static_cast<size_t>(thread) * files_.size() /
                         static_cast<size_t>(std::max<int64_t>(1, num_threads));
    for (size_t i = 0; i < files_.size(); ++i) {
      const size_t number = (first + i) % files_.size();
      Status status = LoadFile(reader_.files()[number], &files_[number], stats);
      if (status.ok()) continue;
      failed_.store(true, std::memory_order_relaxed);
      return NameFile(std::move(status), reader_.files()[number].path);
    }
    return Status::Ok();
  }

 private:
  struct SharedFile {
    std::mutex mutex;
    std::unique_ptr<RecordBatchReader> records;  // null: not open
    bool begun = false;
    bool at_end = false;
    int64_t read = 0;  // records
  };

  Status LoadFile(const FileSetReader::File& file, SharedFile* shared, LoadStats* stats) {
    std::string chunk;
    std::vector<RecordView> records;
    for (bool first = true;; first = false) {
      if (failed_.load(std::memory_order_relaxed)) return Status::Ok();  // another thread says why
      Status status = NextChunk(file, shared, first, &chunk, &records);
      if (!status.ok() || records.empty()) return status;
      status = CheckRecords(records);
      if (!status.ok()) return status;
      status = load_->Add(records.data(), static_cast<int64_t>(records.size()), stats);
      if (!status.ok()) return status;
    }
  }

  // No records: the file is at its end, or another thread's.
  Status NextChunk(const FileSetReader::File& file, SharedFile* shared, bool first,
                   std::string* chunk, std::vector<RecordView>* records) {
    records->clear();
    const std::lock_guard<std::mutex> lock(shared->mutex);
    if (shared->at_end || (first && shared->begun && !reader_.has_manifest())) return Status::Ok();
    if (!shared->begun) {
      shared->begun = true;
      std::unique_ptr<InputFile> input;
      Status status = reader_.Open(file, &input);
      if (!status.ok()) return status;
      shared->records = std::make_unique<RecordBatchReader>(std::move(input));
    }
    if (shared->records == nullptr) return Status::Ok();  // it could not be opened
    Status status = shared->records->NextChunk(chunk, records);
    if (!status.ok()) return status;
    shared->read += static_cast<int64_t>(records->size());
    if (!records->empty()) return Status::Ok();
    shared->at_end = true;
    shared->records.reset();
    if (file.records < 0 || shared->read == file.records) return Status::Ok();
    return Status::DataLoss(std::to_string(shared->read) + " records, want " +
                            std::to_string(file.records));
  }

  const FileSetReader& reader_;
  RecordLoad* const load_;
  std::vector<SharedFile> files_;
  std::atomic<bool> failed_{false};
};

Status LoadSet(const FileSetReader& reader, RecordTable* table, LoadStats* total) {
  int64_t rows = 0;
  Status status = CountRows(reader, &rows);
  if (!status.ok()) return status;
  const std::unique_ptr<RecordLoad> load = table->NewLoad();
  std::mutex mutex;
  LoadStats sum;
  for (int pass = 0; pass < load->num_passes(); ++pass) {
    sum = LoadStats();
    status = load->BeginPass(pass, rows);
    if (!status.ok()) return status;
    FileLoader loader(reader, load.get());
    const int64_t threads = loader.MaxThreads();
    status = ForEachFile(threads, [&](int64_t i) {
      LoadStats stats;
      Status loaded = loader.Load(i, threads, &stats);
      std::lock_guard<std::mutex> lock(mutex);
      sum.Add(stats);
      return loaded;
    });
    if (!status.ok()) return status;
  }
  status = load->Finish();
  if (!status.ok()) return status;
  if (total != nullptr) *total = sum;
  return Status::Ok();
}

}  // namespace

Status ResolveNumFiles(int64_t requested, int64_t rows, int64_t* num_files) {
  if (requested == 0 || requested < -1 || requested > kMaxShards) {
    return Status::InvalidArgument("nshards is " + std::to_string(requested) +
                                   ", want -1 or 1 to " + std::to_string(kMaxShards));
  }
  constexpr int64_t kRowsPerFile = 1000000;
  constexpr int64_t kMaxFilesBySize = 4;
  *num_files =
      requested > 0 ? requested : std::clamp<int64_t>(rows / kRowsPerFile, 1, kMaxFilesBySize);
  return Status::Ok();
}

std::unique_ptr<RecordTable> AsRecordTable(EmbeddingTable* table) {
  return std::make_unique<HostRecordTable>(table, table);
}

Status WriteTableRecords(const RecordTable& table, const ExpiryPolicy* expiry, int64_t number,
                         int64_t num_files, const AppendBytes& append, SaveStats* stats) {
  for (int64_t shard = number; shard < EmbeddingTable::NumShards(); shard += num_files) {
    Status status = table.WriteShard(static_cast<int>(shard), expiry, append, stats);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

void WarnIfMostExpired(const RecordTable& table, const std::string& what, const SaveStats& stats) {
  if (stats.expired <= stats.saved) return;
  Log(LogLevel::kError,
      what + ": " + std::to_string(stats.expired) + " of " +
          std::to_string(stats.expired + stats.saved) +
          " rows have expired and were left out of the save. The newest request time of the table "
          "is " +
          std::to_string(table.MaxUpdateTs()) +
          "; is it in seconds, and are the expire times right?");
}

Status LoadTableRecords(RecordBatchReader* reader, int64_t limit, RecordLoad* load,
                        LoadStats* stats, int64_t* loaded) {
  *loaded = 0;
  std::vector<RecordView> records;
  while (*loaded < limit) {
    Status status = reader->Next(std::min(limit - *loaded, kLoadBatch), &records);
    if (!status.ok()) return status;
    if (records.empty()) return Status::Ok();
    *loaded += static_cast<int64_t>(records.size());
    if (load == nullptr) continue;
    status = load->Add(records.data(), static_cast<int64_t>(records.size()), stats);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status SaveTable(FileSystem* files, const EmbeddingTable& table, const std::string& basename,
                 int64_t num_files, const ExpiryPolicy* expiry, SaveStats* stats) {
  return SaveTable(files, HostRecordTable(&table, nullptr), basename, num_files, expiry, stats);
}

Status SaveTable(FileSystem* files, const RecordTable& table, const std::string& basename,
                 int64_t num_files, const ExpiryPolicy* expiry, SaveStats* stats) {
  int64_t rows = 0;
  Status status = table.GetSize(&rows);
  if (!status.ok()) return status;
  status = ResolveNumFiles(num_files, rows, &num_files);
  if (!status.ok()) return status;
  FileSetWriter set(files, ShardedSetName(basename, {""}));
  std::mutex mutex;
  SaveStats total;
  status = ForEachFile(num_files, [&](int64_t i) {
    std::unique_ptr<SetOutputFile> file;
    Status written = set.Create(ShardSuffix("", i, num_files), &file);
    if (!written.ok()) return written;
    SaveStats part;
    written = WriteTableRecords(
        table, expiry, i, num_files,
        [&](std::string_view bytes) {
          return file->Append(bytes.data(), static_cast<int64_t>(bytes.size()));
        },
        &part);
    if (!written.ok()) return written;
    file->AddRecords(part.saved);
    written = file->Close();
    if (!written.ok()) return written;
    std::lock_guard<std::mutex> lock(mutex);
    total.Add(part);
    return Status::Ok();
  });
  if (!status.ok()) return status;
  status = set.Publish();
  if (!status.ok()) return status;
  WarnIfMostExpired(table, basename, total);
  if (stats != nullptr) *stats = total;
  return Status::Ok();
}

Status LoadTable(FileSystem* files, const std::string& basename, EmbeddingTable* table,
                 LoadStats* stats) {
  HostRecordTable rows(table, table);
  return LoadTable(files, basename, &rows, stats);
}

Status LoadTable(FileSystem* files, const std::string& basename, RecordTable* table,
                 LoadStats* stats) {
  return NameFile(ReadShardedSet(files, basename, {""},
                                 [&](const FileSetReader& reader, int64_t) {
                                   return LoadSet(reader, table, stats);
                                 }),
                  basename);
}

}  // namespace engine
}  // namespace monolith
