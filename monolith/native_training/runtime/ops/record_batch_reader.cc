#include "monolith/native_training/runtime/ops/record_batch_reader.h"

#include "monolith/native_training/runtime/hash_table/crc32c.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace engine = ::monolith::engine;

// What is read stays in the second-level cache until it has been used.
constexpr int64_t kReadBytes = 512 << 10;
// No row comes near this; a longer record is a damaged length that happens to match its checksum.
constexpr int64_t kMaxRecordBytes = int64_t{1} << 30;

}  // namespace

Status RecordBatchReader::Next(int64_t max_records, std::vector<engine::RecordView>* records) {
  records->clear();
  while (static_cast<int64_t>(records->size()) < max_records) {
    const int64_t available = static_cast<int64_t>(buffer_.size()) - position_;
    const char* data = nullptr;
    int64_t size = 0, consumed = 0;
    switch (engine::ReadRecord(buffer_.data() + position_, available, &data, &size, &consumed)) {
      case engine::RecordResult::kRecord:
        records->push_back({data, size});
        position_ += consumed;
        continue;
      case engine::RecordResult::kCorrupt:
        return errors::DataLoss("a record's checksum is wrong");
      case engine::RecordResult::kIncomplete:
        break;
    }
    // Filling moves the buffer, so what was found so far must be handed out first.
    if (!records->empty()) return OkStatus();
    if (at_end_) {
      return available == 0 ? OkStatus() : errors::DataLoss("the file ends inside a record");
    }
    if (available > kMaxRecordBytes) return errors::DataLoss("a record's length is damaged");
    TF_RETURN_IF_ERROR(Fill());
  }
  return OkStatus();
}

Status RecordBatchReader::Fill() {
  buffer_.erase(0, position_);
  position_ = 0;
  const int64_t before = stream_->Tell();
  const Status status = stream_->ReadNBytes(kReadBytes, &chunk_);
  if (errors::IsOutOfRange(status)) {
    at_end_ = true;
    // A Snappy stream leaves the chunk as long as was asked for.
    const size_t read = static_cast<size_t>(stream_->Tell() - before);
    if (read < chunk_.size()) chunk_.resize(read);
  } else {
    TF_RETURN_IF_ERROR(status);
  }
  buffer_.append(chunk_.data(), chunk_.size());
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
