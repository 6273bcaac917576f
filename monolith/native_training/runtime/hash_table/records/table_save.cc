// Rows out of and into a table: SaveShard, SavePage and LoadRecords as EntryDumps, VisitRows.
#include <algorithm>
#include <cstring>
#include <ctime>
#include <shared_mutex>
#include <tuple>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/hash_table/batch/write_plan.h"
#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {
namespace {

constexpr uint64_t kHashEnd = FlatIndex::kHashEnd;

// A width of hash range that holds about `rows` of the shard's rows.
uint64_t RangeFor(int64_t rows, int64_t shard_rows) {
  const double share =
      static_cast<double>(rows) / static_cast<double>(std::max<int64_t>(1, shard_rows));
  return std::max<uint64_t>(1, static_cast<uint64_t>(std::min(1.0, share) * 4294967296.0));
}

// Offsets of SavePage: | shard number inside the partition | 32-bit hash | 24-bit rows of that hash
// done |, plus 1.
struct PageOffset {
  int64_t ordinal = 0;
  uint64_t hash = 0;
  int64_t done = 0;

  static PageOffset Decode(int64_t offset) {
    const uint64_t bits = static_cast<uint64_t>(std::max<int64_t>(offset, 1) - 1);
    return {static_cast<int64_t>(bits >> 56), (bits >> 24) & 0xffffffffull,
            static_cast<int64_t>(bits & 0xffffff)};
  }
  int64_t Encode() const {
    return 1 + static_cast<int64_t>((static_cast<uint64_t>(ordinal) << 56) | (hash << 24) |
                                    static_cast<uint64_t>(done));
  }
};

}  // namespace

Status EmbeddingTable::SaveShard(int shard_index, const ExpiryPolicy* policy, int64_t target_bytes,
                                 bool framed, ShardCursor* cursor, std::string* out,
                                 std::vector<int64_t>* sizes, int64_t* num_records) const {
  if (layout_.serving()) return Status::Unimplemented("ServingEntryAccessor doesn't support Save.");
  const Shard& shard = *shards_[shard_index];
  const int64_t newest = MaxUpdateTs();
  const int64_t max_bytes = codec_.max_record_bytes() + kRecordHeaderBytes + kRecordFooterBytes;
  const int64_t header = framed ? kRecordHeaderBytes : 0;
  std::shared_lock<FairSharedMutex> lock(shard.mutex);
  const uint64_t begin = cursor->next_hash;
  const int64_t page_rows = std::max<int64_t>(1, target_bytes / max_bytes);
  const uint64_t end = std::min(kHashEnd, begin + RangeFor(page_rows, shard.index.live()));
  size_t used = out->size();
  shard.index.VisitHashRange(begin, end, [&](const FlatIndex::Slot& slot, uint32_t) {
    if (policy != nullptr && policy->IsExpired(slot.key, slot.ts, newest)) {
      ++cursor->expired;
      return;
    }
    if (out->size() < used + max_bytes) out->resize(std::max(2 * out->size(), used + max_bytes));
    char* at = &(*out)[used];
    const int64_t size =
        codec_.Encode(slot.key, shard.rows.Address(slot.row), slot.ts, true, at + header);
    if (framed) {
      WriteRecordHeader(static_cast<uint64_t>(size), at);
      WriteRecordFooter(at + header, size, at + header + size);
    }
    used += size + (framed ? kRecordHeaderBytes + kRecordFooterBytes : 0);
    if (sizes != nullptr) sizes->push_back(size);
    ++*num_records;
  });
  out->resize(used);
  cursor->next_hash = end;
  cursor->done = end == kHashEnd;
  return Status::Ok();
}

void EmbeddingTable::VisitRows(const std::function<bool(const RowView& row)>& visit) const {
  constexpr int64_t kPageBytes = 1 << 20;
  const int64_t page_rows =
      std::max<int64_t>(1, kPageBytes / (layout_.dim * static_cast<int64_t>(sizeof(float))));
  const int64_t step = last_global_step_.load(std::memory_order_relaxed);
  std::vector<RowView> rows;
  std::vector<float> values;
  for (const auto& shard : shards_) {
    for (uint64_t begin = 0; begin < kHashEnd;) {
      rows.clear();
      values.clear();
      {
        std::shared_lock<FairSharedMutex> lock(shard->mutex);
        const uint64_t end = std::min(kHashEnd, begin + RangeFor(page_rows, shard->index.live()));
        shard->index.VisitHashRange(begin, end, [&](const FlatIndex::Slot& slot, uint32_t) {
          rows.push_back({slot.key, slot.ts, nullptr});
          const size_t at = values.size();
          values.resize(at + static_cast<size_t>(layout_.dim));
          ReadRow(layout_, shard->rows.Address(slot.row), step, values.data() + at);
        });
        begin = end;
      }
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i].values = values.data() + i * static_cast<size_t>(layout_.dim);
        if (!visit(rows[i])) return;
      }
    }
  }
}

Status EmbeddingTable::SavePage(int64_t part, int64_t num_parts, int64_t limit, int64_t offset,
                                int64_t* new_offset, std::vector<std::string>* entries) const {
  if (layout_.serving()) return Status::Unimplemented("ServingEntryAccessor doesn't support Save.");
  if (num_parts <= 0 || part < 0 || part >= num_parts) {
    return Status::InvalidArgument("shard_idx is " + std::to_string(part) + ", num_shards is " +
                                   std::to_string(num_parts));
  }
  if (limit < 0 || offset < 0) {
    return Status::InvalidArgument("limit is " + std::to_string(limit) + ", offset is " +
                                   std::to_string(offset) + ", want both >= 0");
  }
  struct Found {
    uint32_t hash;
    int64_t key;
    uint32_t row;
    uint32_t ts;
  };
  PageOffset at = PageOffset::Decode(offset);
  std::vector<Found> found;
  std::string record(codec_.max_record_bytes(), '\0');
  entries->clear();
  while (part + at.ordinal * num_parts < kNumShards) {
    const Shard& shard = *shards_[part + at.ordinal * num_parts];
    std::shared_lock<FairSharedMutex> lock(shard.mutex);
    while (at.hash < kHashEnd && static_cast<int64_t>(entries->size()) < limit) {
      const int64_t wanted = limit - static_cast<int64_t>(entries->size());
      const uint64_t end = std::min(kHashEnd, at.hash + RangeFor(wanted, shard.index.live()));
      found.clear();
      shard.index.VisitHashRange(at.hash, end, [&](const FlatIndex::Slot& slot, uint32_t hash) {
        found.push_back({hash, slot.key, slot.row, slot.ts});
      });
      std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
        return std::tie(a.hash, a.key) < std::tie(b.hash, b.key);
      });
      PageOffset next{at.ordinal, end, 0};
      int64_t same_hash = 0;  // rows before this one with its hash
      for (size_t i = 0; i < found.size(); ++i) {
        same_hash = i > 0 && found[i].hash == found[i - 1].hash ? same_hash + 1 : 0;
        if (found[i].hash == at.hash && same_hash < at.done) continue;
        if (static_cast<int64_t>(entries->size()) == limit) {
          next = {at.ordinal, found[i].hash, same_hash};
          break;
        }
        const int64_t size = codec_.Encode(found[i].key, shard.rows.Address(found[i].row),
                                           found[i].ts, true, &record[0]);
        entries->emplace_back(record.data(), size);
      }
      at = next;
    }
    if (at.hash == kHashEnd) at = {at.ordinal + 1, 0, 0};
    if (static_cast<int64_t>(entries->size()) == limit) break;
  }
  *new_offset = at.Encode();
  return Status::Ok();
}

Status EmbeddingTable::LoadRecords(const RecordView* records, int64_t n, LoadStats* stats) {
  constexpr int64_t kLoadTile = 2048;
  thread_local std::vector<char> rows;
  thread_local std::vector<int64_t> ids;
  thread_local std::vector<uint32_t> timestamps;
  std::vector<float> values(layout_.dim);
  const int64_t tile_size =
      std::max<int64_t>(64, std::min(kLoadTile, (int64_t{8} << 20) / layout_.stride));
  rows.resize(std::min(n, tile_size) * layout_.stride);
  WriteJob job;
  job.table = this;
  job.mode = WriteMode::kLoad;
  const int64_t now = std::max<int64_t>(0, std::time(nullptr));
  for (int64_t begin = 0; begin < n; begin += tile_size) {
    ids.clear();
    timestamps.clear();
    uint32_t newest = 0;
    for (int64_t i = begin; i < std::min(n, begin + tile_size); ++i) {
      char* row = rows.data() + ids.size() * layout_.stride;
      ParsedEntry entry;
      Status status = codec_.Parse(records[i].data, records[i].size, values.data(), row, &entry);
      if (!status.ok()) return status;
      newest = std::max(newest, entry.ts);
      // A row that was written without times counts from now on: against the first time that comes
      // it would have expired, and be missing from the next save. What never lives stays as it is.
      if (entry.ts == 0 && expiry_.IsExpired(entry.id, 0, now) &&
          !expiry_.IsExpired(entry.id, static_cast<uint32_t>(now), now)) {
        entry.ts = static_cast<uint32_t>(now);
      }
      if (config_.skip_zero_embedding && IsZeroVector(values.data(), layout_.dim)) {
        ++stats->skipped_zero;
        counters_.restore_skipped.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      if (layout_.serving()) {
        for (const Segment& segment : layout_.segments) EncodeSegment(segment, values.data(), row);
      }
      if (entry.state_reset > 0) {
        stats->state_reset += entry.state_reset;
        counters_.restore_state_reset.fetch_add(entry.state_reset, std::memory_order_relaxed);
      }
      ids.push_back(entry.id);
      timestamps.push_back(entry.ts);
    }
    std::vector<PlannedWrite> writes(1);
    writes[0].job = &job;
    WriteTile tile;
    tile.ids = ids.data();
    tile.n = static_cast<int64_t>(ids.size());
    tile.load_rows = rows.data();
    tile.load_ts = timestamps.data();
    writes[0].tiles.push_back(tile);
    RunWrites(writes, nullptr);
    RaiseMaxUpdateTs(newest);
    stats->loaded += tile.n;
    if (job.out_of_memory.load(std::memory_order_relaxed)) {
      return NoRoomForRows(*arena_, Size());
    }
  }
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
