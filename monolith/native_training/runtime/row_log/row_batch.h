// Messages of the row log: monolith.realtime.RowBatch behind its checksum.
//
//   | masked CRC-32C of the rest, 4 bytes little endian | RowBatch in protobuf's wire format |
//
// A batch is cut into chunks of at most kMaxMessageBytes, because brokers limit messages. Written
// and read here without protobuf, rows by the thousand.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_BATCH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_BATCH_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/row_log/table_digest.h"

namespace monolith {
namespace engine {

constexpr int64_t kMaxMessageBytes = 900000;
constexpr int64_t kMessageCrcBytes = 4;
// More than any batch has: 900 GB.
constexpr int64_t kMaxChunks = 1 << 20;

struct BatchDigest {
  int64_t seq = 0;
  std::map<std::string, TableDigest> tables;
};

// Holds the fields of a message beside its rows.
struct BatchHeader {
  std::string model;
  int32_t shard = 0;
  int32_t num_shards = 0;
  int64_t epoch = 0;
  int64_t seq = 0;
  int64_t prev_seq = 0;
  int32_t chunk = 0;
  int32_t num_chunks = 0;
  std::string base_export;
  int64_t newest_event_time = 0;
  std::vector<std::pair<int32_t, int64_t>> sample_positions;
  double send_time = 0;
  bool full_scan = false;
  int64_t saved_step = 0;
  bool has_digest = false;
  BatchDigest digest;

  // Whether this is another chunk of the same batch.
  bool SameBatch(const BatchHeader& other) const {
    return epoch == other.epoch && seq == other.seq && num_chunks == other.num_chunks &&
           full_scan == other.full_scan;
  }
};

// Rows of one table, in the buffer of the message. Values lie unaligned.
struct TableRowsView {
  std::string_view name;
  int64_t dim = 0;
  int64_t num_rows = 0;
  const char* ids = nullptr;   // 8 bytes each
  const char* rows = nullptr;  // dim values of 4 bytes, or 2 if `half`, each
  bool half = false;
  int64_t num_deleted = 0;
  const char* deleted_ids = nullptr;

  // Brings the first 64 bytes of row i into the cache; the hardware follows.
  void Prefetch(int64_t i) const {
    const int64_t row_bytes = (half ? 2 : 4) * dim;
    const char* const row = rows + row_bytes * i;
    PrefetchForRead(row);
    PrefetchForRead(row + (row_bytes < 64 ? row_bytes : 64) - 1);
  }
  // Copies rows [begin, begin + n).
  void CopyIds(int64_t begin, int64_t n, int64_t* out) const;
  void CopyRows(int64_t begin, int64_t n, float* out) const;
  void CopyDeleted(int64_t begin, int64_t n, int64_t* out) const;
};

struct BatchView {
  BatchHeader header;
  std::vector<TableRowsView> tables;
};

// Appends the fields of `header` except the digest.
void AppendHeader(const BatchHeader& header, std::string* out);

// Appends the digest field; DigestBytes is the size of what it appends, at most.
void AppendDigest(const BatchDigest& digest, std::string* out);
int64_t DigestBytes(const BatchDigest& digest);

// Appends one TableRows. `ids`, `rows` and `deleted_ids` are bytes as in the message.
void AppendTable(std::string_view name, int64_t dim, std::string_view ids, std::string_view rows,
                 bool half, std::string_view deleted_ids, std::string* out);
// Appends what stands in front of `row_bytes` bytes of rows, which are to be appended next;
// `deleted_bytes` of a field of deleted ids may follow.
void BeginTable(std::string_view name, int64_t dim, std::string_view ids, int64_t row_bytes,
                bool half, int64_t deleted_bytes, std::string* out);
// Bytes that AppendTable adds to those of ids and rows, at most.
int64_t TableOverheadBytes(std::string_view name);

// Reads the fields of a message whose checksum is off already. InvalidArgument: it is malformed, or
// its sizes do not fit together; epochs, chunks and the like are not looked at.
Status ParseBatch(const char* data, int64_t size, BatchView* batch);

// Reads a whole message and checks all of it; `batch` refers to `data`. DataLoss: the checksum is
// wrong. InvalidArgument: what the writer wrote is no batch.
Status ParseMessage(const char* data, int64_t size, BatchView* batch);

// Writes the checksum into the first 4 bytes of `message`.
void SealMessage(std::string* message);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ROW_LOG_ROW_BATCH_H_
