// Reads TFRecords in batches, straight out of a large buffer.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_RECORD_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_RECORD_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/files/file_system.h"

namespace monolith {
namespace engine {

class RecordBatchReader {
 public:
  explicit RecordBatchReader(std::unique_ptr<InputFile> file) : file_(std::move(file)) {}

  // Replaces `records` by the next ones, at most `max_records`; none means the end. They are valid
  // until the next call. DataLoss: a checksum is wrong, or the file ends inside a record.
  Status Next(int64_t max_records, std::vector<RecordView>* records);

  // The same for threads that share a reader, each calling under a lock of theirs: some hundred
  // kilobytes of records, which are in `chunk` and stay valid as long as it does. Their payloads
  // are not looked at yet: CheckRecords needs no lock.
  Status NextChunk(std::string* chunk, std::vector<RecordView>* records);

 private:
  // One of ReadRecord and FindRecord.
  using FrameReader = RecordResult (*)(const char* buffer, int64_t available, const char** data,
                                       int64_t* size, int64_t* consumed);

  Status Take(int64_t max_records, FrameReader read, std::vector<RecordView>* records);
  Status Fill();

  const std::unique_ptr<InputFile> file_;
  std::string buffer_;
  int64_t position_ = 0;  // the first unread byte in buffer_
  bool at_end_ = false;   // the file has no more bytes
};

// DataLoss: the payload of a record that NextChunk gave has another checksum.
Status CheckRecords(const std::vector<RecordView>& records);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_RECORD_READER_H_
