#include "monolith/native_training/runtime/files/record_reader.h"

#include <algorithm>
#include <limits>

namespace monolith {
namespace engine {
namespace {

// Small enough that the bytes stay in the second-level cache until they are used.
constexpr int64_t kReadBytes = 512 << 10;
// No row comes near this; a longer record is a damaged length that happens to match its checksum.
constexpr int64_t kMaxRecordBytes = int64_t{1} << 30;

Status WrongChecksum() { return Status::DataLoss("a record's checksum is wrong"); }

}  // namespace

Status CheckRecords(const std::vector<RecordView>& records) {
  const bool intact = std::all_of(records.begin(), records.end(), IsIntact);
  return intact ? Status::Ok() : WrongChecksum();
}

Status RecordBatchReader::Next(int64_t max_records, std::vector<RecordView>* records) {
  return Take(max_records, ReadRecord, records);
}

Status RecordBatchReader::NextChunk(std::string* chunk, std::vector<RecordView>* records) {
  Status status = Take(std::numeric_limits<int64_t>::max(), FindRecord, records);
  if (!status.ok() || records->empty()) return status;
  const char* const before = buffer_.data();
  chunk->swap(buffer_);
  for (RecordView& record : *records) record.data = chunk->data() + (record.data - before);
  buffer_.assign(*chunk, static_cast<size_t>(position_));
  position_ = 0;
  return Status::Ok();
}

Status RecordBatchReader::Take(int64_t max_records, FrameReader read,
                               std::vector<RecordView>* records) {
  records->clear();
  while (static_cast<int64_t>(records->size()) < max_records) {
    const int64_t available = static_cast<int64_t>(buffer_.size()) - position_;
    RecordView record;
    int64_t consumed = 0;
    switch (read(buffer_.data() + position_, available, &record.data, &record.size, &consumed)) {
      case RecordResult::kRecord:
        records->push_back(record);
        position_ += consumed;
        continue;
      case RecordResult::kCorrupt:
        return WrongChecksum();
      case RecordResult::kIncomplete:
        break;
    }
    // Filling moves the buffer, so hand out what was found so far first.
    if (!records->empty()) return Status::Ok();
    if (at_end_) {
      return available == 0 ? Status::Ok() : Status::DataLoss("the file ends inside a record");
    }
    if (available > kMaxRecordBytes) return Status::DataLoss("a record's length is damaged");
    Status status = Fill();
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status RecordBatchReader::Fill() {
  buffer_.erase(0, static_cast<size_t>(position_));
  position_ = 0;
  const size_t kept = buffer_.size();
  buffer_.resize(kept + kReadBytes);
  int64_t read = 0;
  Status status = file_->Read(kReadBytes, &buffer_[kept], &read);
  buffer_.resize(kept + static_cast<size_t>(read));
  at_end_ = read < kReadBytes;
  return status;
}

}  // namespace engine
}  // namespace monolith
