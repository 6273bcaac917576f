// Reads TFRecords in batches, straight out of a large buffer.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_RECORD_BATCH_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_RECORD_BATCH_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

class RecordBatchReader {
 public:
  explicit RecordBatchReader(std::unique_ptr<io::InputStreamInterface> stream)
      : stream_(std::move(stream)) {}

  // Replaces `records` by the next ones, at most `max_records`; none means the end. They are valid
  // until the next call. DataLoss: a checksum is wrong, or the stream ends inside a record.
  Status Next(int64_t max_records, std::vector<::monolith::engine::RecordView>* records);

 private:
  Status Fill();

  const std::unique_ptr<io::InputStreamInterface> stream_;
  std::string buffer_;
  tstring chunk_;         // what Fill read last; its memory is kept
  int64_t position_ = 0;  // of the first unread byte in buffer_
  bool at_end_ = false;   // the stream has no more bytes
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_RECORD_BATCH_READER_H_
