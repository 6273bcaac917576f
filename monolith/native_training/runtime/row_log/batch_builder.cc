#include "monolith/native_training/runtime/row_log/batch_builder.h"

#include <algorithm>
#include <new>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "monolith/native_training/runtime/base/half_float.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kIdBytes = 8;
constexpr int64_t kConcurrency = 64;
// Rows that are looked up, hashed and copied while they are in the cache.
constexpr int64_t kBlockBytes = int64_t{64} << 10;
constexpr int64_t kPrefetchDistance = 16;

}  // namespace

BatchBuilder::BatchBuilder(int64_t capacity) : touched_(capacity, kConcurrency) {}

void BatchBuilder::Attach(const std::string& name, EmbeddingTable* table) {
  auto source = std::make_unique<Source>(name, table);
  const int64_t row_bytes = kIdBytes + 4 * table->dim();
  {
    std::lock_guard lock(mutex_);
    sources_.push_back(std::move(source));
    hashes_valid_ = false;
    max_row_bytes_.store(std::max(max_row_bytes_.load(), row_bytes));
  }
  RequestScan(kScanReplaced);
}

void BatchBuilder::Detach(const EmbeddingTable* table) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(sources_.begin(), sources_.end(),
                                  [table](const auto& source) { return source->table == table; });
  if (found == sources_.end()) return;
  // Pieces of a batch name sources by their numbers.
  if (next_chunk_ < chunks_.size()) EndBatch(/*failed=*/true);
  sources_.erase(found);
}

void BatchBuilder::Touch(const EmbeddingTable* table, const int64_t* ids, int64_t n) {
  try {
    std::vector<TableKey> keys(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) keys[i] = {ids[i], table};
    if (touched_.Insert(keys.data(), n) > 0) RequestScan(kScanOverflow);
  } catch (const std::bad_alloc&) {
    RequestScan(kScanOverflow);
  }
}

void BatchBuilder::RequestScan(ScanReason reason) {
  std::lock_guard lock(reasons_mutex_);
  reasons_ |= reason;
  ++generation_;
}

void BatchBuilder::TouchMessage(const BatchView& batch) {
  if (batch.header.full_scan) return RequestScan(kScanOverflow);
  std::vector<int64_t> ids;
  for (const TableRowsView& rows : batch.tables) {
    const EmbeddingTable* table = nullptr;
    {
      std::lock_guard lock(mutex_);
      for (const auto& source : sources_) {
        if (source->name == rows.name) table = source->table;
      }
    }
    if (table == nullptr) continue;
    ids.resize(static_cast<size_t>(rows.num_rows + rows.num_deleted));
    rows.CopyIds(0, rows.num_rows, ids.data());
    rows.CopyDeleted(0, rows.num_deleted, ids.data() + rows.num_rows);
    Touch(table, ids.data(), static_cast<int64_t>(ids.size()));
  }
}

void BatchBuilder::ForgetReplaced(int64_t generation) {
  std::lock_guard lock(mutex_);
  std::lock_guard reasons_lock(reasons_mutex_);
  if (generation_ != generation) return;
  if (reasons_ & kScanReplaced) hashes_valid_ = false;
  reasons_ &= ~static_cast<uint32_t>(kScanReplaced);
}

BatchBuilder::Info BatchBuilder::GetInfo() const {
  Info info;
  info.waiting_ids = touched_.size();
  info.waiting_bytes = info.waiting_ids * max_row_bytes_.load();
  {
    std::lock_guard lock(reasons_mutex_);
    info.scan_reasons = reasons_;
    info.scan_generation = generation_;
  }
  std::lock_guard lock(mutex_);
  info.num_tables = static_cast<int64_t>(sources_.size());
  info.chunks_left = static_cast<int64_t>(chunks_.size() - next_chunk_);
  return info;
}

Status BatchBuilder::Begin(const BatchHeader& header, const Options& options, Counts* counts) {
  std::lock_guard lock(mutex_);
  if (next_chunk_ < chunks_.size()) {
    return Status::FailedPrecondition("a batch of the row log has " +
                                      std::to_string(chunks_.size() - next_chunk_) +
                                      " chunks left: take or abandon them before the next one");
  }
  if (options.digest && !options.keep_hashes) {
    return Status::InvalidArgument("a digest of the row log needs hashes of what was published");
  }
  try {
    const Status status = BeginLocked(header, options, counts);
    if (!status.ok()) EndBatch(/*failed=*/true);
    return status;
  } catch (...) {
    EndBatch(/*failed=*/true);
    throw;
  }
}

Status BatchBuilder::BeginLocked(const BatchHeader& header, const Options& options,
                                 Counts* counts) {
  header_ = header;
  options_ = options;
  {
    // Before the ids are taken: what comes up later is for the next batch.
    std::lock_guard lock(reasons_mutex_);
    header_.full_scan = options.full_scan || reasons_ != kScanNone;
    reasons_ = kScanNone;
  }
  if (!options.keep_hashes) {
    hashes_valid_ = false;
    for (const auto& source : sources_) source->published.Clear();
  } else if (header_.full_scan) {
    // The batch replaces all that was published.
    for (const auto& source : sources_) {
      source->published.Clear();
      source->digest = {};
    }
    hashes_valid_ = true;
  } else if (!hashes_valid_) {
    HashAllRows();
    hashes_valid_ = true;
    options_.digest = false;
  }
  for (const auto& source : sources_) {
    // Rows are read after their time, so the batch has at least what it says.
    header_.newest_event_time = std::max(header_.newest_event_time, source->table->MaxUpdateTs());
  }
  CollectTouched();
  if (header_.full_scan) CollectAll();
  const Status status = PlanChunks();
  if (!status.ok()) return status;
  counts->num_chunks = static_cast<int64_t>(chunks_.size());
  counts->full_scan = header_.full_scan;
  counts->num_ids = 0;
  for (const auto& source : sources_) {
    counts->num_ids += static_cast<int64_t>(source->ids.size());
  }
  return Status::Ok();
}

void BatchBuilder::HashAllRows() {
  for (const auto& source : sources_) {
    source->published.Clear();
    source->digest = {};
    std::vector<float> values(static_cast<size_t>(source->table->dim()));
    source->table->VisitRows([&](const RowView& row) {
      std::copy(row.values, row.values + values.size(), values.begin());
      source->served.Round(values.data());
      if (options_.half) {
        for (float& value : values) value = HalfToFloat(FloatToHalf(value));
      }
      const uint64_t hash = RowHash(row.id, values.data(), source->table->dim());
      source->digest.Remove(
          source->published.Exchange(row.id, source->published.Hash(row.id), hash));
      source->digest.Add(hash);
      return true;
    });
  }
}

void BatchBuilder::CollectTouched() {
  const auto stolen = touched_.Steal();
  std::unordered_map<const void*, std::vector<int64_t>*> ids_of;
  for (const auto& source : sources_) {
    source->ids.clear();
    ids_of[source->table] = &source->ids;
  }
  // A scan finds them by itself.
  if (header_.full_scan) return;
  if (sources_.size() == 1) {
    std::vector<int64_t>& ids = sources_[0]->ids;
    ids.resize(static_cast<size_t>(stolen.size()));
    int64_t* to = ids.data();
    stolen.TakeAll([&to, table = sources_[0]->table](const TableKey* keys, int64_t n) {
      for (const TableKey* key = keys; key < keys + n; ++key) {
        if (key->table == table) *to++ = key->id;
      }
    });
    ids.resize(static_cast<size_t>(to - ids.data()));
    return;
  }
  const void* last_table = nullptr;
  std::vector<int64_t>* last_ids = nullptr;
  stolen.TakeAll([&](const TableKey* keys, int64_t n) {
    for (const TableKey* key = keys; key < keys + n; ++key) {
      if (key->table != last_table) {
        const auto found = ids_of.find(key->table);
        last_table = key->table;
        last_ids = found == ids_of.end() ? nullptr : found->second;
      }
      if (last_ids != nullptr) last_ids->push_back(key->id);
    }
  });
}

void BatchBuilder::CollectAll() {
  for (const auto& source : sources_) {
    source->ids.reserve(static_cast<size_t>(source->table->Size()));
    source->table->VisitRows([&](const RowView& row) {
      source->ids.push_back(row.id);
      return true;
    });
  }
}

// Rows are cut by their largest size; which of them are deletions is not known yet.
Status BatchBuilder::PlanChunks() {
  chunks_.clear();
  chunk_bytes_.clear();
  next_chunk_ = 0;
  std::string fields;
  BatchHeader widest = header_;
  widest.chunk = widest.num_chunks = static_cast<int32_t>(kMaxChunks);
  AppendHeader(widest, &fields);
  int64_t overhead = kMessageCrcBytes + static_cast<int64_t>(fields.size());
  if (options_.digest) overhead += DigestBytes(CurrentDigest());
  int64_t room = 0;  // in the last chunk
  for (size_t s = 0; s < sources_.size(); ++s) {
    const Source& source = *sources_[s];
    const int64_t row_bytes = kIdBytes + (options_.half ? 2 : 4) * source.table->dim();
    const int64_t table_bytes = TableOverheadBytes(source.name);
    if (overhead + table_bytes + row_bytes > kMaxMessageBytes) {
      return Status::InvalidArgument(
          "a row of table '" + source.name + "' of " + std::to_string(row_bytes) +
          " bytes does not fit into a message of " + std::to_string(kMaxMessageBytes) +
          " bytes, of which " + std::to_string(overhead + table_bytes) + " say what it is");
    }
    const int64_t n = static_cast<int64_t>(source.ids.size());
    // A scan names tables without rows, too: theirs are gone.
    if (n == 0 && !header_.full_scan) continue;
    int64_t begin = 0;
    do {
      if (chunks_.empty() || room < table_bytes + row_bytes) {
        chunks_.emplace_back();
        room = kMaxMessageBytes - overhead;
        chunk_bytes_.push_back(overhead);
      }
      const int64_t size = std::min(n - begin, (room - table_bytes) / row_bytes);
      chunks_.back().push_back({s, begin, begin + size});
      room -= table_bytes + size * row_bytes;
      chunk_bytes_.back() += table_bytes + size * row_bytes;
      begin += size;
    } while (begin < n);
  }
  if (chunks_.empty()) {
    chunks_.emplace_back();
    chunk_bytes_.push_back(overhead);
  }
  if (static_cast<int64_t>(chunks_.size()) > kMaxChunks) {
    return Status::InvalidArgument("a batch of the row log has " + std::to_string(chunks_.size()) +
                                   " chunks, want at most " + std::to_string(kMaxChunks));
  }
  header_.num_chunks = static_cast<int32_t>(chunks_.size());
  return Status::Ok();
}

Status BatchBuilder::Take(int64_t max_bytes, std::vector<std::string>* messages, int64_t* num_rows,
                          int64_t* num_deleted) {
  std::lock_guard lock(mutex_);
  *num_rows = *num_deleted = 0;
  size_t taken = 0;
  int64_t bytes = 0;
  try {
    while (next_chunk_ < chunks_.size() && (taken == 0 || bytes < max_bytes)) {
      header_.chunk = static_cast<int32_t>(next_chunk_);
      if (taken == messages->size()) messages->emplace_back();
      std::string& message = (*messages)[taken++];
      message.clear();
      message.reserve(static_cast<size_t>(chunk_bytes_[next_chunk_]));
      message.append(kMessageCrcBytes, '\0');
      AppendHeader(header_, &message);
      for (const Piece& piece : chunks_[next_chunk_]) {
        EncodePiece(piece, &message, num_rows, num_deleted);
      }
      ++next_chunk_;
      if (next_chunk_ == chunks_.size() && options_.digest) {
        AppendDigest(CurrentDigest(), &message);
      }
      SealMessage(&message);
      bytes += static_cast<int64_t>(message.size());
    }
    messages->resize(taken);
  } catch (...) {
    EndBatch(/*failed=*/true);
    throw;
  }
  if (next_chunk_ == chunks_.size()) EndBatch(/*failed=*/false);
  return Status::Ok();
}

// Rows go straight into the message, for which all of them have to be there. As soon as one is not,
// they move to buffers of their own until it is known how many there are.
void BatchBuilder::EncodePiece(const Piece& piece, std::string* message, int64_t* num_rows,
                               int64_t* num_deleted) {
  Source& source = *sources_[piece.source];
  const int64_t dim = source.table->dim();
  const int64_t row_bytes = (options_.half ? 2 : 4) * dim;
  const int64_t block = std::max<int64_t>(1, kBlockBytes / (4 * dim));
  Scratch& scratch = scratch_;
  const int64_t* const all = source.ids.data() + piece.begin;
  const int64_t size = piece.end - piece.begin;
  const std::string_view id_bytes(reinterpret_cast<const char*>(all),
                                  static_cast<size_t>(kIdBytes * size));
  const size_t before = message->size();
  BeginTable(source.name, dim, id_bytes, row_bytes * size, options_.half, /*deleted_bytes=*/0,
             message);
  const size_t rows_begin = message->size();
  bool complete = true;
  for (int64_t begin = 0; begin < size; begin += block) {
    const int64_t n = std::min(block, size - begin);
    const int64_t* ids = all + begin;
    const bool all_found = ReadBlock(&source, ids, n) == n;
    const char* const rows = options_.half ? reinterpret_cast<const char*>(scratch.halves.data())
                                           : reinterpret_cast<const char*>(scratch.values.data());
    if (complete && !all_found) {
      complete = false;
      scratch.ids.assign(id_bytes.data(), static_cast<size_t>(kIdBytes * begin));
      scratch.rows.assign(*message, rows_begin, std::string::npos);
      scratch.deleted.clear();
      message->resize(before);
    }
    if (complete) {
      message->append(rows, static_cast<size_t>(row_bytes * n));
      continue;
    }
    for (int64_t i = 0; i < n; ++i) {
      const bool found = scratch.found[i] != 0;
      (found ? scratch.ids : scratch.deleted)
          .append(reinterpret_cast<const char*>(ids + i), kIdBytes);
      if (found) scratch.rows.append(rows + row_bytes * i, static_cast<size_t>(row_bytes));
    }
  }
  if (complete) {
    *num_rows += size;
    return;
  }
  *num_rows += static_cast<int64_t>(scratch.ids.size()) / kIdBytes;
  *num_deleted += static_cast<int64_t>(scratch.deleted.size()) / kIdBytes;
  AppendTable(source.name, dim, scratch.ids, scratch.rows, options_.half, scratch.deleted, message);
}

int64_t BatchBuilder::ReadBlock(Source* source, const int64_t* ids, int64_t n) {
  const EmbeddingTable& table = *source->table;
  const int64_t dim = table.dim();
  Scratch& scratch = scratch_;
  scratch.values.resize(static_cast<size_t>(n * dim));
  scratch.found.assign(static_cast<size_t>(n), 1);
  if (options_.half) scratch.halves.resize(scratch.values.size());
  // Nearly all ids have a row that is not zeros. The others are asked for once more: a lookup that
  // tells what it has found is slower.
  std::vector<int64_t> places, zeros;
  const bool hashed = options_.keep_hashes && !options_.half && source->served.exact();
  if (hashed) {
    scratch.hashes.resize(static_cast<size_t>(n));
    table.LookupHashed(ids, n, scratch.values.data(), scratch.hashes.data());
  } else {
    table.Lookup(ids, n, scratch.values.data());
  }
  IdHashes& published = source->published;
  TableDigest digest;                          // what it changes by
  uint64_t id_hashes[kPrefetchDistance] = {};  // of ids whose slots are on their way
  if (options_.keep_hashes) {
    for (int64_t i = 0; i < std::min(n, kPrefetchDistance); ++i) {
      id_hashes[i] = published.Fetch(ids[i]);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    uint64_t& next = id_hashes[i % kPrefetchDistance];
    const uint64_t id_hash = next;
    if (options_.keep_hashes && i + kPrefetchDistance < n) {
      next = published.Fetch(ids[i + kPrefetchDistance]);
    }
    if (hashed && scratch.hashes[i] != 0) {
      digest.Remove(published.Exchange(ids[i], id_hash, scratch.hashes[i]));
      digest.Add(scratch.hashes[i]);
    } else if (hashed || IsZeroVector(scratch.values.data() + i * dim, dim)) {
      places.push_back(i);
      zeros.push_back(ids[i]);
    } else {
      PublishRow(source, ids[i], id_hash, i);
    }
  }
  source->digest += digest;
  if (zeros.empty()) return n;
  // Values as well: an id may have got its row since.
  std::vector<float> rows(zeros.size() * static_cast<size_t>(dim));
  std::vector<uint8_t> found(zeros.size());
  table.Lookup(zeros.data(), static_cast<int64_t>(zeros.size()), rows.data(), found.data());
  int64_t num_found = n - static_cast<int64_t>(zeros.size());
  for (size_t k = 0; k < zeros.size(); ++k) {
    std::copy_n(rows.data() + k * dim, dim, scratch.values.data() + places[k] * dim);
    scratch.found[places[k]] = found[k];
    num_found += found[k];
    PublishRow(source, zeros[k], source->published.Hash(zeros[k]), places[k]);
  }
  return num_found;
}

void BatchBuilder::PublishRow(Source* source, int64_t id, uint64_t id_hash, int64_t place) {
  const int64_t dim = source->table->dim();
  float* const values = scratch_.values.data() + place * dim;
  const bool found = scratch_.found[place] != 0;
  if (found) source->served.Round(values);
  if (found && options_.half) {
    for (int64_t k = 0; k < dim; ++k) {
      const uint16_t half = FloatToHalf(values[k]);
      values[k] = HalfToFloat(half);
      scratch_.halves[place * dim + k] = half;
    }
  }
  if (!options_.keep_hashes) return;
  const uint64_t hash = found ? RowHash(id, values, dim) : 0;
  source->digest.Remove(source->published.Exchange(id, id_hash, hash));
  source->digest.Add(hash);
}

void BatchBuilder::Abandon() {
  std::lock_guard lock(mutex_);
  if (next_chunk_ < chunks_.size()) EndBatch(/*failed=*/true);
}

void BatchBuilder::EndBatch(bool failed) {
  chunks_.clear();
  next_chunk_ = 0;
  for (const auto& source : sources_) {
    source->ids.clear();
    source->ids.shrink_to_fit();
  }
  if (failed) {
    hashes_valid_ = false;
    RequestScan(kScanOverflow);
  }
}

BatchDigest BatchBuilder::CurrentDigest() const {
  BatchDigest digest;
  digest.seq = header_.seq;
  for (const auto& source : sources_) digest.tables[source->name] = source->digest;
  return digest;
}

}  // namespace engine
}  // namespace monolith
