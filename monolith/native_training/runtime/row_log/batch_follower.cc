#include "monolith/native_training/runtime/row_log/batch_follower.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "monolith/native_training/runtime/hash_table/index/shard_groups.h"

namespace monolith {
namespace engine {
namespace {

// Rows that are assigned under one lock, some ten microseconds of work. Lookups wait for that lock,
// and where cores are few for this thread: after each block it offers its core to them instead of
// keeping it until the scheduler takes it away. Where it takes it in the middle of a block, lookups
// wait until the thread is back; so rows are sorted by groups of shards, and a block locks the
// shards of one group only, not those of all ids.
constexpr int64_t kBlockBytes = int64_t{16} << 10;
constexpr int64_t kMinGroupRows = 128;
constexpr int kMaxGroupBits = 4;
// Rows that are sorted at a time: they stay in the second-level cache.
constexpr int64_t kWindowRows = 4096;
// Rows of a group are not neighbours in the message.
constexpr int64_t kPrefetchDistance = 8;

EmbeddingTable* Find(const std::vector<BatchFollower::NamedTable>& tables, std::string_view name) {
  for (const BatchFollower::NamedTable& table : tables) {
    if (table.name == name) return table.table;
  }
  return nullptr;
}

// Removes what the table has of `ids` from its digest; `values` is room for it. Ids without a row
// have zeros, which do not count.
void RemoveFromDigest(const EmbeddingTable& table, const int64_t* ids, int64_t n, float* values,
                      TableDigest* digest) {
  table.Lookup(ids, n, values);
  for (int64_t i = 0; i < n; ++i) {
    digest->Remove(RowHash(ids[i], values + i * table.dim(), table.dim()));
  }
}

}  // namespace

void BatchFollower::Seek(const std::vector<NamedTable>& tables, int64_t epoch, int64_t seq) {
  std::lock_guard lock(mutex_);
  state_.epoch = epoch;
  state_.seq = seq;
  waiting_ = {};
  state_.waiting_chunks = 0;
  digests_.clear();
  ScanDigests(tables);
}

// Tables that came since the last time are read.
void BatchFollower::ScanDigests(const std::vector<NamedTable>& tables) {
  for (const NamedTable& table : tables) {
    if (digests_.count(table.name) == 0) digests_[table.name] = DigestOf(*table.table);
  }
}

Status BatchFollower::Apply(const std::vector<NamedTable>& tables, const char* data, int64_t size,
                            Outcome* outcome) {
  BatchView batch;
  Status status = ParseMessage(data, size, &batch);
  if (!status.ok()) return status;
  for (const TableRowsView& rows : batch.tables) {
    const EmbeddingTable* table = Find(tables, rows.name);
    if (table != nullptr && table->dim() != rows.dim) {
      return Status::InvalidArgument(
          "a message of the row log has the dim " + std::to_string(rows.dim) + " for table '" +
          std::string(rows.name) + "', want " + std::to_string(table->dim()));
    }
  }
  const BatchHeader& header = batch.header;
  const std::pair<int64_t, int64_t> number(header.epoch, header.seq);
  std::lock_guard lock(mutex_);
  const bool is_waiting = waiting_.header.num_chunks > 0;
  const std::pair<int64_t, int64_t> waiting(waiting_.header.epoch, waiting_.header.seq);
  if (number <= std::make_pair(state_.epoch, state_.seq) || (is_waiting && number < waiting)) {
    ++state_.skipped;
    *outcome = Outcome::kOld;
    return Status::Ok();
  }
  if (is_waiting && number > waiting) {
    ++state_.torn;
    waiting_ = {};
  }
  if (waiting_.header.num_chunks == 0) {
    waiting_.header = header;
  } else if (!waiting_.header.SameBatch(header)) {
    return Status::InvalidArgument(
        "two chunks of batch " + std::to_string(header.seq) + " of epoch " +
        std::to_string(header.epoch) + " say that there are " + std::to_string(header.num_chunks) +
        " and " + std::to_string(waiting_.header.num_chunks) + ", or only one is a scan");
  }
  if (header.has_digest) {
    waiting_.header.has_digest = true;
    waiting_.header.digest = header.digest;
  }
  bool complete = false;
  try {
    status = header.full_scan ? TakeScanChunk(tables, batch, &complete)
                              : TakeChunk(tables, batch, data, size, &complete);
    state_.waiting_chunks = waiting_.size();
    if (status.ok() && complete) EndBatch(tables);
  } catch (...) {
    digests_.clear();
    throw;
  }
  if (!status.ok()) {
    // Rows came half way: what is kept beside them is not exact any more.
    digests_.clear();
    return status;
  }
  *outcome = complete ? Outcome::kApplied : Outcome::kWaiting;
  return Status::Ok();
}

Status BatchFollower::TakeChunk(const std::vector<NamedTable>& tables, const BatchView& chunk,
                                const char* data, int64_t size, bool* complete) {
  const int32_t number = chunk.header.chunk;
  const bool is_new = waiting_.chunks.count(number) == 0;
  *complete = waiting_.size() + is_new == chunk.header.num_chunks;
  if (!*complete) {
    if (is_new) waiting_.chunks.emplace(number, std::string(data, static_cast<size_t>(size)));
    return Status::Ok();
  }
  // The one that completes the batch is applied where it is.
  for (int32_t i = 0; i < chunk.header.num_chunks; ++i) {
    BatchView view;
    if (i != number) {
      const std::string& message = waiting_.chunks.at(i);
      // It was checked when it came.
      const Status status =
          ParseBatch(message.data() + kMessageCrcBytes,
                     static_cast<int64_t>(message.size()) - kMessageCrcBytes, &view);
      if (!status.ok()) return status;
    }
    const Status status = ApplyChunk(tables, i == number ? chunk : view);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status BatchFollower::TakeScanChunk(const std::vector<NamedTable>& tables, const BatchView& chunk,
                                    bool* complete) {
  if (waiting_.applied.count(chunk.header.chunk) == 0) {
    const Status status = ApplyChunk(tables, chunk);
    if (!status.ok()) return status;
    for (const TableRowsView& rows : chunk.tables) {
      if (Find(tables, rows.name) == nullptr) continue;
      std::vector<int64_t>& ids = waiting_.kept[std::string(rows.name)];
      const size_t before = ids.size();
      ids.resize(before + static_cast<size_t>(rows.num_rows));
      rows.CopyIds(0, rows.num_rows, ids.data() + before);
    }
    waiting_.applied.insert(chunk.header.chunk);
  }
  *complete = waiting_.size() == chunk.header.num_chunks;
  return Status::Ok();
}

Status BatchFollower::ApplyChunk(const std::vector<NamedTable>& tables, const BatchView& chunk) {
  ScanDigests(tables);
  for (const TableRowsView& rows : chunk.tables) {
    EmbeddingTable* table = Find(tables, rows.name);
    if (table == nullptr) {
      ++state_.unknown_tables;
      continue;
    }
    if (table->dim() != rows.dim) {
      return Status::InvalidArgument("table '" + std::string(rows.name) + "' has the dim " +
                                     std::to_string(table->dim()) + ", want " +
                                     std::to_string(rows.dim));
    }
    const Status status = ApplyRows(rows, table, waiting_.header.newest_event_time,
                                    &digests_[std::string(rows.name)]);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

// All rows are there.
void BatchFollower::EndBatch(const std::vector<NamedTable>& tables) {
  const BatchHeader& header = waiting_.header;
  for (auto& entry : waiting_.kept) {
    EmbeddingTable* table = Find(tables, entry.first);
    if (table != nullptr) RemoveOthers(table, std::move(entry.second), &digests_[entry.first]);
  }
  if (header.epoch == state_.epoch ? header.prev_seq != state_.seq : header.prev_seq != 0) {
    // A scan needs no predecessor.
    if (!header.full_scan) ++state_.gaps;
  }
  state_.epoch = header.epoch;
  state_.seq = header.seq;
  state_.newest_event_time = std::max(state_.newest_event_time, header.newest_event_time);
  state_.send_time = header.send_time;
  ++state_.batches;
  if (header.has_digest) CompareDigests(header.digest);
  waiting_ = {};
  state_.waiting_chunks = 0;
}

Status BatchFollower::ApplyRows(const TableRowsView& rows, EmbeddingTable* table, int64_t time,
                                TableDigest* digest) {
  const int64_t dim = rows.dim;
  const int64_t block = std::max<int64_t>(1, kBlockBytes / (4 * dim));
  Scratch& scratch = scratch_;
  scratch.ids.resize(static_cast<size_t>(block));
  scratch.values.resize(static_cast<size_t>(block * dim));
  int64_t* const ids = scratch.ids.data();
  float* const values = scratch.values.data();
  WriteOptions options;
  options.req_time = time;
  for (int64_t first = 0; first < rows.num_rows; first += kWindowRows) {
    const int64_t size = std::min(kWindowRows, rows.num_rows - first);
    scratch.window.resize(static_cast<size_t>(size));
    scratch.groups.resize(static_cast<size_t>(size));
    scratch.positions.resize(static_cast<size_t>(size));
    rows.CopyIds(first, size, scratch.window.data());
    int bits = 0;
    while (bits < kMaxGroupBits && kMinGroupRows << (bits + 1) <= size) ++bits;
    ShardOffsets offsets;
    GroupPositions(scratch.window.data(), size, bits, scratch.groups.data(),
                   scratch.positions.data(), offsets);
    for (int group = 0; group < 1 << bits; ++group) {
      const int64_t end = offsets[group + 1];
      for (int64_t begin = offsets[group]; begin < end; begin += block) {
        const int64_t n = std::min(block, end - begin);
        const uint32_t* const positions = scratch.positions.data() + begin;
        for (int64_t i = 0; i < n; ++i) {
          if (i + kPrefetchDistance < n) rows.Prefetch(first + positions[i + kPrefetchDistance]);
          ids[i] = scratch.window[positions[i]];
          rows.CopyRows(first + positions[i], 1, values + i * dim);
        }
        const Status status = table->AssignDigested({ids, n, values}, options, digest);
        if (!status.ok()) return status;
        std::this_thread::yield();
      }
    }
  }
  for (int64_t begin = 0; begin < rows.num_deleted; begin += block) {
    const int64_t n = std::min(block, rows.num_deleted - begin);
    rows.CopyDeleted(begin, n, ids);
    RemoveFromDigest(*table, ids, n, values, digest);
    table->Erase(ids, n);
    std::this_thread::yield();
  }
  state_.rows += rows.num_rows;
  state_.deleted += rows.num_deleted;
  return Status::Ok();
}

// Erases the rows of all ids but `kept`.
void BatchFollower::RemoveOthers(EmbeddingTable* table, std::vector<int64_t> kept,
                                 TableDigest* digest) {
  std::sort(kept.begin(), kept.end());
  std::vector<int64_t> gone;
  table->VisitRows([&](const RowView& row) {
    if (!std::binary_search(kept.begin(), kept.end(), row.id)) {
      gone.push_back(row.id);
      digest->Remove(RowHash(row.id, row.values, table->dim()));
    }
    return true;
  });
  table->Erase(gone.data(), static_cast<int64_t>(gone.size()));
}

void BatchFollower::CompareDigests(const BatchDigest& digest) {
  bool equal = true;
  for (const auto& table : digest.tables) {
    const auto mine = digests_.find(table.first);
    // A table that this replica does not serve is nobody's concern here.
    if (mine != digests_.end()) equal &= mine->second == table.second;
  }
  state_.digest_seq = digest.seq;
  state_.digest_ok = equal ? 1 : 0;
}

FollowerState BatchFollower::GetState() const {
  std::lock_guard lock(mutex_);
  return state_;
}

std::map<std::string, TableDigest> BatchFollower::Digests() const {
  std::lock_guard lock(mutex_);
  return digests_;
}

}  // namespace engine
}  // namespace monolith
