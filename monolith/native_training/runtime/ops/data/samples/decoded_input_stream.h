// Streams whose bytes are decompressed from those of another stream.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_DECODED_INPUT_STREAM_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_DECODED_INPUT_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tensorflow/core/lib/io/inputstream_interface.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// A stream of compressed frames, one after another. It ends where a frame ends, and nowhere else: a
// file of 0 bytes is torn, as every compressor writes a frame even for nothing.
class DecodedInputStream : public io::InputStreamInterface {
 public:
  // Fails with DataLoss where the input is corrupt or ends inside of a frame; `result` then has the
  // bytes before.
  Status ReadNBytes(int64_t bytes_to_read, tstring* result) override;
  int64_t Tell() const override { return position_; }
  Status Reset() override;

 protected:
  // One call of the decoder.
  struct Step {
    const char* input;
    size_t input_size;
    char* output;
    size_t output_size;
    size_t consumed = 0;
    size_t produced = 0;
    bool is_inside_frame = true;   // more input belongs to this frame
    bool has_more_output = false;  // the decoder could write more without more input
  };

  // `frame` is what the format calls a frame, for errors. Reads up to `buffer_size` bytes at once.
  DecodedInputStream(std::unique_ptr<io::InputStreamInterface> input, int64_t buffer_size,
                     std::string frame);

  virtual Status Decode(Step* step) = 0;
  // Makes the decoder expect a first frame.
  virtual Status Restart() = 0;

 private:
  Status Fill();

  const std::unique_ptr<io::InputStreamInterface> input_;
  const int64_t buffer_size_;
  const std::string frame_;
  tstring compressed_;
  size_t consumed_ = 0;
  std::string output_;
  size_t next_ = 0;
  size_t end_ = 0;
  int64_t position_ = 0;
  bool is_inside_frame_ = true;
  bool has_more_output_ = false;
  Status failure_;  // of the input behind `output_`
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_DECODED_INPUT_STREAM_H_
