#include "monolith/native_training/runtime/ops/data/samples/decoded_input_stream.h"

#include <algorithm>
#include <utility>

#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

constexpr size_t kDecodedBytes = 128 << 10;  // stay in the second-level cache until they are read

}  // namespace

DecodedInputStream::DecodedInputStream(std::unique_ptr<io::InputStreamInterface> input,
                                       int64_t buffer_size, std::string frame)
    : input_(std::move(input)),
      buffer_size_(buffer_size),
      frame_(std::move(frame)),
      output_(kDecodedBytes, '\0') {}

Status DecodedInputStream::ReadNBytes(int64_t bytes_to_read, tstring* result) {
  if (bytes_to_read < 0) {
    return errors::InvalidArgument("cannot read ", bytes_to_read, " bytes");
  }
  result->clear();
  while (static_cast<int64_t>(result->size()) < bytes_to_read) {
    if (next_ == end_) TF_RETURN_IF_ERROR(Fill());
    const size_t taken = std::min<size_t>(end_ - next_, bytes_to_read - result->size());
    result->append(output_.data() + next_, taken);
    next_ += taken;
    position_ += taken;
  }
  return OkStatus();
}

Status DecodedInputStream::Reset() {
  TF_RETURN_IF_ERROR(input_->Reset());
  compressed_.clear();
  consumed_ = next_ = end_ = 0;
  position_ = 0;
  is_inside_frame_ = true;
  has_more_output_ = false;
  failure_ = OkStatus();
  return Restart();
}

// Decompresses at least one byte. OutOfRange: the input has ended, and so have its frames.
Status DecodedInputStream::Fill() {
  TF_RETURN_IF_ERROR(failure_);
  next_ = end_ = 0;
  while (end_ == 0) {
    // Only a decoder that has written out everything it knows may be given more, or be at an end.
    if (consumed_ == compressed_.size() && !has_more_output_) {
      const Status status = input_->ReadNBytes(buffer_size_, &compressed_);
      consumed_ = 0;
      if (!status.ok() && !errors::IsOutOfRange(status)) return status;
      if (compressed_.empty()) {
        if (is_inside_frame_) return errors::DataLoss("truncated ", frame_);
        return errors::OutOfRange("the end of the last ", frame_);
      }
    }
    Step step;
    step.input = compressed_.data() + consumed_;
    step.input_size = compressed_.size() - consumed_;
    step.output = output_.data();
    step.output_size = output_.size();
    const Status status = Decode(&step);
    consumed_ += step.consumed;
    end_ = step.produced;
    is_inside_frame_ = step.is_inside_frame;
    has_more_output_ = step.has_more_output;
    if (status.ok()) continue;
    failure_ = status;
    if (end_ == 0) return status;
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
