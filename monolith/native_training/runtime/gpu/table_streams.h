// Orders the calls of a table that come on different streams: lookups after the last write, a write
// after everything. On one stream they are in order anyway, and nothing is recorded unless the
// stream may be gone by the time another one asks.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_STREAMS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_STREAMS_H_

#include <vector>

#include "monolith/native_training/runtime/gpu/launch.h"

namespace monolith {
namespace gpu {

// Promises that a stream is there as long as the process has tables; the default stream is.
void KeepStream(Stream stream);

// Makes `device` the current one: calls may come from threads that have another.
int UseDevice(int device);

// Not thread-safe.
class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Takes the current device.
  int Initialize();
  int device() const { return device_; }

  int BeginRead(Stream stream);
  int EndRead(Stream stream);
  int BeginWrite(Stream stream);
  int EndWrite(Stream stream);
  // Returns the stream of the last write.
  Stream write_stream() const { return write_.stream; }

 private:
  // The last use by a stream.
  struct Use {
    Stream stream = nullptr;
    void* event = nullptr;
    bool pending = false;
    bool recorded = false;
  };
  int Note(Stream stream, Use* use);
  int WaitFor(Stream stream, Use* use);

  int device_ = 0;
  Use write_;
  std::vector<Use> reads_;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_STREAMS_H_
