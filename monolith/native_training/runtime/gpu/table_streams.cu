#include <algorithm>
#include <mutex>

#include "monolith/native_training/runtime/gpu/table_streams.h"

namespace monolith {
namespace gpu {
namespace {

struct KeptStreams {
  std::mutex mutex;
  std::vector<Stream> streams = {nullptr};
};

KeptStreams& Kept() {
  static KeptStreams kept;
  return kept;
}

#if defined(__CUDACC__)
bool IsKept(Stream stream) {
  KeptStreams& kept = Kept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  return std::find(kept.streams.begin(), kept.streams.end(), stream) != kept.streams.end();
}
#endif

}  // namespace

void KeepStream(Stream stream) {
  KeptStreams& kept = Kept();
  std::lock_guard<std::mutex> lock(kept.mutex);
  if (std::find(kept.streams.begin(), kept.streams.end(), stream) == kept.streams.end()) {
    kept.streams.push_back(stream);
  }
}

#if defined(__CUDACC__)

int UseDevice(int device) {
  int current = -1;
  MONO_GPU_TRY(CheckCuda(cudaGetDevice(&current), "current device"));
  return current == device ? MONO_GPU_OK : CheckCuda(cudaSetDevice(device), "setting the device");
}

StreamOrder::~StreamOrder() {
  if (write_.event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(write_.event));
  for (const Use& use : reads_) {
    if (use.event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(use.event));
  }
}

int StreamOrder::Initialize() { return CheckCuda(cudaGetDevice(&device_), "current device"); }

// Streams that stay record their events when another stream asks, which is later: that waits for
// more than needed, but spares those who have one stream all of them.
int StreamOrder::Note(Stream stream, Use* use) {
  use->stream = stream;
  use->pending = true;
  use->recorded = false;
  if (IsKept(stream)) return MONO_GPU_OK;
  if (use->event == nullptr) {
    cudaEvent_t event = nullptr;
    MONO_GPU_TRY(CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
    use->event = event;
  }
  use->recorded = true;
  return CheckCuda(
      cudaEventRecord(static_cast<cudaEvent_t>(use->event), static_cast<cudaStream_t>(stream)),
      "recording an event");
}

int StreamOrder::WaitFor(Stream stream, Use* use) {
  if (!use->pending || use->stream == stream) return MONO_GPU_OK;
  if (!use->recorded) {
    if (use->event == nullptr) {
      cudaEvent_t event = nullptr;
      MONO_GPU_TRY(CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
      use->event = event;
    }
    MONO_GPU_TRY(CheckCuda(cudaEventRecord(static_cast<cudaEvent_t>(use->event),
                                           static_cast<cudaStream_t>(use->stream)),
                           "recording an event"));
    use->recorded = true;
  }
  return CheckCuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                                       static_cast<cudaEvent_t>(use->event), 0),
                   "waiting for another stream");
}

int StreamOrder::BeginRead(Stream stream) {
  MONO_GPU_TRY(UseDevice(device_));
  return WaitFor(stream, &write_);
}

int StreamOrder::EndRead(Stream stream) {
  auto mine = std::find_if(reads_.begin(), reads_.end(),
                           [stream](const Use& use) { return use.stream == stream; });
  if (mine == reads_.end()) {
    // One that no write waits for any more serves another stream.
    mine = std::find_if(reads_.begin(), reads_.end(), [](const Use& use) { return !use.pending; });
    if (mine == reads_.end()) mine = reads_.insert(reads_.end(), Use());
  }
  return Note(stream, &*mine);
}

int StreamOrder::BeginWrite(Stream stream) {
  MONO_GPU_TRY(BeginRead(stream));
  for (Use& use : reads_) {
    MONO_GPU_TRY(WaitFor(stream, &use));
    use.pending = false;
  }
  return MONO_GPU_OK;
}

int StreamOrder::EndWrite(Stream stream) { return Note(stream, &write_); }

#else

int UseDevice(int) { return MONO_GPU_OK; }
StreamOrder::~StreamOrder() = default;
int StreamOrder::Initialize() { return MONO_GPU_OK; }
int StreamOrder::BeginRead(Stream) { return MONO_GPU_OK; }
int StreamOrder::EndRead(Stream) { return MONO_GPU_OK; }
int StreamOrder::BeginWrite(Stream) { return MONO_GPU_OK; }
int StreamOrder::EndWrite(Stream stream) {
  write_.stream = stream;
  return MONO_GPU_OK;
}

#endif

}  // namespace gpu
}  // namespace monolith
