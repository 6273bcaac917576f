// Rows of a GPU table to the host and back, in the engine's layout and records.
#include <algorithm>
#include <cstring>
#include <string>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/gpu/table_kernels.h"

namespace monolith {
namespace gpu {
namespace {

// Bytes of rows that are on their way at a time.
constexpr int64_t kStagingBytes = int64_t{64} << 20;

// A bit for every live slot that is not expired.
struct MarkLive {
  const TableSlot* slots;
  int64_t n;
  const int64_t* limits;
  int64_t limit;
  int64_t newest;
  bool leave_out;
  uint32_t* words;

  MONO_DEVICE void operator()(int64_t word) const {
    uint32_t bits = 0;
    for (int j = 0; j < kWordIds; ++j) {
      const int64_t i = word * kWordIds + j;
      if (i >= n) break;
      const TableSlot slot = LoadSlot(slots + i);
      if (!IsLive(slot.row)) continue;
      const int64_t allowed = limits == nullptr ? limit : limits[engine::SlotOfV2(slot.key)];
      if (leave_out && newest - static_cast<int64_t>(slot.ts) >= allowed) continue;
      bits |= 1u << j;
    }
    words[word] = bits;
  }
};

// Copies the marked rows of one word, a float a lane.
struct CopyMarked {
  const TableSlot* slots;
  const uint32_t* words;
  const uint32_t* prefix;
  int64_t first_word;
  uint32_t first_rank;
  const char* rows;
  int64_t stride;
  int row_floats;
  int64_t* ids;
  uint32_t* ts;
  float* out;

  MONO_DEVICE void operator()(int64_t index, int lane) const {
    const int64_t word = first_word + index;
    const uint32_t bits = words[word];
    int64_t rank = prefix[word] - first_rank;
    for (int j = 0; j < kWordIds; ++j) {
      if ((bits >> j & 1) == 0) continue;
      const TableSlot slot = LoadSlot(slots + word * kWordIds + j);
      if (lane == 0) {
        ids[rank] = slot.key;
        ts[rank] = slot.ts;
      }
      const float* const from = reinterpret_cast<const float*>(rows + slot.row * stride);
      for (int i = lane; i < row_floats; i += kWarpLanes) out[rank * row_floats + i] = from[i];
      ++rank;
    }
  }
};

// Copies the rows of some ids.
struct CopyNamed {
  IndexView index;
  const int64_t* ids;
  int64_t n;
  const char* rows;
  int64_t stride;
  int row_floats;
  uint32_t* numbers;
  uint32_t* ts;
  float* out;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    for (int64_t i = word * kWordIds; i < n && i < (word + 1) * kWordIds; ++i) {
      const TableSlot* const at = FindSlot(index, ids[i]);
      const TableSlot slot = at == nullptr ? TableSlot{0, 0, 0} : *at;
      if (lane == 0) {
        numbers[i] = slot.row;
        ts[i] = slot.ts;
      }
      // Row 0, which absent ids have, is all zeros.
      const float* const from = reinterpret_cast<const float*>(rows + slot.row * stride);
      for (int k = lane; k < row_floats; k += kWarpLanes) out[i * row_floats + k] = from[k];
    }
  }
};

}  // namespace

int GpuTable::ExportShard(Stream stream, int shard, const engine::ExpiryPolicy* policy,
                          ExportedRows* result) {
  if (shard < 0 || shard >= kTableShards) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "shard is " + std::to_string(shard) + ", want 0 to " +
                                               std::to_string(kTableShards - 1));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  // As a write: no other may come while rows are copied.
  return AsWrite(stream, [&]() -> int {
    MONO_GPU_TRY(ReadState(stream));
    MONO_GPU_TRY(MoveSpilled(stream));
    result->live = known_.live[shard];
    const Shard& s = shards_[shard];
    const int64_t words = CeilDiv(s.num_slots(), kWordIds);
    const std::vector<int64_t> none;
    const std::vector<int64_t>& limits = policy == nullptr ? none : policy->slot_seconds();
    const int64_t limit_bytes = static_cast<int64_t>(limits.size() * sizeof(int64_t));
    const int64_t row_bytes = layout_.row_bytes;
    const int64_t piece_words =
        std::max<int64_t>(1, std::min(words, kStagingBytes / (kWordIds * (row_bytes + 12))));
    const int64_t piece_rows = piece_words * kWordIds;
    DeviceBuffer marks, staging;
    MONO_GPU_TRY(marks.Allocate(stream, 2 * words * 4 + limit_bytes + 8, "saving a table"));
    int64_t* const device_limits = marks.As<int64_t>();
    const auto bits = reinterpret_cast<uint32_t*>(marks.As<char>() + limit_bytes);
    uint32_t* const prefix = bits + words;
    uint32_t* const total = prefix + words;
    MONO_GPU_TRY(staging.Allocate(stream, piece_rows * (row_bytes + 12), "saving a table"));
    int64_t* const ids = staging.As<int64_t>();
    const auto ts = reinterpret_cast<uint32_t*>(ids + piece_rows);
    const auto rows = reinterpret_cast<float*>(ts + piece_rows);
    MONO_GPU_TRY(CopyToDevice(stream, limits.data(), device_limits, limit_bytes));
    MONO_GPU_TRY(ForEach(
        stream, words,
        MarkLive{s.slots.As<TableSlot>(), s.num_slots(), limits.empty() ? nullptr : device_limits,
                 policy == nullptr ? 0 : policy->default_seconds(), max_update_ts_,
                 policy != nullptr, bits}));
    MONO_GPU_TRY(ScanBits(stream, bits, words, prefix, total));
    std::vector<uint32_t> ranks(words + 1);
    MONO_GPU_TRY(CopyToHost(stream, prefix, ranks.data(), (words + 1) * 4));
    const int64_t count = ranks[words];
    result->ids.resize(count);
    result->ts.resize(count);
    result->rows.resize(count * row_bytes);
    for (int64_t begin = 0; begin < words; begin += piece_words) {
      const int64_t end = std::min(words, begin + piece_words);
      const int64_t first = ranks[begin], n = int64_t{ranks[end]} - first;
      if (n == 0) continue;
      MONO_GPU_TRY(ForWarps(
          stream, end - begin, kAllBlocks,
          CopyMarked{s.slots.As<TableSlot>(), bits, prefix, begin, ranks[begin], arena_.base(),
                     stride_, static_cast<int>(row_bytes / 4), ids, ts, rows}));
      MONO_GPU_TRY(CopyToHost(stream, ids, result->ids.data() + first, n * 8));
      MONO_GPU_TRY(CopyToHost(stream, ts, result->ts.data() + first, n * 4));
      MONO_GPU_TRY(
          CopyToHost(stream, rows, result->rows.data() + first * row_bytes, n * row_bytes));
    }
    staging.Free(stream);
    marks.Free(stream);
    return MONO_GPU_OK;
  });
}

int GpuTable::ExportIds(Stream stream, const int64_t* ids, int64_t n, ExportedRows* result) {
  if (n < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(n));
  }
  result->ids.resize(n);
  result->ts.resize(n);
  result->numbers.resize(n);
  const int64_t row_bytes = layout_.row_bytes;
  result->rows.resize(n * row_bytes);
  if (n == 0) return MONO_GPU_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  // As a write: no other may come while rows are copied.
  return AsWrite(stream, [&]() -> int {
    const int64_t piece = std::max<int64_t>(1, std::min(n, kStagingBytes / (row_bytes + 8)));
    DeviceBuffer staging;
    MONO_GPU_TRY(staging.Allocate(stream, piece * (row_bytes + 8), "saving rows"));
    uint32_t* const numbers = staging.As<uint32_t>();
    uint32_t* const ts = numbers + piece;
    const auto rows = reinterpret_cast<float*>(ts + piece);
    MONO_GPU_TRY(CopyToHost(stream, ids, result->ids.data(), n * 8));
    for (int64_t begin = 0; begin < n; begin += piece) {
      const int64_t count = std::min(piece, n - begin);
      MONO_GPU_TRY(ForWarps(stream, CeilDiv(count, kWordIds), kAllBlocks,
                            CopyNamed{View(), ids + begin, count, arena_.base(), stride_,
                                      static_cast<int>(row_bytes / 4), numbers, ts, rows}));
      MONO_GPU_TRY(CopyToHost(stream, numbers, result->numbers.data() + begin, count * 4));
      MONO_GPU_TRY(CopyToHost(stream, ts, result->ts.data() + begin, count * 4));
      MONO_GPU_TRY(
          CopyToHost(stream, rows, result->rows.data() + begin * row_bytes, count * row_bytes));
    }
    staging.Free(stream);
    return MONO_GPU_OK;
  });
}

int GpuTable::SaveIds(Stream stream, const int64_t* ids, int64_t n, std::string* records,
                      std::vector<int64_t>* sizes) {
  ExportedRows exported;
  MONO_GPU_TRY(ExportIds(stream, ids, n, &exported));
  std::string record(static_cast<size_t>(codec_.max_record_bytes()), '\0');
  for (int64_t i = 0; i < n; ++i) {
    const int64_t size =
        exported.numbers[i] == 0
            ? 0
            : codec_.Encode(exported.ids[i], exported.rows.data() + i * layout_.row_bytes,
                            exported.ts[i], true, &record[0]);
    records->append(record.data(), static_cast<size_t>(size));
    sizes->push_back(size);
  }
  return MONO_GPU_OK;
}

int GpuTable::SaveShard(Stream stream, int shard, const engine::ExpiryPolicy* policy,
                        std::string* records, int64_t* num_records, int64_t* live) {
  ExportedRows exported;
  MONO_GPU_TRY(ExportShard(stream, shard, policy, &exported));
  if (live != nullptr) *live = exported.live;
  const int64_t frame = engine::kRecordHeaderBytes + engine::kRecordFooterBytes;
  const int64_t max_bytes = codec_.max_record_bytes() + frame;
  size_t used = records->size();
  for (size_t i = 0; i < exported.ids.size(); ++i) {
    if (records->size() < used + max_bytes) {
      records->resize(std::max(2 * records->size(), used + max_bytes));
    }
    char* const at = &(*records)[used];
    char* const body = at + engine::kRecordHeaderBytes;
    const int64_t size = codec_.Encode(
        exported.ids[i], exported.rows.data() + static_cast<int64_t>(i) * layout_.row_bytes,
        exported.ts[i], true, body);
    engine::WriteRecordHeader(static_cast<uint64_t>(size), at);
    engine::WriteRecordFooter(body, size, body + size);
    used += size + frame;
  }
  records->resize(used);
  *num_records += static_cast<int64_t>(exported.ids.size());
  return MONO_GPU_OK;
}

int GpuTable::LoadRecords(Stream stream, const engine::RecordView* records, int64_t n,
                          int64_t* state_reset) {
  const int64_t piece = std::max<int64_t>(1, kStagingBytes / (layout_.row_bytes + 12));
  std::vector<float> values(layout_.dim);
  std::vector<char> row(layout_.stride);
  ExportedRows rows;
  for (int64_t begin = 0; begin < n; begin += piece) {
    const int64_t count = std::min(piece, n - begin);
    rows.ids.resize(count);
    rows.ts.resize(count);
    rows.rows.resize(count * layout_.row_bytes);
    for (int64_t i = 0; i < count; ++i) {
      engine::ParsedEntry entry;
      const engine::RecordView& record = records[begin + i];
      const engine::Status status =
          codec_.Parse(record.data, record.size, values.data(), row.data(), &entry);
      if (!status.ok()) {
        return Fail(status.code == engine::StatusCode::kFailedPrecondition
                        ? MONO_GPU_FAILED_PRECONDITION
                        : MONO_GPU_INVALID_ARGUMENT,
                    status.message);
      }
      *state_reset += entry.state_reset;
      rows.ids[i] = entry.id;
      rows.ts[i] = entry.ts;
      std::memcpy(rows.rows.data() + i * layout_.row_bytes, row.data(), layout_.row_bytes);
    }
    MONO_GPU_TRY(ImportRows(stream, rows.ids.data(), rows.ts.data(), rows.rows.data(), count));
  }
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith
