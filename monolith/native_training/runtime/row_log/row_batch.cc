#include "monolith/native_training/runtime/row_log/row_batch.h"

#include <cstring>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/half_float.h"
#include "monolith/native_training/runtime/base/wire_format.h"

namespace monolith {
namespace engine {
namespace {

// Field numbers of RowBatch.
enum BatchField {
  kModel = 1,
  kShard = 2,
  kShardCount = 3,
  kEpoch = 4,
  kSeq = 5,
  kPrevSeq = 6,
  kChunk = 7,
  kNumChunks = 8,
  kBaseExport = 9,
  kNewestEventTime = 10,
  kSamplePositions = 11,
  kSendTime = 12,
  kTables = 13,
  kFullScan = 14,
  kDigest = 15,
  kSavedStep = 16,
};

// Field numbers of TableRows.
enum TableField { kName = 1, kDim = 2, kIds = 3, kRows = 4, kHalf = 5, kDeletedIds = 6 };

// Field numbers of Digest.
enum DigestField { kDigestSeq = 1, kDigestSums = 2, kDigestCounts = 3 };

constexpr int64_t kIdBytes = 8;
// A row of more values would not fit into a message.
constexpr int64_t kMaxDim = kMaxMessageBytes / 2;

void AppendVarint(uint64_t value, std::string* out) {
  char bytes[kMaxVarintBytes];
  out->append(bytes, static_cast<size_t>(WriteVarint(value, bytes) - bytes));
}

void AppendTag(int field, WireType type, std::string* out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | type, out);
}

// proto3 leaves zeros out.
void AppendInt(int field, int64_t value, std::string* out) {
  if (value == 0) return;
  AppendTag(field, kVarint, out);
  AppendVarint(static_cast<uint64_t>(value), out);
}

void AppendBytes(int field, std::string_view bytes, std::string* out) {
  if (bytes.empty()) return;
  AppendTag(field, kLengthDelimited, out);
  AppendVarint(bytes.size(), out);
  out->append(bytes.data(), bytes.size());
}

void AppendFixed64(int field, const void* value, std::string* out) {
  AppendTag(field, kFixed64, out);
  out->append(static_cast<const char*>(value), 8);
}

Status Malformed(const char* what) {
  return Status::InvalidArgument(std::string("a message of the row log has a malformed ") + what);
}

Status WrongSize(const char* what, int64_t size, int64_t want, std::string_view table) {
  return Status::InvalidArgument("a message of the row log has " + std::to_string(size) +
                                 " bytes of " + what + " for table '" + std::string(table) +
                                 "', want " + std::to_string(want));
}

bool ReadInt64(WireReader* reader, WireType type, int64_t* value) {
  uint64_t bits;
  if (type != kVarint || !reader->ReadVarint(&bits)) return false;
  *value = static_cast<int64_t>(bits);
  return true;
}

bool ReadInt32(WireReader* reader, WireType type, int32_t* value) {
  int64_t wide;
  if (!ReadInt64(reader, type, &wide)) return false;
  *value = static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(wide)));
  return true;
}

bool ReadBool(WireReader* reader, WireType type, bool* value) {
  int64_t number;
  if (!ReadInt64(reader, type, &number)) return false;
  *value = number != 0;
  return true;
}

bool ReadView(WireReader* reader, WireType type, std::string_view* view) {
  const char* data;
  int64_t size;
  if (type != kLengthDelimited || !reader->ReadMessage(&data, &size)) return false;
  *view = std::string_view(data, static_cast<size_t>(size));
  return true;
}

bool ReadString(WireReader* reader, WireType type, std::string* text) {
  std::string_view view;
  if (!ReadView(reader, type, &view)) return false;
  *text = std::string(view);
  return true;
}

// A map entry whose key is an int32 and whose value an int64.
bool ReadPosition(WireReader* reader, WireType type, std::pair<int32_t, int64_t>* entry) {
  std::string_view bytes;
  if (!ReadView(reader, type, &bytes)) return false;
  WireReader inner(bytes.data(), static_cast<int64_t>(bytes.size()));
  while (!inner.done()) {
    int field;
    WireType inner_type;
    if (!inner.ReadTag(&field, &inner_type)) return false;
    const bool ok = field == 1   ? ReadInt32(&inner, inner_type, &entry->first)
                    : field == 2 ? ReadInt64(&inner, inner_type, &entry->second)
                                 : inner.Skip(inner_type);
    if (!ok) return false;
  }
  return true;
}

// A map entry whose key is a name and whose value a fixed64 or an int64.
bool ReadNamedNumber(std::string_view bytes, bool fixed, std::string_view* name, uint64_t* value) {
  WireReader reader(bytes.data(), static_cast<int64_t>(bytes.size()));
  while (!reader.done()) {
    int field;
    WireType type;
    if (!reader.ReadTag(&field, &type)) return false;
    bool ok;
    if (field == 1) {
      ok = ReadView(&reader, type, name);
    } else if (field == 2 && fixed) {
      ok = type == kFixed64 && reader.ReadBytes(value, 8);
    } else if (field == 2) {
      ok = type == kVarint && reader.ReadVarint(value);
    } else {
      ok = reader.Skip(type);
    }
    if (!ok) return false;
  }
  return true;
}

bool ReadDigest(std::string_view bytes, BatchDigest* digest) {
  WireReader reader(bytes.data(), static_cast<int64_t>(bytes.size()));
  while (!reader.done()) {
    int field;
    WireType type;
    if (!reader.ReadTag(&field, &type)) return false;
    if (field == kDigestSeq) {
      if (!ReadInt64(&reader, type, &digest->seq)) return false;
    } else if (field == kDigestSums || field == kDigestCounts) {
      std::string_view entry, name;
      uint64_t value = 0;
      if (!ReadView(&reader, type, &entry)) return false;
      if (!ReadNamedNumber(entry, field == kDigestSums, &name, &value)) return false;
      TableDigest& table = digest->tables[std::string(name)];
      if (field == kDigestSums) {
        table.sum = value;
      } else {
        table.rows = static_cast<int64_t>(value);
      }
    } else if (!reader.Skip(type)) {
      return false;
    }
  }
  return true;
}

Status ReadTable(std::string_view bytes, TableRowsView* table) {
  WireReader reader(bytes.data(), static_cast<int64_t>(bytes.size()));
  std::string_view ids, rows, deleted;
  while (!reader.done()) {
    int field;
    WireType type;
    if (!reader.ReadTag(&field, &type)) return Malformed("TableRows");
    bool ok;
    switch (field) {
      case kName:
        ok = ReadView(&reader, type, &table->name);
        break;
      case kDim:
        ok = ReadInt64(&reader, type, &table->dim);
        break;
      case kIds:
        ok = ReadView(&reader, type, &ids);
        break;
      case kRows:
        ok = ReadView(&reader, type, &rows);
        break;
      case kHalf:
        ok = ReadBool(&reader, type, &table->half);
        break;
      case kDeletedIds:
        ok = ReadView(&reader, type, &deleted);
        break;
      default:
        ok = reader.Skip(type);
    }
    if (!ok) return Malformed("TableRows");
  }
  const int64_t id_bytes = static_cast<int64_t>(ids.size());
  const int64_t deleted_bytes = static_cast<int64_t>(deleted.size());
  if (table->dim < 1 || table->dim > kMaxDim) {
    return Status::InvalidArgument(
        "a message of the row log has the dim " + std::to_string(table->dim) + " for table '" +
        std::string(table->name) + "', want 1 to " + std::to_string(kMaxDim));
  }
  if (id_bytes % kIdBytes != 0) {
    return WrongSize("ids", id_bytes, id_bytes / kIdBytes * kIdBytes, table->name);
  }
  if (deleted_bytes % kIdBytes != 0) {
    return WrongSize("deleted_ids", deleted_bytes, deleted_bytes / kIdBytes * kIdBytes,
                     table->name);
  }
  table->num_rows = id_bytes / kIdBytes;
  // Neither factor is large enough for an overflow: the ids are in memory, and dim is bounded.
  const int64_t want = table->num_rows * table->dim * (table->half ? 2 : 4);
  if (static_cast<int64_t>(rows.size()) != want) {
    return WrongSize("rows", static_cast<int64_t>(rows.size()), want, table->name);
  }
  table->ids = ids.data();
  table->rows = rows.data();
  table->num_deleted = deleted_bytes / kIdBytes;
  table->deleted_ids = deleted.data();
  return Status::Ok();
}

void CopyBytes(const char* from, int64_t size, void* to) {
  if (size > 0) std::memcpy(to, from, static_cast<size_t>(size));
}

}  // namespace

void TableRowsView::CopyIds(int64_t begin, int64_t n, int64_t* out) const {
  CopyBytes(ids + kIdBytes * begin, kIdBytes * n, out);
}

void TableRowsView::CopyRows(int64_t begin, int64_t n, float* out) const {
  if (!half) return CopyBytes(rows + 4 * dim * begin, 4 * dim * n, out);
  const char* at = rows + 2 * dim * begin;
  for (int64_t i = 0; i < dim * n; ++i) {
    uint16_t value;
    std::memcpy(&value, at + 2 * i, 2);
    out[i] = HalfToFloat(value);
  }
}

void TableRowsView::CopyDeleted(int64_t begin, int64_t n, int64_t* out) const {
  CopyBytes(deleted_ids + kIdBytes * begin, kIdBytes * n, out);
}

void AppendHeader(const BatchHeader& header, std::string* out) {
  AppendBytes(kModel, header.model, out);
  AppendInt(kShard, header.shard, out);
  AppendInt(kShardCount, header.num_shards, out);
  AppendInt(kEpoch, header.epoch, out);
  AppendInt(kSeq, header.seq, out);
  AppendInt(kPrevSeq, header.prev_seq, out);
  AppendInt(kChunk, header.chunk, out);
  AppendInt(kNumChunks, header.num_chunks, out);
  AppendBytes(kBaseExport, header.base_export, out);
  AppendInt(kNewestEventTime, header.newest_event_time, out);
  for (const auto& position : header.sample_positions) {
    std::string entry;
    AppendInt(1, position.first, &entry);
    AppendInt(2, position.second, &entry);
    AppendTag(kSamplePositions, kLengthDelimited, out);
    AppendVarint(entry.size(), out);
    out->append(entry);
  }
  if (header.send_time != 0) AppendFixed64(kSendTime, &header.send_time, out);
  AppendInt(kFullScan, header.full_scan ? 1 : 0, out);
  AppendInt(kSavedStep, header.saved_step, out);
}

int64_t DigestBytes(const BatchDigest& digest) {
  int64_t bytes = 32;
  for (const auto& table : digest.tables) {
    bytes += 2 * (static_cast<int64_t>(table.first.size()) + 32);
  }
  return bytes;
}

void AppendDigest(const BatchDigest& digest, std::string* out) {
  std::string body;
  AppendInt(kDigestSeq, digest.seq, &body);
  std::string entry;
  for (const auto& table : digest.tables) {
    entry.clear();
    AppendBytes(1, table.first, &entry);
    AppendFixed64(2, &table.second.sum, &entry);
    AppendBytes(kDigestSums, entry, &body);
    entry.clear();
    AppendBytes(1, table.first, &entry);
    AppendInt(2, table.second.rows, &entry);
    AppendBytes(kDigestCounts, entry, &body);
  }
  AppendTag(kDigest, kLengthDelimited, out);
  AppendVarint(body.size(), out);
  out->append(body);
}

int64_t TableOverheadBytes(std::string_view name) {
  // Tags and lengths of seven fields, none of which takes more than a tag and five bytes.
  return static_cast<int64_t>(name.size()) + 64;
}

void BeginTable(std::string_view name, int64_t dim, std::string_view ids, int64_t row_bytes,
                bool half, int64_t deleted_bytes, std::string* out) {
  std::string head;
  AppendBytes(kName, name, &head);
  AppendInt(kDim, dim, &head);
  AppendInt(kHalf, half ? 1 : 0, &head);
  const auto field_bytes = [](int64_t bytes) {
    return bytes == 0 ? 0 : 1 + VarintBytes(static_cast<uint64_t>(bytes)) + bytes;
  };
  const int64_t size = static_cast<int64_t>(head.size()) +
                       field_bytes(static_cast<int64_t>(ids.size())) + field_bytes(row_bytes) +
                       field_bytes(deleted_bytes);
  AppendTag(kTables, kLengthDelimited, out);
  AppendVarint(static_cast<uint64_t>(size), out);
  out->append(head);
  AppendBytes(kIds, ids, out);
  if (row_bytes == 0) return;
  AppendTag(kRows, kLengthDelimited, out);
  AppendVarint(static_cast<uint64_t>(row_bytes), out);
}

void AppendTable(std::string_view name, int64_t dim, std::string_view ids, std::string_view rows,
                 bool half, std::string_view deleted_ids, std::string* out) {
  BeginTable(name, dim, ids, static_cast<int64_t>(rows.size()), half,
             static_cast<int64_t>(deleted_ids.size()), out);
  out->append(rows);
  AppendBytes(kDeletedIds, deleted_ids, out);
}

Status ParseBatch(const char* data, int64_t size, BatchView* batch) {
  *batch = BatchView();
  BatchHeader* header = &batch->header;
  WireReader reader(data, size);
  while (!reader.done()) {
    int field;
    WireType type;
    if (!reader.ReadTag(&field, &type)) return Malformed("RowBatch");
    bool ok;
    std::string_view bytes;
    switch (field) {
      case kModel:
        ok = ReadString(&reader, type, &header->model);
        break;
      case kShard:
        ok = ReadInt32(&reader, type, &header->shard);
        break;
      case kShardCount:
        ok = ReadInt32(&reader, type, &header->num_shards);
        break;
      case kEpoch:
        ok = ReadInt64(&reader, type, &header->epoch);
        break;
      case kSeq:
        ok = ReadInt64(&reader, type, &header->seq);
        break;
      case kPrevSeq:
        ok = ReadInt64(&reader, type, &header->prev_seq);
        break;
      case kChunk:
        ok = ReadInt32(&reader, type, &header->chunk);
        break;
      case kNumChunks:
        ok = ReadInt32(&reader, type, &header->num_chunks);
        break;
      case kBaseExport:
        ok = ReadString(&reader, type, &header->base_export);
        break;
      case kNewestEventTime:
        ok = ReadInt64(&reader, type, &header->newest_event_time);
        break;
      case kSamplePositions:
        header->sample_positions.emplace_back();
        ok = ReadPosition(&reader, type, &header->sample_positions.back());
        break;
      case kSendTime:
        ok = type == kFixed64 && reader.ReadBytes(&header->send_time, 8);
        break;
      case kTables: {
        if (!ReadView(&reader, type, &bytes)) return Malformed("TableRows");
        batch->tables.emplace_back();
        const Status status = ReadTable(bytes, &batch->tables.back());
        if (!status.ok()) return status;
        ok = true;
        break;
      }
      case kFullScan:
        ok = ReadBool(&reader, type, &header->full_scan);
        break;
      case kDigest:
        header->has_digest = true;
        ok = ReadView(&reader, type, &bytes) && ReadDigest(bytes, &header->digest);
        break;
      case kSavedStep:
        ok = ReadInt64(&reader, type, &header->saved_step);
        break;
      default:
        ok = reader.Skip(type);
    }
    if (!ok) return Malformed("RowBatch");
  }
  return Status::Ok();
}

Status ParseMessage(const char* data, int64_t size, BatchView* batch) {
  if (size < kMessageCrcBytes) {
    return Status::DataLoss("a message of the row log has " + std::to_string(size) +
                            " bytes, want its checksum of 4 bytes at least");
  }
  uint32_t crc;
  std::memcpy(&crc, data, kMessageCrcBytes);
  const uint32_t found = MaskCrc(Crc32c(data + kMessageCrcBytes, size - kMessageCrcBytes));
  if (crc != found) {
    return Status::DataLoss("a message of the row log of " + std::to_string(size) +
                            " bytes has the checksum " + std::to_string(found) + ", want " +
                            std::to_string(crc));
  }
  const Status status = ParseBatch(data + kMessageCrcBytes, size - kMessageCrcBytes, batch);
  if (!status.ok()) return status;
  const BatchHeader& header = batch->header;
  if (header.epoch < 1 || header.seq < 1 || header.prev_seq < 0 || header.prev_seq >= header.seq) {
    return Status::InvalidArgument(
        "a message of the row log has epoch " + std::to_string(header.epoch) + ", seq " +
        std::to_string(header.seq) + " and prev_seq " + std::to_string(header.prev_seq) +
        ", want 1 or more of the first two, and less of the last than of the second");
  }
  if (header.num_chunks < 1 || header.num_chunks > kMaxChunks || header.chunk < 0 ||
      header.chunk >= header.num_chunks) {
    return Status::InvalidArgument("a message of the row log is chunk " +
                                   std::to_string(header.chunk) + " of " +
                                   std::to_string(header.num_chunks) + ", want less than " +
                                   std::to_string(kMaxChunks) + " chunks");
  }
  return Status::Ok();
}

void SealMessage(std::string* message) {
  const uint32_t crc = MaskCrc(Crc32c(message->data() + kMessageCrcBytes,
                                      static_cast<int64_t>(message->size()) - kMessageCrcBytes));
  std::memcpy(&(*message)[0], &crc, kMessageCrcBytes);
}

}  // namespace engine
}  // namespace monolith
