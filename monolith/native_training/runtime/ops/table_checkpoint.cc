#include "monolith/native_training/runtime/ops/table_checkpoint.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "monolith/native_training/runtime/hash_table/crc32c.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/ops/engine_bridge.h"
#include "monolith/native_training/runtime/ops/record_batch_reader.h"
#include "monolith/native_training/runtime/ops/sharded_files.h"
#include "tensorflow/core/lib/io/random_inputstream.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/mutex.h"
#include "tsl/lib/io/snappy/snappy_inputstream.h"
#include "tsl/lib/io/snappy/snappy_outputbuffer.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::EmbeddingTable;
using ::monolith::engine::LoadStats;
using ::monolith::engine::RecordView;
using ::monolith::hash_table::MultiHashTableMetadata;

// Bytes encoded under one hold of an internal shard's lock: about a millisecond.
constexpr int64_t kSavePageBytes = 1 << 20;
// TensorFlow's own block size; readers size their buffers by it.
constexpr int64_t kSnappyBlockBytes = 256 << 10;
constexpr int64_t kSnappyReadBytes = 10 << 20;
constexpr int64_t kLoadBatch = 2048;

Status AnnotateFile(const Status& status, const std::string& filename) {
  if (status.ok()) return status;
  return Status(status.code(), absl::StrCat(status.message(), " (", filename, ")"));
}

// Where encoded records go.
class RecordSink {
 public:
  virtual ~RecordSink() = default;
  virtual Status Append(absl::string_view bytes) = 0;
  virtual Status Finish() = 0;
};

class PlainSink final : public RecordSink {
 public:
  explicit PlainSink(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
  Status Append(absl::string_view bytes) override { return file_->Append(bytes); }
  Status Finish() override { return file_->Close(); }

 private:
  const std::unique_ptr<WritableFile> file_;
};

class SnappySink final : public RecordSink {
 public:
  explicit SnappySink(std::unique_ptr<WritableFile> file)
      : file_(std::move(file)), buffer_(file_.get(), kSnappyBlockBytes, kSnappyBlockBytes) {}

  Status Append(absl::string_view bytes) override {
    // A larger piece would become a block that readers have no room for.
    for (size_t begin = 0; begin < bytes.size(); begin += kSnappyBlockBytes) {
      TF_RETURN_IF_ERROR(buffer_.Write(bytes.substr(begin, kSnappyBlockBytes)));
    }
    return OkStatus();
  }

  Status Finish() override {
    TF_RETURN_IF_ERROR(buffer_.Flush());
    return file_->Close();
  }

 private:
  const std::unique_ptr<WritableFile> file_;
  tsl::io::SnappyOutputBuffer buffer_;
};

// Writes the part of `table` that belongs to file `shard` of `nshards`.
Status WriteTable(const EmbeddingTable& table, const SaveOptions& options, int64_t shard,
                  int64_t nshards, RecordSink* sink, uint64_t* num_records) {
  std::string buffer;
  for (int64_t internal = shard; internal < EmbeddingTable::NumShards(); internal += nshards) {
    ::monolith::engine::ShardCursor cursor;
    while (!cursor.done) {
      buffer.clear();
      int64_t written = 0;
      const engine::Status status =
          table.SaveShard(static_cast<int>(internal), &options.expiry, kSavePageBytes,
                          /*framed=*/true, &cursor, &buffer, /*sizes=*/nullptr, &written);
      if (status.code == engine::StatusCode::kUnimplemented) {
        return errors::ResourceExhausted(status.message);
      }
      TF_RETURN_IF_ERROR(FromEngine(status));
      TF_RETURN_IF_ERROR(sink->Append(buffer));
      *num_records += static_cast<uint64_t>(written);
    }
  }
  return OkStatus();
}

std::string MetaBasename(const std::string& basename) { return basename + ".meta"; }

Status OpenPlain(Env* env, const std::string& filename,
                 std::unique_ptr<RecordBatchReader>* reader) {
  std::unique_ptr<RandomAccessFile> file;
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(filename, &file));
  *reader = std::make_unique<RecordBatchReader>(
      std::make_unique<io::RandomAccessInputStream>(file.release(), /*owns_file=*/true));
  return OkStatus();
}

Status OpenSnappy(Env* env, const std::string& filename,
                  std::unique_ptr<RecordBatchReader>* reader) {
  std::unique_ptr<RandomAccessFile> file;
  TF_RETURN_IF_ERROR(env->NewRandomAccessFile(filename, &file));
  auto* plain = new io::RandomAccessInputStream(file.release(), /*owns_file=*/true);
  *reader = std::make_unique<RecordBatchReader>(
      std::make_unique<tsl::io::SnappyInputStream>(plain, kSnappyReadBytes, /*owns_input=*/true));
  return OkStatus();
}

Status Corrupt(const std::string& filename, absl::string_view why) {
  return errors::FailedPrecondition("Unable to parse data. Data might be corrupted: ", why, " (",
                                    filename, ")");
}

void LogLoaded(const std::string& name, const LoadStats& stats) {
  LOG(INFO) << "Restored " << stats.loaded << " rows of " << name;
  if (stats.state_reset > 0) {
    LOG(WARNING) << name << ": the optimizer state of " << stats.state_reset
                 << " segments was missing or of another kind and starts anew";
  }
}

void Add(const LoadStats& stats, LoadStats* total) {
  total->loaded += stats.loaded;
  total->skipped_zero += stats.skipped_zero;
  total->state_reset += stats.state_reset;
}

// Rows that the files will give, guessed from their first record, to make room at once.
Status ReserveFor(Env* env, const std::string& basename, int64_t nshards, EmbeddingTable* table) {
  uint64_t total_bytes = 0;
  int64_t record_bytes = 0;
  for (int64_t shard = 0; shard < nshards; ++shard) {
    const std::string filename = ShardFileName(basename, shard, nshards);
    uint64_t bytes = 0;
    TF_RETURN_IF_ERROR(env->GetFileSize(filename, &bytes));
    total_bytes += bytes;
    if (bytes == 0 || record_bytes > 0) continue;
    std::unique_ptr<RecordBatchReader> reader;
    TF_RETURN_IF_ERROR(OpenPlain(env, filename, &reader));
    std::vector<RecordView> records;
    if (reader->Next(1, &records).ok() && !records.empty()) {
      record_bytes = records[0].size + engine::kRecordHeaderBytes + engine::kRecordFooterBytes;
    }
  }
  if (record_bytes == 0) return OkStatus();
  return FromEngine(table->Reserve(static_cast<int64_t>(total_bytes / record_bytes)));
}

Status LoadFile(Env* env, const std::string& filename, EmbeddingTable* table, LoadStats* stats) {
  std::unique_ptr<RecordBatchReader> reader;
  TF_RETURN_IF_ERROR(OpenPlain(env, filename, &reader));
  std::vector<RecordView> records;
  while (true) {
    const Status status = reader->Next(kLoadBatch, &records);
    if (errors::IsDataLoss(status)) return Corrupt(filename, status.message());
    TF_RETURN_IF_ERROR(AnnotateFile(status, filename));
    if (records.empty()) return OkStatus();
    TF_RETURN_IF_ERROR(AnnotateFile(
        FromEngine(table->LoadRecords(records.data(), static_cast<int64_t>(records.size()), stats)),
        filename));
  }
}

Status ReadMetadata(Env* env, const std::string& filename,
                    std::vector<MultiHashTableMetadata>* metadata) {
  std::unique_ptr<RecordBatchReader> reader;
  TF_RETURN_IF_ERROR(OpenPlain(env, filename, &reader));
  std::vector<RecordView> records;
  while (true) {
    if (!reader->Next(kLoadBatch, &records).ok()) {
      return errors::DataLoss("Read table metadata failed! (", filename, ")");
    }
    if (records.empty()) return OkStatus();
    for (const RecordView& record : records) {
      if (!metadata->emplace_back().ParseFromArray(record.data, static_cast<int>(record.size))) {
        return errors::DataLoss("Parse table metadata failed! (", filename, ")");
      }
    }
  }
}

// Reads one data file of a group. `twins` holds a table for every name that is wanted.
Status LoadGroupFile(Env* env, const std::string& filename,
                     const std::vector<MultiHashTableMetadata>& metadata,
                     const std::map<std::string, EmbeddingTable*>& twins,
                     std::map<std::string, LoadStats>* stats) {
  std::unique_ptr<RecordBatchReader> reader;
  TF_RETURN_IF_ERROR(OpenSnappy(env, filename, &reader));
  std::vector<RecordView> records;
  for (const MultiHashTableMetadata& table : metadata) {
    const auto twin = twins.find(table.table_name());
    uint64_t left = table.num_entries();
    while (left > 0) {
      const Status status =
          reader->Next(static_cast<int64_t>(std::min<uint64_t>(left, kLoadBatch)), &records);
      if (!status.ok() || records.empty()) {
        return errors::DataLoss("Parse entry failed! Table ", table.table_name(), " lacks ", left,
                                " of ", table.num_entries(), " rows: ", status.message(), " (",
                                filename, ")");
      }
      left -= records.size();
      if (twin == twins.end()) continue;
      TF_RETURN_IF_ERROR(AnnotateFile(
          FromEngine(twin->second->LoadRecords(records.data(), static_cast<int64_t>(records.size()),
                                               &(*stats)[table.table_name()])),
          filename));
    }
  }
  const Status status = reader->Next(1, &records);
  if (!status.ok() || !records.empty()) {
    return errors::DataLoss("Parse entry failed! There is more than the metadata says (", filename,
                            ")");
  }
  return OkStatus();
}

}  // namespace

Status SaveTable(Env* env, const EmbeddingTable& table, const std::string& basename,
                 const SaveOptions& options) {
  int64_t nshards = 0;
  TF_RETURN_IF_ERROR(ResolveNumShards(options.nshards, table.Size(), &nshards));
  AtomicFileSet files(env);
  TF_RETURN_IF_ERROR(RunPerShard(env, nshards, [&](int64_t shard) {
    std::unique_ptr<WritableFile> file;
    TF_RETURN_IF_ERROR(files.Open(ShardFileName(basename, shard, nshards), &file));
    PlainSink sink(std::move(file));
    uint64_t num_records = 0;
    TF_RETURN_IF_ERROR(WriteTable(table, options, shard, nshards, &sink, &num_records));
    return sink.Finish();
  }));
  return files.Publish({basename}, nshards);
}

Status RestoreTable(Env* env, const std::string& basename, EmbeddingTable* table) {
  int64_t nshards = 0;
  TF_RETURN_IF_ERROR(FindShardFiles(env, basename, &nshards));
  const std::unique_ptr<EmbeddingTable> twin = table->NewEmptyTwin();
  TF_RETURN_IF_ERROR(ReserveFor(env, basename, nshards, twin.get()));
  mutex mu;
  LoadStats total;
  TF_RETURN_IF_ERROR(RunPerShard(env, nshards, [&](int64_t shard) {
    LoadStats stats;
    TF_RETURN_IF_ERROR(LoadFile(env, ShardFileName(basename, shard, nshards), twin.get(), &stats));
    mutex_lock lock(mu);
    Add(stats, &total);
    return OkStatus();
  }));
  LogLoaded(basename, total);
  table->SwapContent(twin.get());
  return OkStatus();
}

Status SaveTables(Env* env, const std::vector<NamedTable>& tables, const std::string& basename,
                  const SaveOptions& options) {
  int64_t rows = 0;
  for (const NamedTable& table : tables) rows += table.table->Size();
  int64_t nshards = 0;
  TF_RETURN_IF_ERROR(ResolveNumShards(options.nshards, rows, &nshards));
  AtomicFileSet files(env);
  TF_RETURN_IF_ERROR(RunPerShard(env, nshards, [&](int64_t shard) {
    std::unique_ptr<WritableFile> data_file, meta_file;
    TF_RETURN_IF_ERROR(files.Open(ShardFileName(basename, shard, nshards), &data_file));
    TF_RETURN_IF_ERROR(
        files.Open(ShardFileName(MetaBasename(basename), shard, nshards), &meta_file));
    SnappySink data(std::move(data_file));
    PlainSink meta(std::move(meta_file));
    for (const NamedTable& table : tables) {
      uint64_t num_records = 0;
      TF_RETURN_IF_ERROR(WriteTable(*table.table, options, shard, nshards, &data, &num_records));
      MultiHashTableMetadata metadata;
      metadata.set_table_name(table.name);
      metadata.set_num_entries(num_records);
      const std::string bytes = metadata.SerializeAsString();
      std::string framed;
      engine::AppendRecord(bytes.data(), static_cast<int64_t>(bytes.size()), &framed);
      TF_RETURN_IF_ERROR(meta.Append(framed));
    }
    TF_RETURN_IF_ERROR(data.Finish());
    return meta.Finish();
  }));
  return files.Publish({basename, MetaBasename(basename)}, nshards);
}

Status RestoreTables(Env* env, const std::string& basename, const std::vector<NamedTable>& tables) {
  int64_t nshards = 0, meta_shards = 0;
  TF_RETURN_IF_ERROR(FindShardFiles(env, basename, &nshards));
  TF_RETURN_IF_ERROR(FindShardFiles(env, MetaBasename(basename), &meta_shards));
  if (nshards != meta_shards) {
    return errors::InvalidArgument(basename, " has ", nshards, " data files but ", meta_shards,
                                   " metadata files");
  }
  std::vector<std::vector<MultiHashTableMetadata>> metadata(nshards);
  std::map<std::string, uint64_t> rows;
  for (int64_t shard = 0; shard < nshards; ++shard) {
    TF_RETURN_IF_ERROR(
        ReadMetadata(env, ShardFileName(MetaBasename(basename), shard, nshards), &metadata[shard]));
    uint64_t bytes = 0;
    TF_RETURN_IF_ERROR(env->GetFileSize(ShardFileName(basename, shard, nshards), &bytes));
    for (const auto& table : metadata[shard]) {
      // Room is made for what is promised, but not for more than the file can hold: a row's
      // checksum alone takes four bytes that do not compress.
      rows[table.table_name()] += std::min<uint64_t>(table.num_entries(), bytes / 4);
    }
  }
  std::vector<std::unique_ptr<EmbeddingTable>> twins(tables.size());
  std::map<std::string, EmbeddingTable*> twin_of;
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto found = rows.find(tables[i].name);
    if (found == rows.end()) {
      LOG(WARNING) << basename << " has no table " << tables[i].name << ", which stays as it is";
      continue;
    }
    twins[i] = tables[i].table->NewEmptyTwin();
    TF_RETURN_IF_ERROR(FromEngine(twins[i]->Reserve(static_cast<int64_t>(found->second))));
    twin_of[tables[i].name] = twins[i].get();
  }
  mutex mu;
  std::map<std::string, LoadStats> total;
  TF_RETURN_IF_ERROR(RunPerShard(env, nshards, [&](int64_t shard) {
    std::map<std::string, LoadStats> stats;
    TF_RETURN_IF_ERROR(LoadGroupFile(env, ShardFileName(basename, shard, nshards), metadata[shard],
                                     twin_of, &stats));
    mutex_lock lock(mu);
    for (const auto& table : stats) Add(table.second, &total[table.first]);
    return OkStatus();
  }));
  LoadStats all;
  for (const auto& table : total) Add(table.second, &all);
  LogLoaded(basename, all);
  for (size_t i = 0; i < tables.size(); ++i) {
    if (twins[i] != nullptr) tables[i].table->SwapContent(twins[i].get());
  }
  return OkStatus();
}

Status ReadTableSizes(Env* env, const std::string& basename,
                      std::vector<std::pair<std::string, uint64_t>>* sizes) {
  int64_t nshards = 0;
  TF_RETURN_IF_ERROR(FindShardFiles(env, MetaBasename(basename), &nshards));
  std::map<std::string, size_t> place;
  for (int64_t shard = 0; shard < nshards; ++shard) {
    std::vector<MultiHashTableMetadata> metadata;
    TF_RETURN_IF_ERROR(
        ReadMetadata(env, ShardFileName(MetaBasename(basename), shard, nshards), &metadata));
    for (const MultiHashTableMetadata& table : metadata) {
      const auto inserted = place.emplace(table.table_name(), sizes->size());
      if (inserted.second) sizes->emplace_back(table.table_name(), 0);
      (*sizes)[inserted.first->second].second += table.num_entries();
    }
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
