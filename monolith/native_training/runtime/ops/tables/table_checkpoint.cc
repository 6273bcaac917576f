#include "monolith/native_training/runtime/ops/tables/table_checkpoint.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>

#include "monolith/native_training/runtime/files/file_set.h"
#include "monolith/native_training/runtime/files/file_workers.h"
#include "monolith/native_training/runtime/files/record_reader.h"
#include "monolith/native_training/runtime/hash_table/embedding_hash_table.pb.h"
#include "monolith/native_training/runtime/hash_table/records/table_files.h"
#include "monolith/native_training/runtime/ops/files/env_file_system.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::engine::FileSetReader;
using ::monolith::engine::LoadStats;
using ::monolith::engine::RecordLoad;
using ::monolith::engine::RecordTable;
using ::monolith::engine::RecordView;
using ::monolith::engine::SaveStats;
using ::monolith::hash_table::MultiHashTableMetadata;

const char kMeta[] = ".meta";
constexpr int64_t kMetadataBatch = 2048;

// Reports a SERVING table, which cannot be saved, with the error of a full disk as specified.
Status FromSave(const engine::Status& status) {
  return status.code == engine::StatusCode::kUnimplemented
             ? errors::ResourceExhausted(status.message)
             : FromEngine(status);
}

void LogLoaded(const std::string& name, const LoadStats& stats) {
  LOG(INFO) << "Restored " << stats.loaded << " rows of " << name;
  if (stats.state_reset > 0) {
    LOG(WARNING) << name << ": the optimizer state of " << stats.state_reset
                 << " segments was missing or of another kind and starts anew";
  }
}

engine::Status NameFile(engine::Status status, const std::string& path) {
  if (!status.ok() && status.message.find(path) == std::string::npos) {
    status.message += " (" + path + ")";
  }
  return status;
}

// Writes one file with rows of all tables, and one with the number of rows per table.
engine::Status WriteGroupFiles(const std::vector<NamedRecordTable>& tables,
                               const SaveOptions& options, int64_t shard, int64_t nshards,
                               engine::FileSetWriter* set, std::vector<SaveStats>* stats) {
  std::unique_ptr<engine::SetOutputFile> data_file, meta_file;
  engine::Status status = set->Create(engine::ShardSuffix("", shard, nshards), &data_file);
  if (!status.ok()) return status;
  status = set->Create(engine::ShardSuffix(kMeta, shard, nshards), &meta_file);
  if (!status.ok()) return status;
  const std::unique_ptr<engine::OutputFile> data = NewSnappyOutput(data_file.get());
  std::string meta;
  for (size_t i = 0; i < tables.size(); ++i) {
    status = engine::WriteTableRecords(
        *tables[i].table, options.use_own_expiry ? &tables[i].table->expiry() : &options.expiry,
        shard, nshards,
        [&](std::string_view bytes) {
          return data->Append(bytes.data(), static_cast<int64_t>(bytes.size()));
        },
        &(*stats)[i]);
    if (!status.ok()) return status;
    MultiHashTableMetadata metadata;
    metadata.set_table_name(tables[i].name);
    metadata.set_num_entries(static_cast<uint64_t>((*stats)[i].saved));
    const std::string bytes = metadata.SerializeAsString();
    engine::AppendRecord(bytes.data(), static_cast<int64_t>(bytes.size()), &meta);
    data_file->AddRecords((*stats)[i].saved);
  }
  status = data->Close();
  if (!status.ok()) return status;
  status = data_file->Close();
  if (!status.ok()) return status;
  meta_file->AddRecords(static_cast<int64_t>(tables.size()));
  status = meta_file->Append(meta.data(), static_cast<int64_t>(meta.size()));
  if (!status.ok()) return status;
  return meta_file->Close();
}

engine::Status ReadMetadata(const FileSetReader& reader, const FileSetReader::File& file,
                            std::vector<MultiHashTableMetadata>* metadata) {
  std::unique_ptr<engine::InputFile> input;
  engine::Status status = reader.Open(file, &input);
  if (!status.ok()) return status;
  engine::RecordBatchReader reader_of_records(std::move(input));
  std::vector<RecordView> records;
  while (true) {
    status = reader_of_records.Next(kMetadataBatch, &records);
    if (!status.ok()) {
      return engine::Status::DataLoss("Read table metadata failed! " + status.message + " (" +
                                      file.path + ")");
    }
    if (records.empty()) return engine::Status::Ok();
    for (const RecordView& record : records) {
      if (!metadata->emplace_back().ParseFromArray(record.data, static_cast<int>(record.size))) {
        return engine::Status::DataLoss("Parse table metadata failed! (" + file.path + ")");
      }
    }
  }
}

// Reads one data file of a group into `loads`, which holds one for every wanted name.
engine::Status LoadGroupFile(const FileSetReader& reader, const FileSetReader::File& file,
                             const std::vector<MultiHashTableMetadata>& metadata,
                             const std::map<std::string, RecordLoad*>& loads, LoadStats* stats) {
  std::unique_ptr<engine::InputFile> input;
  engine::Status status = reader.Open(file, &input);
  if (!status.ok()) return status;
  engine::RecordBatchReader records(NewSnappyInput(std::move(input)));
  for (const MultiHashTableMetadata& table : metadata) {
    const auto load = loads.find(table.table_name());
    const uint64_t wanted = table.num_entries();
    const int64_t limit =
        static_cast<int64_t>(std::min<uint64_t>(wanted, std::numeric_limits<int64_t>::max()));
    int64_t loaded = 0;
    status = engine::LoadTableRecords(&records, limit, load == loads.end() ? nullptr : load->second,
                                      stats, &loaded);
    const bool damaged = status.code == engine::StatusCode::kDataLoss;
    if (damaged || (status.ok() && static_cast<uint64_t>(loaded) < wanted)) {
      return engine::Status::DataLoss(
          "Parse entry failed! Table " + table.table_name() + " lacks " +
          std::to_string(wanted - static_cast<uint64_t>(loaded)) + " of " + std::to_string(wanted) +
          " rows: " + status.message + " (" + file.path + ")");
    }
    if (!status.ok()) return NameFile(std::move(status), file.path);
  }
  int64_t more = 0;
  status = engine::LoadTableRecords(&records, 1, nullptr, stats, &more);
  if (!status.ok()) {
    return engine::Status::DataLoss("Parse entry failed! " + status.message + " (" + file.path +
                                    ")");
  }
  if (more > 0) {
    return engine::Status::DataLoss("Parse entry failed! There is more than the metadata says (" +
                                    file.path + ")");
  }
  return engine::Status::Ok();
}

engine::Status LoadGroup(const FileSetReader& reader, int64_t nshards, const std::string& basename,
                         const std::vector<NamedRecordTable>& tables) {
  std::vector<std::vector<MultiHashTableMetadata>> metadata(nshards);
  std::map<std::string, uint64_t> rows;
  for (int64_t shard = 0; shard < nshards; ++shard) {
    engine::Status status = ReadMetadata(
        reader, *reader.Find(engine::ShardSuffix(kMeta, shard, nshards)), &metadata[shard]);
    if (!status.ok()) return status;
    const int64_t bytes = reader.Find(engine::ShardSuffix("", shard, nshards))->bytes;
    for (const auto& table : metadata[shard]) {
      // Reserves what the metadata promises, but not more than the file can hold: a row's checksum
      // alone takes four bytes that do not compress.
      rows[table.table_name()] +=
          std::min<uint64_t>(table.num_entries(), static_cast<uint64_t>(bytes) / 4);
    }
  }
  // All tables make as many passes as the one that makes most.
  std::vector<std::unique_ptr<RecordLoad>> loads(tables.size());
  int num_passes = 1;
  for (size_t i = 0; i < tables.size(); ++i) {
    if (rows.count(tables[i].name) == 0) {
      LOG(WARNING) << basename << " has no table " << tables[i].name << ", which stays as it is";
      continue;
    }
    loads[i] = tables[i].table->NewLoad();
    num_passes = std::max(num_passes, loads[i]->num_passes());
  }
  std::mutex mutex;
  LoadStats total;
  for (int pass = 0; pass < num_passes; ++pass) {
    std::map<std::string, RecordLoad*> load_of;
    for (size_t i = 0; i < tables.size(); ++i) {
      if (loads[i] == nullptr || pass >= loads[i]->num_passes()) continue;
      engine::Status status = loads[i]->BeginPass(pass, static_cast<int64_t>(rows[tables[i].name]));
      if (!status.ok()) return status;
      load_of[tables[i].name] = loads[i].get();
    }
    total = LoadStats();
    engine::Status status = engine::ForEachFile(nshards, [&](int64_t shard) {
      LoadStats stats;
      engine::Status loaded =
          LoadGroupFile(reader, *reader.Find(engine::ShardSuffix("", shard, nshards)),
                        metadata[shard], load_of, &stats);
      std::lock_guard<std::mutex> lock(mutex);
      total.Add(stats);
      return loaded;
    });
    if (!status.ok()) return status;
  }
  for (const auto& load : loads) {
    if (load == nullptr) continue;
    engine::Status status = load->Finish();
    if (!status.ok()) return status;
  }
  LogLoaded(basename, total);
  return engine::Status::Ok();
}

// Puts damage that the manifest revealed into the words specified for groups.
engine::Status NameDamage(engine::Status status) {
  if (status.code != engine::StatusCode::kDataLoss ||
      status.message.find(" failed! ") != std::string::npos) {
    return status;
  }
  const std::string file = engine::NameOf(status.message.substr(0, status.message.find(" has ")));
  const bool is_meta = file.find(std::string(kMeta) + "-") != std::string::npos;
  status.message =
      (is_meta ? "Read table metadata failed! " : "Parse entry failed! ") + status.message;
  return status;
}

// Tables in main memory as files see them.
class HostTables {
 public:
  explicit HostTables(const std::vector<NamedTable>& tables) {
    for (const NamedTable& table : tables) {
      owned_.push_back(engine::AsRecordTable(table.table));
      named_.push_back({table.name, owned_.back().get()});
    }
  }
  const std::vector<NamedRecordTable>& named() const { return named_; }

 private:
  std::vector<std::unique_ptr<RecordTable>> owned_;
  std::vector<NamedRecordTable> named_;
};

}  // namespace

Status SaveTable(Env* env, const RecordTable& table, const std::string& basename,
                 const SaveOptions& options) {
  EnvFileSystem files(env);
  return FromSave(engine::SaveTable(&files, table, basename, options.nshards, &options.expiry));
}

Status RestoreTable(Env* env, const std::string& basename, RecordTable* table) {
  EnvFileSystem files(env);
  LoadStats stats;
  TF_RETURN_IF_ERROR(FromEngine(engine::LoadTable(&files, basename, table, &stats)));
  LogLoaded(basename, stats);
  return OkStatus();
}

Status SaveTables(Env* env, const std::vector<NamedTable>& tables, const std::string& basename,
                  const SaveOptions& options) {
  return SaveTables(env, HostTables(tables).named(), basename, options);
}

Status SaveTables(Env* env, const std::vector<NamedRecordTable>& tables,
                  const std::string& basename, const SaveOptions& options) {
  int64_t rows = 0;
  for (const NamedRecordTable& table : tables) {
    int64_t size = 0;
    TF_RETURN_IF_ERROR(FromEngine(table.table->GetSize(&size)));
    rows += size;
  }
  int64_t nshards = 0;
  TF_RETURN_IF_ERROR(FromEngine(engine::ResolveNumFiles(options.nshards, rows, &nshards)));
  EnvFileSystem files(env);
  engine::FileSetWriter set(&files, engine::ShardedSetName(basename, {"", kMeta}));
  std::mutex mutex;
  std::vector<SaveStats> total(tables.size());
  TF_RETURN_IF_ERROR(FromSave(engine::ForEachFile(nshards, [&](int64_t shard) {
    std::vector<SaveStats> stats(tables.size());
    engine::Status status = WriteGroupFiles(tables, options, shard, nshards, &set, &stats);
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; i < tables.size(); ++i) total[i].Add(stats[i]);
    return status;
  })));
  TF_RETURN_IF_ERROR(FromEngine(set.Publish()));
  for (size_t i = 0; i < tables.size(); ++i) {
    engine::WarnIfMostExpired(*tables[i].table, basename + ", table " + tables[i].name, total[i]);
  }
  return OkStatus();
}

Status RestoreTables(Env* env, const std::string& basename, const std::vector<NamedTable>& tables) {
  return RestoreTables(env, basename, HostTables(tables).named());
}

Status RestoreTables(Env* env, const std::string& basename,
                     const std::vector<NamedRecordTable>& tables) {
  EnvFileSystem files(env);
  return FromEngine(NameDamage(engine::ReadShardedSet(
      &files, basename, {"", kMeta}, [&](const FileSetReader& reader, int64_t nshards) {
        return LoadGroup(reader, nshards, basename, tables);
      })));
}

Status ReadTableSizes(Env* env, const std::string& basename,
                      std::vector<std::pair<std::string, uint64_t>>* sizes) {
  EnvFileSystem files(env);
  return FromEngine(NameDamage(engine::ReadShardedSet(
      &files, basename, {kMeta}, [&](const FileSetReader& reader, int64_t nshards) {
        sizes->clear();
        std::map<std::string, size_t> place;
        for (int64_t shard = 0; shard < nshards; ++shard) {
          std::vector<MultiHashTableMetadata> metadata;
          engine::Status status = ReadMetadata(
              reader, *reader.Find(engine::ShardSuffix(kMeta, shard, nshards)), &metadata);
          if (!status.ok()) return status;
          for (const MultiHashTableMetadata& table : metadata) {
            const auto inserted = place.emplace(table.table_name(), sizes->size());
            if (inserted.second) sizes->emplace_back(table.table_name(), 0);
            (*sizes)[inserted.first->second].second += table.num_entries();
          }
        }
        return engine::Status::Ok();
      })));
}

}  // namespace monolith_tf
}  // namespace tensorflow
